// From keys to numbers: open addressing, linear probing, no tombstones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/directory.h"

namespace kvterrace::policy {

constexpr std::uint32_t kNone = 0xffffffffu;

class KeyMap {
 public:
  KeyMap() : slots_(kLeast) {}

  // kNone: not there.
  std::uint32_t find(Key key) const {
    for (std::size_t at = home(key);; at = (at + 1) & mask()) {
      const Slot& slot = slots_[at];
      if (slot.value == kNone || slot.key == key) return slot.value;
    }
  }

  // `value` is not kNone.
  void set(Key key, std::uint32_t value) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[place(key)];
    size_ += slot.value == kNone;
    slot = {key, value};
  }

  void erase(Key key) {
    std::size_t at = place(key);
    if (slots_[at].value == kNone) return;
    --size_;
    for (std::size_t next = at;;) {
      next = (next + 1) & mask();
      const Slot& slot = slots_[next];
      if (slot.value == kNone) break;
      // It stays where its home lies behind the hole, up to itself, round the end.
      if (((next - home(slot.key)) & mask()) < ((next - at) & mask())) continue;
      slots_[at] = slot;
      at = next;
    }
    slots_[at].value = kNone;
  }

  // Each value becomes half of it; keys whose value is 0 then leave.
  void halve() {
    std::vector<Slot> old(slots_.size());
    old.swap(slots_);
    size_ = 0;
    for (const Slot& slot : old)
      if (slot.value != kNone && slot.value > 1) set(slot.key, slot.value / 2);
  }

  std::size_t size() const { return size_; }
  std::size_t nbytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    Key key = 0;
    std::uint32_t value = kNone;
  };
  static constexpr std::size_t kLeast = 16;

  std::size_t mask() const { return slots_.size() - 1; }

  // Four keys that follow each other share a cache line: a trace numbers the blocks of a prompt in order.
  std::size_t home(Key key) const {
    const std::uint64_t mixed = (key >> 2) * 0x9E3779B97F4A7C15u;
    return static_cast<std::size_t>((mixed ^ (mixed >> 32)) << 2 | (key & 3)) & mask();
  }

  std::size_t place(Key key) const {
    std::size_t at = home(key);
    while (slots_[at].value != kNone && slots_[at].key != key) at = (at + 1) & mask();
    return at;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.value != kNone) slots_[place(slot.key)] = slot;
  }

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

}  // namespace kvterrace::policy
