// 2Q (Johnson and Shasha, VLDB 1994): new blocks wait in a queue of a quarter of the room; those that come back after they
// left it, within half as many blocks as there is room for, are kept by recency.
#include <algorithm>

#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class TwoQ final : public BlockPolicy {
 public:
  explicit TwoQ(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) { retune(); }

  void access(Key key) override {
    const auto node = lists_.find(key);
    if (node == kNone) {
      make_room();
      lists_.add(key, kIn);
    } else if (lists_[node].list == kMain) {
      lists_.move(node, kMain);
    } else if (lists_[node].list == kOut) {
      lists_.remove(node);
      make_room();
      lists_.add(key, kMain);
    }
  }
  bool inside(Key key) const override {
    const auto node = lists_.find(key);
    return node != kNone && lists_[node].list != kOut;
  }
  std::size_t size() const override { return lists_.size(kIn) + lists_.size(kMain); }
  void forget(Key key) override {
    if (inside(key)) lists_.remove(lists_.find(key));
  }
  std::size_t nbytes() const override { return lists_.nbytes(); }

 private:
  enum : std::uint32_t { kIn, kMain, kOut };

  void retune() override {
    in_ = std::max<std::size_t>(1, capacity_ / 4);
    out_ = std::max<std::size_t>(1, capacity_ / 2);
    while (lists_.size(kOut) > out_) lists_.remove(lists_.oldest(kOut));
  }

  void make_room() {
    if (size() >= capacity_) evict_one();
  }

  void evict_one() override {
    if (lists_.size(kIn) > in_ || lists_.size(kMain) == 0) {
      const auto node = lists_.oldest(kIn);
      gone(lists_[node].key);
      lists_.move(node, kOut);
      if (lists_.size(kOut) > out_) lists_.remove(lists_.oldest(kOut));
    } else {
      gone(lists_.remove(lists_.oldest(kMain)));
    }
  }

  Lists lists_{3};
  std::size_t in_ = 1;
  std::size_t out_ = 1;
};

}  // namespace

std::unique_ptr<BlockPolicy> make_two_q(std::size_t capacity) { return std::make_unique<TwoQ>(capacity); }

}  // namespace kvterrace::policy
