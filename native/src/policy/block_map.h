// Which block has a key: ids by key, where the keys lie in a column of the caller's. 4 B a place, at most two thirds of them
// used. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "policy/key_table.h"

namespace kvterrace::policy {

// A column over all ids, `stride` keys apart. It may lie elsewhere at each call, but for the ids in the map its keys are
// always the same.
struct KeyColumn {
  struct Row {
    Key key;
  };
  const Key* first = nullptr;
  std::size_t stride = 1;
  Row operator[](std::size_t id) const { return {first[id * stride]}; }
};

class BlockMap {
 public:
  BlockMap() : table_(column_) {}
  BlockMap(const BlockMap&) = delete;
  BlockMap& operator=(const BlockMap&) = delete;

  void look_at(const KeyColumn& column) { column_ = column; }
  // kNowhere where no block with this key is in the map.
  std::uint32_t find(Key key) const { return table_.find(key); }
  // Of two blocks with one key the first stays.
  void put(std::uint32_t id) {
    if (table_.find(column_[id].key) == kNowhere) table_.insert(id);
  }
  void drop(std::uint32_t id) {
    if (table_.find(column_[id].key) == id) table_.erase(column_[id].key);
  }
  std::size_t nbytes() const { return sizeof(*this) + table_.nbytes(); }

 private:
  KeyColumn column_;
  KeyTable<KeyColumn> table_;
};

}  // namespace kvterrace::policy
