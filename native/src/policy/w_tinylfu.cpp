// W-TinyLFU (Einziger, Friedman and Manes, TOS 2017) with exact counts up to 15: a window of a fifth of the room by recency;
// what leaves it takes the place of the main part's next to go if it was used more often. The main part is a segmented LRU,
// four fifths of it for blocks used there. All counts are halved after ten uses for each block of room.
#include <algorithm>

#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class WTinyLfu final : public BlockPolicy {
 public:
  explicit WTinyLfu(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) { retune(); }

  void access(Key key) override {
    count(key);
    const auto node = lists_.find(key);
    if (node == kNone) {
      lists_.add(key, kWindow);
      if (lists_.size(kWindow) > window_) leave_window();
    } else if (lists_[node].list == kWindow) {
      lists_.move(node, kWindow);
    } else {
      lists_.move(node, kProtected);
      if (lists_.size(kProtected) > protected_) lists_.move(lists_.oldest(kProtected), kProbation);
    }
  }
  bool inside(Key key) const override { return lists_.find(key) != kNone; }
  std::size_t size() const override { return lists_.size(kWindow) + main_size(); }
  void forget(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) lists_.remove(node);
  }
  std::size_t nbytes() const override { return lists_.nbytes() + uses_.nbytes(); }

 private:
  enum : std::uint32_t { kWindow, kProbation, kProtected };
  static constexpr std::uint32_t kMost = 15;  // that a count of four bits holds

  void retune() override {
    window_ = std::max<std::size_t>(1, capacity_ / 5);
    main_ = capacity_ - std::min(capacity_, window_);
    protected_ = main_ * 4 / 5;
    while (lists_.size(kProtected) > protected_) lists_.move(lists_.oldest(kProtected), kProbation);
    while (lists_.size(kWindow) > window_) leave_window();
  }

  std::size_t main_size() const { return lists_.size(kProbation) + lists_.size(kProtected); }

  void count(Key key) {
    const auto uses = uses_.find(key);
    uses_.set(key, uses == kNone ? 1 : std::min(uses + 1, kMost));
    if (++counted_ < 10 * capacity_) return;
    counted_ = 0;
    uses_.halve();
  }

  std::uint32_t uses(std::uint32_t node) const {
    const auto found = uses_.find(lists_[node].key);
    return found == kNone ? 0 : found;
  }

  std::uint32_t next_of_main() const {
    return lists_.size(kProbation) > 0 ? lists_.oldest(kProbation) : lists_.oldest(kProtected);
  }

  void leave_window() {
    const auto node = lists_.oldest(kWindow);
    if (main_size() < main_) return lists_.move(node, kProbation);
    const auto other = next_of_main();
    if (other == kNone || uses(node) <= uses(other)) return gone(lists_.remove(node));
    gone(lists_.remove(other));
    lists_.move(node, kProbation);
  }

  void evict_one() override {
    gone(lists_.remove(main_size() > 0 ? next_of_main() : lists_.oldest(kWindow)));
  }

  Lists lists_{3};
  KeyMap uses_;
  std::size_t counted_ = 0;
  std::size_t window_ = 1;
  std::size_t main_ = 0;
  std::size_t protected_ = 0;
};

}  // namespace

std::unique_ptr<BlockPolicy> make_w_tinylfu(std::size_t capacity) { return std::make_unique<WTinyLfu>(capacity); }

}  // namespace kvterrace::policy
