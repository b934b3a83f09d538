// Where a key's slot is: open addressing over 32-bit numbers of slots, whose keys lie in the slots themselves (4 B a place,
// at most two thirds of them used).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "policy/directory.h"

namespace kvterrace::policy {

inline constexpr std::uint32_t kNowhere = 0xffffffff;

// `Slots`: a vector of structs with a `key`. It must hold the key of every slot named here.
template <typename Slots>
class KeyTable {
 public:
  explicit KeyTable(const Slots& slots) : slots_(slots), places_(16, kNowhere) {}

  std::uint32_t find(Key key) const {
    for (std::size_t at = home(key);; at = next(at)) {
      const std::uint32_t slot = places_[at];
      if (slot == kNowhere || slots_[slot].key == key) return slot;
    }
  }

  void insert(std::uint32_t slot) {  // its key is not in the table
    if (3 * (count_ + 1) > 2 * places_.size()) grow();
    ++count_;
    put(slot);
  }

  void erase(Key key) {  // is in the table; the places after it move up, so that no marks are left behind
    std::size_t hole = home(key);
    while (slots_[places_[hole]].key != key) hole = next(hole);
    for (std::size_t at = next(hole); places_[at] != kNowhere; at = next(at)) {
      const std::size_t away = (at - home(slots_[places_[at]].key)) & (places_.size() - 1);
      if (away >= ((at - hole) & (places_.size() - 1))) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole] = kNowhere;
    --count_;
  }

  std::size_t nbytes() const { return places_.capacity() * sizeof(std::uint32_t); }

 private:
  std::size_t home(Key key) const {
    return static_cast<std::size_t>((key * 0x9e3779b97f4a7c15) >> (64 - std::countr_zero(places_.size())));
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (places_.size() - 1); }

  void put(std::uint32_t slot) {
    std::size_t at = home(slots_[slot].key);
    while (places_[at] != kNowhere) at = next(at);
    places_[at] = slot;
  }

  void grow() {
    const std::vector<std::uint32_t> old = std::exchange(places_, std::vector<std::uint32_t>(2 * places_.size(), kNowhere));
    for (const std::uint32_t slot : old) {
      if (slot != kNowhere) put(slot);
    }
  }

  const Slots& slots_;
  std::vector<std::uint32_t> places_;  // a power of two of them
  std::size_t count_ = 0;
};

}  // namespace kvterrace::policy
