// Keys in lists, the latest first; each key is in one list at most, and found by a look-up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/key_map.h"

namespace kvterrace::policy {

struct Node {
  Key key = 0;
  std::uint32_t newer = kNone;
  std::uint32_t older = kNone;
  std::uint32_t list = 0;
  std::uint32_t uses = 0;  // the policy's own
};

class Lists {
 public:
  explicit Lists(std::size_t count) : ends_(count) {}

  std::uint32_t find(Key key) const { return map_.find(key); }
  Node& operator[](std::uint32_t node) { return nodes_[node]; }
  const Node& operator[](std::uint32_t node) const { return nodes_[node]; }
  std::size_t size(std::uint32_t list) const { return list < ends_.size() ? ends_[list].size : 0; }
  std::uint32_t oldest(std::uint32_t list) const { return list < ends_.size() ? ends_[list].oldest : kNone; }
  std::uint32_t newest(std::uint32_t list) const { return list < ends_.size() ? ends_[list].newest : kNone; }

  // A key that is in no list becomes the newest of one.
  std::uint32_t add(Key key, std::uint32_t list) {
    std::uint32_t node = free_;
    if (node == kNone) {
      node = static_cast<std::uint32_t>(nodes_.size());
      nodes_.emplace_back();
    } else {
      free_ = nodes_[node].older;
    }
    nodes_[node] = {key};
    map_.set(key, node);
    link(node, list);
    return node;
  }

  // It becomes the newest of a list, which may be its own. A list that was not there is made.
  void move(std::uint32_t node, std::uint32_t list) {
    unlink(node);
    link(node, list);
  }

  Key remove(std::uint32_t node) {
    const Key key = nodes_[node].key;
    unlink(node);
    map_.erase(key);
    nodes_[node].older = free_;
    free_ = node;
    return key;
  }

  std::size_t nbytes() const {
    return map_.nbytes() + nodes_.capacity() * sizeof(Node) + ends_.capacity() * sizeof(Ends);
  }

 private:
  struct Ends {
    std::uint32_t newest = kNone;
    std::uint32_t oldest = kNone;
    std::size_t size = 0;
  };

  void link(std::uint32_t node, std::uint32_t list) {
    if (list >= ends_.size()) ends_.resize(list + 1);
    Ends& ends = ends_[list];
    Node& one = nodes_[node];
    one.list = list;
    one.newer = kNone;
    one.older = ends.newest;
    (ends.newest == kNone ? ends.oldest : nodes_[ends.newest].newer) = node;
    ends.newest = node;
    ++ends.size;
  }

  void unlink(std::uint32_t node) {
    const Node& one = nodes_[node];
    Ends& ends = ends_[one.list];
    (one.newer == kNone ? ends.newest : nodes_[one.newer].older) = one.older;
    (one.older == kNone ? ends.oldest : nodes_[one.older].newer) = one.newer;
    --ends.size;
  }

  std::vector<Node> nodes_;
  std::vector<Ends> ends_;
  KeyMap map_;
  std::uint32_t free_ = kNone;
};

}  // namespace kvterrace::policy
