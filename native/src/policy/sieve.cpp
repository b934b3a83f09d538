// SIEVE (Zhang and others, NSDI 2024): a hand goes from the oldest block to the newest, spares those used since it last came
// by, and takes the first that was not.
#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class Sieve final : public BlockPolicy {
 public:
  explicit Sieve(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) {}

  void access(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) {
      lists_[node].uses = 1;
      return;
    }
    if (lists_.size(0) >= capacity_) evict_one();
    lists_.add(key, 0);
  }
  bool inside(Key key) const override { return lists_.find(key) != kNone; }
  std::size_t size() const override { return lists_.size(0); }
  void forget(Key key) override {
    if (const auto node = lists_.find(key); node != kNone) remove(node);
  }
  std::size_t nbytes() const override { return lists_.nbytes(); }

 private:
  void evict_one() override {
    if (hand_ == kNone) hand_ = lists_.oldest(0);
    while (lists_[hand_].uses) {
      lists_[hand_].uses = 0;
      hand_ = lists_[hand_].newer;
      if (hand_ == kNone) hand_ = lists_.oldest(0);
    }
    const auto node = hand_;
    gone(lists_[node].key);
    remove(node);
  }

  void remove(std::uint32_t node) {
    if (hand_ == node) hand_ = lists_[node].newer;
    lists_.remove(node);
  }

  Lists lists_{1};
  std::uint32_t hand_ = kNone;  // kNone: at the oldest
};

}  // namespace

std::unique_ptr<BlockPolicy> make_sieve(std::size_t capacity) { return std::make_unique<Sieve>(capacity); }

}  // namespace kvterrace::policy
