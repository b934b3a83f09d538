#include "policy/gate_arc.h"

#include <algorithm>

namespace kvterrace::policy {

GateArc::GateArc(std::size_t capacity) : capacity_(capacity) {}

void GateArc::request(const Request& request) {
  for (std::size_t at = request.keys.size(); at-- > 0;) access(request.keys[at], request.extend);
}

bool GateArc::inside(Key key) const {
  const std::uint32_t slot = table_.find(key);
  return slot != kNowhere && slots_[slot].where <= kT2;
}

void GateArc::access(Key key, bool extend) {
  std::uint32_t slot = table_.find(key);
  if (slot != kNowhere && slots_[slot].where <= kT2) {
    if (!extend) move(slot, kT2);
    return;
  }
  if (capacity_ == 0) {
    evicted_.push_back(key);
    return;
  }
  if (slot != kNowhere) {
    const auto b1 = static_cast<double>(count(kB1)), b2 = static_cast<double>(count(kB2));
    const bool from_b2 = slots_[slot].where == kB2;
    if (from_b2) {
      target_ = std::max(target_ - std::max(b1 / b2, 1.0), 0.0);
    } else {
      target_ = std::min(target_ + std::max(b2 / b1, 1.0), static_cast<double>(capacity_));
    }
    make_room(from_b2);
    move(slot, kT2);
    return;
  }
  const std::size_t once = count(kT1) + count(kB1);
  if (once >= capacity_) {
    if (count(kB1) > 0) {
      drop(lists_[kB1].oldest);
      make_room(false);
    } else if (size() >= capacity_) {  // T1 is all there is
      evicted_.push_back(slots_[lists_[kT1].oldest].key);
      drop(lists_[kT1].oldest);
    }
  } else {
    if (once + count(kT2) + count(kB2) >= 2 * capacity_ && count(kB2) > 0) drop(lists_[kB2].oldest);
    make_room(false);
  }
  if (free_.empty()) {
    slot = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  slots_[slot].key = key;
  table_.insert(slot);
  link(slot, kT1);
}

void GateArc::make_room(bool from_b2) {
  while (size() >= capacity_) replace(from_b2);
}

void GateArc::replace(bool from_b2) {
  const auto once = static_cast<double>(count(kT1));
  const bool first = once > 0 && (once > target_ || (from_b2 && once == target_));
  const Where where = first || count(kT2) == 0 ? kT1 : kT2;
  const std::uint32_t slot = lists_[where].oldest;
  evicted_.push_back(slots_[slot].key);
  move(slot, where == kT1 ? kB1 : kB2);
}

void GateArc::resize(std::size_t capacity) {
  capacity_ = capacity;
  target_ = std::min(target_, static_cast<double>(capacity));
  while (size() > capacity_) replace(false);
  while (count(kB1) > 0 && count(kT1) + count(kB1) > capacity_) drop(lists_[kB1].oldest);
  while (count(kB2) > 0 && size() + count(kB1) + count(kB2) > 2 * capacity_) drop(lists_[kB2].oldest);
}

void GateArc::evict(std::size_t n) {
  for (; n > 0 && size() > 0; --n) replace(false);
  while (count(kB1) > 0 && count(kT1) + count(kB1) > capacity_) drop(lists_[kB1].oldest);
  while (count(kB2) > 0 && size() + count(kB1) + count(kB2) > 2 * capacity_) drop(lists_[kB2].oldest);
}

void GateArc::forget(Key key) {
  const std::uint32_t slot = table_.find(key);
  if (slot != kNowhere && slots_[slot].where <= kT2) drop(slot);
}

std::size_t GateArc::nbytes() const {
  return sizeof(*this) + slots_.capacity() * sizeof(Slot) + free_.capacity() * sizeof(std::uint32_t) + table_.nbytes() +
         evicted_.capacity() * sizeof(Key);
}

std::vector<Key> GateArc::keys() const {
  std::vector<Key> keys;
  keys.reserve(size());
  for (const Where where : {kT1, kT2}) {
    for (std::uint32_t at = lists_[where].oldest; at != kNowhere; at = slots_[at].after) keys.push_back(slots_[at].key);
  }
  return keys;
}

void GateArc::move(std::uint32_t slot, Where where) {
  unlink(slot);
  link(slot, where);
}

void GateArc::unlink(std::uint32_t slot) {
  const Slot& one = slots_[slot];
  List& list = lists_[one.where];
  (one.before == kNowhere ? list.oldest : slots_[one.before].after) = one.after;
  (one.after == kNowhere ? list.newest : slots_[one.after].before) = one.before;
  --list.count;
}

void GateArc::link(std::uint32_t slot, Where where) {
  List& list = lists_[where];
  Slot& one = slots_[slot];
  one.before = list.newest;
  one.after = kNowhere;
  one.where = where;
  (list.newest == kNowhere ? list.oldest : slots_[list.newest].after) = slot;
  list.newest = slot;
  ++list.count;
}

void GateArc::drop(std::uint32_t slot) {
  unlink(slot);
  table_.erase(slots_[slot].key);
  free_.push_back(slot);
}

}  // namespace kvterrace::policy
