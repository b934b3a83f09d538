#include "uring.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <utility>

#include "core.h"

namespace kvterrace {

namespace {

// More than pieces may be in the ring at once (`Limits::depth`), a call to come back for each, and the watch on kicks.
constexpr std::uint32_t kEntries = 512;
constexpr std::uint64_t kKick = 1;  // user_data of that watch: no piece lies there
constexpr std::uint64_t kCallBack = 2;
constexpr int kRetryMs = 1;

}  // namespace

int UringDevice::start(Core& core) {
  kick_fd_ = Descriptor::eventfd(0);
  const Descriptor started = Descriptor::eventfd(0);
  // The thread opens the ring itself: the kernel then takes submissions from no other.
  core.spawn("kvt-uring", [this, &core, fd = started.get()] { run(core, fd); });
  clear(started.get());
  return start_error_;
}

void UringDevice::kick() {
  if (asleep_.exchange(false)) wake_thread();
}

void UringDevice::wake_thread() {
  std::lock_guard lock(mutex_);  // a kick that comes late must not reach a descriptor number that somebody else has by now
  add_to(kick_fd_.get());
}

void UringDevice::stop() {
  stopping_ = true;
  wake_thread();
}

void UringDevice::register_memory(void* start, std::size_t nbytes, int fd) {
  {
    std::lock_guard lock(mutex_);
    region_ = {start, nbytes, fd};
  }
  wake_thread();
}

void UringDevice::run(Core& core, int started_fd) {
  ring_ = std::make_unique<Ring>();
  start_error_ = ring_->open(kEntries);
  const bool usable = start_error_ == 0;
  if (!usable) ring_.reset();
  add_to(started_fd);
  if (usable) drive(core);
  ring_.reset();
  std::lock_guard lock(mutex_);
  kick_fd_.close();
}

void UringDevice::drive(Core& core) {
  watch_kicks();
  while (!stopping_) {
    // Before the last look for work: whoever submits after that look finds us asleep, and kicks.
    asleep_ = true;
    while (auto piece = core.next_piece()) give(core, std::move(piece));
    call_back(core.take_recalls());
    const int number = ring_->enter();
    asleep_ = false;
    // EBUSY and EAGAIN: the kernel wants completions reaped, or memory, first. Nothing is lost: entries stay in the ring.
    if (number != 0) ::poll(nullptr, 0, kRetryMs);
    ring_->reap([&](const Cqe& cqe) {
      if (cqe.user_data == kCallBack) return;  // the piece itself says how that went
      if (cqe.user_data != kKick) {
        auto* piece = reinterpret_cast<Piece*>(cqe.user_data);
        in_ring_.erase(piece);
        return took(core, std::unique_ptr<Piece>(piece), cqe.res);
      }
      watch_kicks();
      register_now();
    });
  }
}

void UringDevice::watch_kicks() {
  Sqe* sqe = ring_->next();
  sqe->opcode = kOpRead;
  sqe->fd = kick_fd_.get();
  sqe->addr = reinterpret_cast<std::uint64_t>(&kick_count_);
  sqe->len = sizeof kick_count_;
  sqe->user_data = kKick;
}

void UringDevice::give(Core& core, std::unique_ptr<Piece> owned) {
  const int fd = owned->op->file->descriptor();
  if (fd < 0) return took(core, std::move(owned), fd);
  Sqe* sqe = ring_->next();
  if (sqe == nullptr) std::abort();  // the ring is deeper than what may be in flight
  Piece* piece = owned.release();    // until its completion comes
  in_ring_.insert(piece);
  sqe->fd = fd;
  sqe->flags = piece->asynchronous ? kSqeAsync : 0;
  sqe->user_data = reinterpret_cast<std::uint64_t>(piece);
  if (piece->op->kind == Kind::kSync) {
    sqe->opcode = kOpFsync;
    sqe->op_flags = kFsyncDatasync;
    return;
  }
  const bool read = piece->op->kind == Kind::kRead;
  sqe->off = piece->place();
  const iovec& first = piece->memory.front();
  const int region = piece->memory.size() == 1 ? ring_->registered(first.iov_base, first.iov_len) : -1;
  if (region >= 0) {
    sqe->opcode = read ? kOpReadFixed : kOpWriteFixed;
    sqe->addr = reinterpret_cast<std::uint64_t>(first.iov_base);
    sqe->len = static_cast<std::uint32_t>(first.iov_len);
    sqe->buf_index = static_cast<std::uint16_t>(region);
  } else {
    sqe->opcode = read ? kOpReadv : kOpWritev;
    sqe->addr = reinterpret_cast<std::uint64_t>(piece->memory.data());
    sqe->len = static_cast<std::uint32_t>(piece->memory.size());
  }
}

void UringDevice::took(Core& core, std::unique_ptr<Piece> piece, std::int64_t answer) {
  if (piece->advance(answer)) return give(core, std::move(piece));
  core.piece_done(*piece);
}

// A piece is named by its address. The kernel takes entries in order, and a piece is freed only when its completion was
// taken, so none that comes to lie there later is in the ring before this one has been dealt with.
void UringDevice::call_back(const std::vector<std::uint64_t>& ids) {
  for (Piece* piece : in_ring_) {
    if (piece->recalled || std::find(ids.begin(), ids.end(), piece->op->id) == ids.end()) continue;
    Sqe* sqe = ring_->next();
    if (sqe == nullptr) return;  // it then runs to its end
    piece->recalled = true;
    sqe->opcode = kOpAsyncCancel;
    sqe->addr = reinterpret_cast<std::uint64_t>(piece);
    sqe->user_data = kCallBack;
  }
}

void UringDevice::register_now() {
  Region region{nullptr, 0, -1};
  {
    std::lock_guard lock(mutex_);
    std::swap(region, region_);
  }
  if (region.fd >= 0) add_to(region.fd, ring_->register_memory(region.start, region.nbytes) == 0 ? 2 : 1);
}

}  // namespace kvterrace
