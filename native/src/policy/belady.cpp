// Belady's bound: what is used again last, or never, leaves; a block never used again does not come in. Equal chains are
// used head first, so that of two blocks of one request the deeper one leaves.
#include <bit>

#include "policy/references.h"

namespace kvterrace::policy {
namespace {

// Numbers, and which of them is the highest: a tree of 64 children a node.
class HighestOf {
 public:
  explicit HighestOf(std::size_t limit) {
    do {
      limit = (limit + 63) / 64;
      levels_.emplace_back(limit);
    } while (limit > 1);
  }

  void add(std::size_t number) {
    for (auto& words : levels_) {
      words[number / 64] |= std::uint64_t{1} << number % 64;
      number /= 64;
    }
  }
  void remove(std::size_t number) {
    for (auto& words : levels_) {
      if ((words[number / 64] &= ~(std::uint64_t{1} << number % 64)) != 0) return;
      number /= 64;
    }
  }
  // There is one.
  std::size_t highest() const {
    std::size_t at = 0;
    for (std::size_t level = levels_.size(); level-- > 0;)
      at = 64 * at + 63 - static_cast<std::size_t>(std::countl_zero(levels_[level][at]));
    return at;
  }
  std::size_t nbytes() const {
    std::size_t words = 0;
    for (const auto& level : levels_) words += level.size();
    return 8 * words;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

class Belady final : public BlockPolicy {
 public:
  Belady(std::size_t capacity, const Foresight& foresight)
      : BlockPolicy(capacity, Order::kTailFirst),
        foresight_(foresight),
        uses_(foresight.limit()),
        use_of_(foresight.distinct(), kOut) {}

  void access(Key key) override {
    const auto id = static_cast<std::uint32_t>(key);
    const std::size_t next = foresight_.next(id);
    if (use_of_[id] != kOut) {
      uses_.remove(use_of_[id]);
    } else {
      if (foresight_.never(next)) return gone(key);
      ++size_;
    }
    use_of_[id] = next;
    uses_.add(next);
    if (size_ > capacity_) evict_one();
  }
  bool inside(Key key) const override { return key < use_of_.size() && use_of_[key] != kOut; }
  std::size_t size() const override { return size_; }
  void forget(Key key) override {
    if (!inside(key)) return;
    uses_.remove(use_of_[key]);
    use_of_[key] = kOut;
    --size_;
  }
  std::size_t nbytes() const override { return uses_.nbytes() + use_of_.capacity() * sizeof(std::size_t); }

 private:
  static constexpr std::size_t kOut = ~std::size_t{0};

  void evict_one() override {
    const auto id = foresight_.id_of(uses_.highest());
    forget(id);
    gone(id);
  }

  const Foresight& foresight_;
  HighestOf uses_;                   // the next one of each block inside
  std::vector<std::size_t> use_of_;  // by id
  std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<BlockPolicy> make_belady(std::size_t capacity, const Foresight& foresight) {
  return std::make_unique<Belady>(capacity, foresight);
}

}  // namespace kvterrace::policy
