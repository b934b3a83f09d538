// A caller's memory, part by part: any strides, one plan for each way that parts lie. Knows addresses only; whoever holds
// one keeps the memory alive. Any thread; one block is not copied by two at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvterrace::record {

// One array: its first axis counts blocks.
struct Piece {
  std::uint8_t* address;
  std::vector<std::int64_t> shape, strides;  // strides in bytes, of any sign
  std::size_t item_nbytes;
};

class Places {
 public:
  // From a block's bytes in order: one piece for each part, or one piece for all of them - of equal parts along its second
  // axis, or of plain bytes. `first_part` is the number of the first in the layout. With `rows`, the pieces' first axis
  // counts the rows of a pool, and block `b` lies in row `rows[b]`. Throws std::invalid_argument.
  Places(const std::vector<Piece>& pieces, std::vector<std::uint32_t> part_nbytes, std::size_t first_part,
         std::vector<std::int64_t> rows = {});

  std::size_t blocks() const noexcept { return blocks_; }
  std::size_t first_part() const noexcept { return first_part_; }
  std::span<const std::uint32_t> part_nbytes() const noexcept { return part_nbytes_; }

  // Copies the parts of `block`, which lie end to end from `packed` on, to the caller.
  void scatter(std::size_t block, const std::uint8_t* packed) const noexcept;

  // Copies part `part` (from 0) of `block` to `packed`; returns the CRC32C of what is there then.
  std::uint32_t gather(std::size_t block, std::size_t part, std::uint8_t* packed) const noexcept;

 private:
  struct Axis {
    std::int64_t length, stride;
  };

  // How one part of a block lies: contiguous runs of `run_nbytes`, along axes from the outermost to the innermost.
  struct Plan {
    std::int64_t block_stride = 0;
    std::size_t run_nbytes = 0;
    std::vector<Axis> axes;
  };

  struct Place {
    std::uint8_t* address;
    std::size_t plan;
  };

  static Plan plan_of(const Piece& piece, std::size_t first_axis, std::size_t part_nbytes, std::size_t part);
  void add(std::uint8_t* address, Plan plan);
  void split(const Piece& piece);
  std::int64_t row(std::size_t block) const noexcept {
    return rows_.empty() ? static_cast<std::int64_t>(block) : rows_[block];
  }

  std::size_t blocks_ = 0, first_part_, block_nbytes_ = 0;
  std::vector<std::uint32_t> part_nbytes_;
  std::vector<std::int64_t> rows_;
  std::vector<Plan> plans_;
  std::vector<Place> places_;
};

}  // namespace kvterrace::record
