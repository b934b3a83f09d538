// S3-FIFO (Yang and others, SOSP 2023): a small queue of a tenth of the room, out of which only what was used twice more goes
// on to the main queue; what left the small one and comes back goes there at once.
#include <algorithm>

#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class S3Fifo final : public BlockPolicy {
 public:
  explicit S3Fifo(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) { retune(); }

  void access(Key key) override {
    const auto node = lists_.find(key);
    if (node != kNone && lists_[node].list != kGhost) {
      if (lists_[node].uses < kMost) ++lists_[node].uses;
      return;
    }
    if (size() >= capacity_) evict_one();
    const auto ghost = lists_.find(key);  // if it is one still
    if (ghost != kNone) {
      lists_.move(ghost, kMain);
    } else {
      lists_.add(key, kSmall);
    }
  }
  bool inside(Key key) const override {
    const auto node = lists_.find(key);
    return node != kNone && lists_[node].list != kGhost;
  }
  std::size_t size() const override { return lists_.size(kSmall) + lists_.size(kMain); }
  void forget(Key key) override {
    if (inside(key)) lists_.remove(lists_.find(key));
  }
  std::size_t nbytes() const override { return lists_.nbytes(); }

 private:
  enum : std::uint32_t { kSmall, kMain, kGhost };
  static constexpr std::uint32_t kMost = 3;
  static constexpr std::uint32_t kGoesOn = 2;  // uses in the small queue that take a block to the main one

  void retune() override {
    small_ = std::max<std::size_t>(1, capacity_ / 10);
    main_ = capacity_ - std::min(capacity_, small_);
    while (lists_.size(kGhost) > main_) lists_.remove(lists_.oldest(kGhost));
  }

  void evict_one() override {
    const std::size_t before = size();
    while (size() == before) {
      const bool small = lists_.size(kSmall) >= small_ || lists_.size(kMain) == 0;
      while (small && size() == before && lists_.size(kSmall) > 0 && lists_.size(kMain) <= main_) from_small();
      while (size() == before && lists_.size(kMain) > 0 && (!small || lists_.size(kMain) > main_)) from_main();
    }
  }

  void from_small() {
    const auto node = lists_.oldest(kSmall);
    const bool goes_on = lists_[node].uses >= kGoesOn;
    lists_[node].uses = 0;
    if (goes_on) return lists_.move(node, kMain);
    gone(lists_[node].key);
    lists_.move(node, kGhost);
    if (lists_.size(kGhost) > main_) lists_.remove(lists_.oldest(kGhost));
  }

  void from_main() {
    const auto node = lists_.oldest(kMain);
    if (lists_[node].uses == 0) return gone(lists_.remove(node));
    --lists_[node].uses;
    lists_.move(node, kMain);
  }

  Lists lists_{3};
  std::size_t small_ = 1;
  std::size_t main_ = 0;  // and how many ghosts are remembered
};

}  // namespace

std::unique_ptr<BlockPolicy> make_s3_fifo(std::size_t capacity) { return std::make_unique<S3Fifo>(capacity); }

}  // namespace kvterrace::policy
