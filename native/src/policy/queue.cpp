// FIFO and LRU: one queue, from which the oldest leaves. They differ in whether a use makes a block the newest.
#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

template <bool kUsesMove>
class Queue final : public BlockPolicy {
 public:
  using BlockPolicy::BlockPolicy;

  void access(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) {
      if constexpr (kUsesMove) lists_.move(node, 0);
      return;
    }
    if (lists_.size(0) >= capacity_) evict_one();
    lists_.add(key, 0);
  }
  bool inside(Key key) const override { return lists_.find(key) != kNone; }
  std::size_t size() const override { return lists_.size(0); }
  void forget(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) lists_.remove(node);
  }
  std::size_t nbytes() const override { return lists_.nbytes(); }

 private:
  void evict_one() override { gone(lists_.remove(lists_.oldest(0))); }

  Lists lists_{1};
};

}  // namespace

std::unique_ptr<BlockPolicy> make_fifo(std::size_t capacity, Order order) {
  return std::make_unique<Queue<false>>(capacity, order);
}

std::unique_ptr<BlockPolicy> make_lru(std::size_t capacity, Order order) {
  return std::make_unique<Queue<true>>(capacity, order);
}

}  // namespace kvterrace::policy
