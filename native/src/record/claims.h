// Who may touch the caller's memory of each block of a transfer, decided without the GIL.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvterrace::record {

// One state for each block: open, then perhaps being copied and copied, then settled. A copy that came to nothing leaves
// its block open; else never back. A block is copied by one at most, never once it is settled, and is not settled while it is
// copied. Any thread; nothing blocks.
class Claims {
 public:
  enum class Settled : std::uint8_t { first, before, refused };

  explicit Claims(std::size_t blocks) : states_(new std::atomic<std::uint8_t>[blocks]), blocks_(blocks) {
    for (std::size_t at = 0; at < blocks; ++at) states_[at].store(kOpen, std::memory_order_relaxed);
  }

  std::size_t size() const noexcept { return blocks_; }

  // Claims the caller's memory of a block for copying; false if somebody did, or the block is settled, e.g. expired.
  bool begin_copy(std::size_t at) noexcept { return move(at, kOpen, kCopying); }

  // The copy has ended, and what it wrote is there for whoever settles the block. False if none was under way.
  bool end_copy(std::size_t at) noexcept { return move(at, kCopying, kCopied); }

  // The copy came to nothing: what it wrote is not believed, and the block is open again. False if none was under way.
  bool abandon_copy(std::size_t at) noexcept { return move(at, kCopying, kOpen); }

  // Settles a block: `first` if this was the first word, `before` if it was settled, `refused` while it is copied.
  Settled settle(std::size_t at) noexcept {
    std::uint8_t state = states_[at].load(std::memory_order_acquire);
    while (state == kOpen || state == kCopied)
      if (states_[at].compare_exchange_weak(state, kSettled, std::memory_order_acq_rel, std::memory_order_acquire))
        return Settled::first;
    return state == kSettled ? Settled::before : Settled::refused;
  }

  // Settles every block that nobody began to copy; returns these.
  std::vector<std::size_t> give_up() {
    std::vector<std::size_t> settled;
    settled.reserve(blocks_);
    for (std::size_t at = 0; at < blocks_; ++at)
      if (move(at, kOpen, kSettled)) settled.push_back(at);
    return settled;
  }

  bool is_open(std::size_t at) const noexcept { return states_[at].load(std::memory_order_acquire) != kSettled; }

 private:
  static constexpr std::uint8_t kOpen = 0, kCopying = 1, kCopied = 2, kSettled = 3;

  bool move(std::size_t at, std::uint8_t from, std::uint8_t to) noexcept {
    return states_[at].compare_exchange_strong(from, to, std::memory_order_acq_rel, std::memory_order_relaxed);
  }

  std::unique_ptr<std::atomic<std::uint8_t>[]> states_;
  std::size_t blocks_;
};

}  // namespace kvterrace::record
