#include "places.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "crc32c.h"

namespace kvterrace::record {
namespace {

// Measured on a Xeon (2 MiB of second-level cache a core): a block of this size and more is copied faster past the cache.
constexpr std::size_t kStreamBlockNbytes = 256 << 10;
// Shorter runs are copied through the cache: too much of them is parts of lines.
constexpr std::size_t kStreamRunNbytes = 512;
// Gathered before it is summed: still in a first- or second-level cache.
constexpr std::size_t kGatherNbytes = 16 << 10;

enum class Way { gather, scatter, scatter_streaming };

template <Way way>
inline void move_run(std::uint8_t* place, std::uint8_t* packed, std::size_t nbytes) noexcept {
  if constexpr (way == Way::gather) std::memcpy(packed, place, nbytes);
  if constexpr (way == Way::scatter) std::memcpy(place, packed, nbytes);
  if constexpr (way == Way::scatter_streaming) stream_copy(place, packed, nbytes);
}

// A constant length lets the compiler move an element by one load and one store.
template <Way way, std::size_t nbytes>
void move_items(std::uint8_t* place, std::int64_t stride, std::uint8_t* packed, std::int64_t count) noexcept {
  for (std::int64_t at = 0; at < count; ++at, place += stride, packed += nbytes) move_run<way>(place, packed, nbytes);
}

template <Way way>
void move_runs(std::uint8_t* place, std::int64_t stride, std::uint8_t* packed, std::int64_t count,
               std::size_t nbytes) noexcept {
  switch (nbytes) {
    case 1: return move_items<way, 1>(place, stride, packed, count);
    case 2: return move_items<way, 2>(place, stride, packed, count);
    case 4: return move_items<way, 4>(place, stride, packed, count);
    case 8: return move_items<way, 8>(place, stride, packed, count);
    case 16: return move_items<way, 16>(place, stride, packed, count);
    default:
      for (std::int64_t at = 0; at < count; ++at, place += stride, packed += nbytes) move_run<way>(place, packed, nbytes);
  }
}

// `nbytes` in `axes` (what is left of them), end to end from `packed` on.
template <Way way, class Axes>
void move_all(std::uint8_t* place, std::uint8_t* packed, Axes axes, std::size_t run_nbytes, std::size_t nbytes) noexcept {
  if (axes.empty()) return move_run<way>(place, packed, run_nbytes);
  const auto [length, stride] = axes[0];
  if (axes.size() == 1) return move_runs<way>(place, stride, packed, length, run_nbytes);
  const std::size_t step = nbytes / static_cast<std::size_t>(length);
  for (std::int64_t at = 0; at < length; ++at, place += stride, packed += step)
    move_all<way>(place, packed, axes.subspan(1), run_nbytes, step);
}

// The same, summed piece by piece on the way.
template <class Axes>
std::uint32_t gather_sum(std::uint8_t* place, std::uint8_t* packed, Axes axes, std::size_t run_nbytes,
                         std::size_t nbytes, bool streaming, std::uint32_t crc) noexcept {
  if (axes.empty())
    return streaming ? stream_crc32c(packed, place, nbytes, crc) : copy_crc32c(packed, place, nbytes, crc);
  if (nbytes <= kGatherNbytes || (axes.size() == 1 && run_nbytes < kGatherNbytes / 4)) {
    move_all<Way::gather>(place, packed, axes, run_nbytes, nbytes);
    return crc32c(packed, nbytes, crc);
  }
  const auto [length, stride] = axes[0];
  const std::size_t step = nbytes / static_cast<std::size_t>(length);
  for (std::int64_t at = 0; at < length; ++at, place += stride, packed += step)
    crc = gather_sum(place, packed, axes.subspan(1), run_nbytes, step, streaming, crc);
  return crc;
}

}  // namespace

Places::Places(const std::vector<Piece>& pieces, std::vector<std::uint32_t> part_nbytes, std::size_t first_part,
               std::vector<std::int64_t> rows)
    : first_part_(first_part), part_nbytes_(std::move(part_nbytes)), rows_(std::move(rows)) {
  if (pieces.empty() || part_nbytes_.empty()) throw std::invalid_argument("no pieces, or no parts");
  for (const Piece& piece : pieces) {
    if (piece.shape.empty() || piece.shape.size() != piece.strides.size() || piece.item_nbytes == 0)
      throw std::invalid_argument("a piece needs an axis of blocks, a stride for each axis, and items of some size");
    for (const std::int64_t length : piece.shape)
      if (length < 0) throw std::invalid_argument("a piece has an axis of negative length");
    if (piece.shape[0] != pieces[0].shape[0]) throw std::invalid_argument("pieces of different numbers of blocks");
  }
  blocks_ = rows_.empty() ? static_cast<std::size_t>(pieces[0].shape[0]) : rows_.size();
  for (const std::int64_t row : rows_)
    if (row < 0 || row >= pieces[0].shape[0]) throw std::invalid_argument("a row that no piece has");
  for (const std::uint32_t nbytes : part_nbytes_) block_nbytes_ += nbytes;
  places_.reserve(part_nbytes_.size());
  if (pieces.size() == part_nbytes_.size()) {
    for (std::size_t part = 0; part < pieces.size(); ++part)
      add(pieces[part].address, plan_of(pieces[part], 1, part_nbytes_[part], part));
  } else if (pieces.size() == 1) {
    split(pieces[0]);
  } else {
    throw std::invalid_argument(std::to_string(pieces.size()) + " pieces for " + std::to_string(part_nbytes_.size()) +
                                " parts");
  }
}

void Places::split(const Piece& piece) {
  const std::size_t parts = part_nbytes_.size(), dimensions = piece.shape.size();
  const bool bytes = dimensions == 2 && piece.item_nbytes == 1 && piece.strides[1] == 1;
  if (bytes && static_cast<std::size_t>(piece.shape[1]) == block_nbytes_) {
    std::size_t at = 0;
    for (std::size_t part = 0; part < parts; at += part_nbytes_[part], ++part)
      add(piece.address + at, Plan{piece.strides[0], part_nbytes_[part], {}});
  } else if (dimensions >= 2 && static_cast<std::size_t>(piece.shape[1]) == parts) {
    for (std::size_t part = 0; part < parts; ++part)
      add(piece.address + static_cast<std::int64_t>(part) * piece.strides[1], plan_of(piece, 2, part_nbytes_[part], part));
  } else {
    throw std::invalid_argument("one piece for all parts must be of plain bytes, or count parts on its second axis");
  }
}

Places::Plan Places::plan_of(const Piece& piece, std::size_t first_axis, std::size_t part_nbytes, std::size_t part) {
  Plan plan{piece.strides[0], piece.item_nbytes, {}};
  std::size_t nbytes = piece.item_nbytes;
  for (std::size_t axis = piece.shape.size(); axis-- > first_axis;) {
    const std::int64_t length = piece.shape[axis], stride = piece.strides[axis];
    nbytes *= static_cast<std::size_t>(length);
    if (length == 1) continue;
    if (plan.axes.empty() && stride == static_cast<std::int64_t>(plan.run_nbytes))
      plan.run_nbytes *= static_cast<std::size_t>(length);
    else if (!plan.axes.empty() && stride == plan.axes.front().stride * plan.axes.front().length)
      plan.axes.front().length *= length;
    else
      plan.axes.insert(plan.axes.begin(), Axis{length, stride});
  }
  if (nbytes != part_nbytes)
    throw std::invalid_argument("part " + std::to_string(part) + " has " + std::to_string(nbytes) + " B a block, not " +
                                std::to_string(part_nbytes) + " B");
  if (nbytes == 0) return Plan{piece.strides[0], 0, {}};
  return plan;
}

void Places::add(std::uint8_t* address, Plan plan) {
  const auto same = [&plan](const Plan& other) {
    if (other.block_stride != plan.block_stride || other.run_nbytes != plan.run_nbytes ||
        other.axes.size() != plan.axes.size())
      return false;
    for (std::size_t at = 0; at < plan.axes.size(); ++at)
      if (other.axes[at].length != plan.axes[at].length || other.axes[at].stride != plan.axes[at].stride) return false;
    return true;
  };
  if (plans_.empty() || !same(plans_.back())) plans_.push_back(std::move(plan));
  places_.push_back(Place{address, plans_.size() - 1});
}

void Places::scatter(std::size_t block, const std::uint8_t* packed) const noexcept {
  auto from = const_cast<std::uint8_t*>(packed);  // read only: the moves are written once for both ways
  for (std::size_t part = 0; part < places_.size(); from += part_nbytes_[part], ++part) {
    const Plan& plan = plans_[places_[part].plan];
    std::uint8_t* to = places_[part].address + row(block) * plan.block_stride;
    const std::span<const Axis> axes(plan.axes);
    if (block_nbytes_ >= kStreamBlockNbytes && plan.run_nbytes >= kStreamRunNbytes)
      move_all<Way::scatter_streaming>(to, from, axes, plan.run_nbytes, part_nbytes_[part]);
    else
      move_all<Way::scatter>(to, from, axes, plan.run_nbytes, part_nbytes_[part]);
  }
  end_streams();
}

std::uint32_t Places::gather(std::size_t block, std::size_t part, std::uint8_t* packed) const noexcept {
  const Plan& plan = plans_[places_[part].plan];
  std::uint8_t* from = places_[part].address + row(block) * plan.block_stride;
  const bool streaming = block_nbytes_ >= kStreamBlockNbytes;
  const std::uint32_t crc = gather_sum(from, packed, std::span<const Axis>(plan.axes), plan.run_nbytes,
                                       part_nbytes_[part], streaming, 0);
  if (streaming) end_streams();
  return crc;
}

}  // namespace kvterrace::record
