// Blocks of the return-index policy: those inside, their leaves, and the ghosts of those that have left (no bytes: history).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/directory.h"
#include "policy/key_table.h"

namespace kvterrace::policy {

struct Block {  // 32 B
  Key key = 0;
  std::uint32_t record = kNowhere;
  std::uint32_t session = 0;     // that used it last
  std::uint32_t parent = kNowhere;  // the block before it in its chain; only while it is inside
  std::uint32_t children : 27 = 0;  // inside
  bool inside : 1 = false;
  bool leaf : 1 = false;    // inside, without children
  bool ghost : 1 = false;   // not inside, without children
  bool shared : 1 = false;  // by two sessions, ever
  bool in_request : 1 = false;  // the one under way
  // of a ghost its neighbours in age; inside: of a leaf its place among them, and how many blocks its chain has before it
  std::uint32_t before = kNowhere, after = kNowhere;

  std::uint32_t depth() const { return after; }
};
static_assert(sizeof(Block) == 32);

class Blocks {
 public:
  Block& operator[](std::uint32_t at) { return blocks_[at]; }
  const Block& operator[](std::uint32_t at) const { return blocks_[at]; }

  std::uint32_t find(Key key) const { return table_.find(key); }
  std::uint32_t add(Key key);  // neither inside nor a ghost: enter it next
  // Comes inside, or stays so, as the child of `parent` (kNowhere: a head). Children before parents.
  void enter(std::uint32_t at, std::uint32_t parent, std::uint32_t depth);
  // Leaves and becomes a ghost, the youngest.
  void exit(std::uint32_t at);
  // The oldest ghost; kNowhere if there is none.
  std::uint32_t oldest_ghost() const { return oldest_; }
  void remove(std::uint32_t ghost);

  const std::vector<std::uint32_t>& leaves() const { return leaves_; }
  std::size_t inside() const { return inside_; }
  std::size_t ghosts() const { return ghosts_; }
  std::size_t nbytes() const;

 private:
  void orphan(std::uint32_t at);  // its parent has a child less
  void add_leaf(std::uint32_t at);
  void remove_leaf(std::uint32_t at);
  void add_ghost(std::uint32_t at);
  void remove_ghost(std::uint32_t at);

  std::vector<Block> blocks_;
  std::vector<std::uint32_t> free_;
  KeyTable<std::vector<Block>> table_{blocks_};
  std::vector<std::uint32_t> leaves_;
  std::uint32_t oldest_ = kNowhere, newest_ = kNowhere;
  std::size_t inside_ = 0, ghosts_ = 0;
};

}  // namespace kvterrace::policy
