#include "policy/return_index.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvterrace::policy {
namespace {

// The lead that changes the leader, as a share of the accesses.
constexpr double kLead = 0.005;

std::size_t hits(const Directory& directory, std::span<const Key> keys) {
  std::size_t count = 0;
  while (count < keys.size() && directory.inside(keys[count])) ++count;
  return count;
}

std::size_t nbytes_of(const std::unordered_set<Key>& keys) {  // a node: a pointer and the key, in malloc's 32 B
  return keys.bucket_count() * sizeof(void*) + keys.size() * 32;
}

}  // namespace

ReturnIndex::ReturnIndex(std::size_t capacity, std::uint64_t seed, double depth_worth)
    : capacity_(capacity), depth_worth_(depth_worth), index_(capacity, seed, depth_worth), arc_(capacity) {}

void ReturnIndex::request(const Request& request) {
  if (!std::isfinite(request.now_s)) throw std::invalid_argument("now_s must be a finite time in seconds");
  if (!request.extend) judge(request);
  index_.request(request);
  arc_.request(request);
  if (!strays_.empty() || !missing_.empty()) {
    for (const Key key : request.keys) {  // the leader has taken it in, or has evicted it at once
      missing_.erase(key);
      strays_.erase(key);
    }
  }
  settle();
  while (size() > capacity_ && evict_stray()) {
  }
}

void ReturnIndex::judge(const Request& request) {
  const auto blocks = static_cast<double>(request.keys.size());
  const double memory = std::max(20.0 * static_cast<double>(capacity_), 20000.0);
  const double kept = std::exp(-blocks / memory);
  ahead_ = ahead_ * kept + (worth(hits(index_, request.keys)) - worth(hits(arc_, request.keys)));
  accesses_ = accesses_ * kept + worth(request.keys.size());
  blocks_ = blocks_ * kept + blocks;
  if (blocks_ <= 0.25 * memory) return;
  if (arc_leads_ ? ahead_ > kLead * accesses_ : ahead_ < -kLead * accesses_) change_leader();
}

// Of the first so many blocks of a chain.
double ReturnIndex::worth(std::size_t count) const {
  const auto n = static_cast<double>(count);
  return n + 0.5 * depth_worth_ * n * (n - 1.0);
}

void ReturnIndex::change_leader() {
  std::unordered_set<Key> present(strays_);
  std::vector<Key> order(stray_order_.begin() + static_cast<std::ptrdiff_t>(next_stray_), stray_order_.end());
  for (const Key key : arc_leads_ ? arc_.keys() : index_.keys()) {
    if (missing_.count(key) > 0) continue;
    present.insert(key);
    order.push_back(key);
  }
  arc_leads_ = !arc_leads_;
  missing_.clear();
  for (const Key key : arc_leads_ ? arc_.keys() : index_.keys()) {
    if (present.erase(key) == 0) missing_.insert(key);
  }
  strays_ = std::move(present);
  stray_order_ = std::move(order);
  next_stray_ = 0;
}

// What the leader has evicted leaves, if it was inside; returns how many did. What the other has evicted is of no account.
std::size_t ReturnIndex::settle() {
  other().take_evicted();
  const std::size_t before = evicted_.size();
  for (const Key key : leader().take_evicted()) {
    if (missing_.erase(key) > 0) continue;
    if (arc_leads_ && arc_.inside(key)) continue;  // ARC may evict a block and take it in again in one request
    evicted_.push_back(key);
  }
  return evicted_.size() - before;
}

bool ReturnIndex::evict_stray() {
  while (next_stray_ < stray_order_.size()) {
    const Key key = stray_order_[next_stray_++];
    if (strays_.erase(key) == 0) continue;
    evicted_.push_back(key);
    return true;
  }
  stray_order_ = {};
  next_stray_ = 0;
  return false;
}

void ReturnIndex::resize(std::size_t capacity) {
  capacity_ = capacity;
  index_.resize(capacity);
  arc_.resize(capacity);
  settle();
  while (size() > capacity_ && evict_stray()) {
  }
}

void ReturnIndex::evict(std::size_t n) {
  while (n > 0 && evict_stray()) --n;
  while (n > 0 && leader().size() > 0) {
    leader().evict(n);
    n -= settle();
  }
  if (other().size() > leader().size()) other().evict(other().size() - leader().size());
  other().take_evicted();
}

void ReturnIndex::forget(Key key) {
  index_.forget(key);
  arc_.forget(key);
  strays_.erase(key);
  missing_.erase(key);
}

bool ReturnIndex::inside(Key key) const {
  if (strays_.empty() && missing_.empty()) return leader().inside(key);
  return strays_.count(key) > 0 || (leader().inside(key) && missing_.count(key) == 0);
}

std::size_t ReturnIndex::nbytes() const {
  return sizeof(*this) - sizeof(index_) - sizeof(arc_) + index_.nbytes() + arc_.nbytes() + nbytes_of(strays_) +
         nbytes_of(missing_) + (stray_order_.capacity() + evicted_.capacity()) * sizeof(Key);
}

}  // namespace kvterrace::policy
