// The least often used leaves, of those the least recently used. Uses are counted from the time that a block came in.
#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class Lfu final : public BlockPolicy {
 public:
  explicit Lfu(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) {}

  void access(Key key) override {
    if (const auto node = by_uses_.find(key); node != kNone) return by_uses_.move(node, by_uses_[node].list + 1);
    if (size_ >= capacity_) evict_one();
    by_uses_.add(key, 1);
    least_ = 1;
    ++size_;
  }
  bool inside(Key key) const override { return by_uses_.find(key) != kNone; }
  std::size_t size() const override { return size_; }
  void forget(Key key) override {
    const auto node = by_uses_.find(key);
    if (node == kNone) return;
    by_uses_.remove(node);
    --size_;
  }
  std::size_t nbytes() const override { return by_uses_.nbytes(); }

 private:
  void evict_one() override {
    while (by_uses_.size(least_) == 0) ++least_;
    gone(by_uses_.remove(by_uses_.oldest(least_)));
    --size_;
  }

  Lists by_uses_{2};  // list n: used n times
  std::uint32_t least_ = 1;  // no list below it has a key
  std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<BlockPolicy> make_lfu(std::size_t capacity) { return std::make_unique<Lfu>(capacity); }

}  // namespace kvterrace::policy
