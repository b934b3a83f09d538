// The least recently used leaves.
#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class Lru final : public BlockPolicy {
 public:
  using BlockPolicy::BlockPolicy;

  void access(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) return lists_.move(node, 0);
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

std::unique_ptr<BlockPolicy> make_lru(std::size_t capacity, Order order) {
  return std::make_unique<Lru>(capacity, order);
}

}  // namespace kvterrace::policy
