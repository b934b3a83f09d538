// ARC (Megiddo and Modha, 2003, "ARC: a self-tuning, low overhead replacement cache"), block by block, tail first: the
// default policy's second opinion. Unlike the reference it takes hand-made evictions, losses and another capacity.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/directory.h"
#include "policy/key_table.h"

namespace kvterrace::policy {

class GateArc final : public Directory {
 public:
  explicit GateArc(std::size_t capacity);

  void request(const Request& request) override;
  bool inside(Key key) const override;
  std::size_t size() const override { return lists_[kT1].count + lists_[kT2].count; }
  void resize(std::size_t capacity) override;
  void evict(std::size_t n) override;
  void forget(Key key) override;
  std::size_t nbytes() const override;
  std::vector<Key> keys() const;  // inside, those to go first first

 private:
  // Once and more than once inside; gone from the one and from the other (keys only).
  enum Where : std::uint8_t { kT1, kT2, kB1, kB2 };
  struct Slot {
    Key key;
    std::uint32_t before, after;  // in its list, the oldest first
    Where where;
  };
  struct List {
    std::uint32_t oldest = kNowhere, newest = kNowhere;
    std::size_t count = 0;
  };

  void access(Key key, bool extend);
  void make_room(bool from_b2);
  void replace(bool from_b2);
  void move(std::uint32_t slot, Where where);
  void unlink(std::uint32_t slot);
  void link(std::uint32_t slot, Where where);
  void drop(std::uint32_t slot);
  std::size_t count(Where where) const { return lists_[where].count; }

  std::size_t capacity_;
  double target_ = 0.0;  // of T1
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  KeyTable<std::vector<Slot>> table_{slots_};
  std::array<List, 4> lists_;
};

}  // namespace kvterrace::policy
