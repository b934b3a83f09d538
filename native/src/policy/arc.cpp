// ARC (Megiddo and Modha, FAST 2003): blocks used once and blocks used again, each by recency; what came back too late says
// which of the two should have more room.
#include <algorithm>

#include "policy/lists.h"
#include "policy/references.h"

namespace kvterrace::policy {
namespace {

class Arc final : public BlockPolicy {
 public:
  explicit Arc(std::size_t capacity) : BlockPolicy(capacity, Order::kTailFirst) {}

  void access(Key key) override {
    const auto node = lists_.find(key);
    if (node == kNone) return come_in(key);
    switch (lists_[node].list) {
      case kOnceGone:
        once_target_ = std::min(room(), once_target_ + std::max(1.0, ratio(kAgainGone, kOnceGone)));
        replace(false);
        lists_.move(node, kAgain);
        break;
      case kAgainGone:
        once_target_ = std::max(0.0, once_target_ - std::max(1.0, ratio(kOnceGone, kAgainGone)));
        replace(true);
        lists_.move(node, kAgain);
        break;
      default:
        lists_.move(node, kAgain);
    }
  }
  bool inside(Key key) const override {
    const auto node = lists_.find(key);
    return node != kNone && lists_[node].list <= kAgain;
  }
  std::size_t size() const override { return lists_.size(kOnce) + lists_.size(kAgain); }
  void forget(Key key) override {
    if (inside(key)) lists_.remove(lists_.find(key));
  }
  std::size_t nbytes() const override { return lists_.nbytes(); }

 private:
  enum : std::uint32_t { kOnce, kAgain, kOnceGone, kAgainGone };  // T1, T2, B1, B2

  double room() const { return static_cast<double>(capacity_); }
  double ratio(std::uint32_t one, std::uint32_t other) const {
    return static_cast<double>(lists_.size(one)) / static_cast<double>(lists_.size(other));
  }

  void come_in(Key key) {
    const std::size_t once = lists_.size(kOnce) + lists_.size(kOnceGone);
    const std::size_t all = once + lists_.size(kAgain) + lists_.size(kAgainGone);
    if (once >= capacity_) {
      if (lists_.size(kOnce) < capacity_) {
        lists_.remove(lists_.oldest(kOnceGone));
        replace(false);
      } else {
        gone(lists_.remove(lists_.oldest(kOnce)));
      }
    } else if (all >= capacity_) {
      if (all >= 2 * capacity_) lists_.remove(lists_.oldest(kAgainGone));
      replace(false);
    }
    lists_.add(key, kOnce);
  }

  // Only where there is no room: after `forget` there may be.
  void replace(bool from_again) {
    if (size() >= capacity_) throw_out(from_again);
  }

  void throw_out(bool from_again) {
    const auto once = static_cast<double>(lists_.size(kOnce));
    const bool first = lists_.size(kOnce) > 0 && (once > once_target_ || (from_again && once == once_target_));
    const std::uint32_t list = first || lists_.size(kAgain) == 0 ? kOnce : kAgain;
    const auto node = lists_.oldest(list);
    gone(lists_[node].key);
    lists_.move(node, list == kOnce ? kOnceGone : kAgainGone);
  }

  void evict_one() override { throw_out(false); }

  void retune() override {
    once_target_ = std::min(once_target_, room());
    while (lists_.size(kOnceGone) > capacity_) lists_.remove(lists_.oldest(kOnceGone));
    while (lists_.size(kAgainGone) > capacity_) lists_.remove(lists_.oldest(kAgainGone));
  }

  Lists lists_{4};
  double once_target_ = 0;  // p
};

}  // namespace

std::unique_ptr<BlockPolicy> make_arc(std::size_t capacity) { return std::make_unique<Arc>(capacity); }

}  // namespace kvterrace::policy
