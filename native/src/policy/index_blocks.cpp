#include "policy/index_blocks.h"

namespace kvterrace::policy {

std::uint32_t Blocks::add(Key key) {
  std::uint32_t at;
  if (free_.empty()) {
    at = static_cast<std::uint32_t>(blocks_.size());
    blocks_.emplace_back();
  } else {
    at = free_.back();
    free_.pop_back();
    blocks_[at] = Block{};
  }
  blocks_[at].key = key;
  table_.insert(at);
  return at;
}

void Blocks::enter(std::uint32_t at, std::uint32_t parent, std::uint32_t depth) {
  Block& block = blocks_[at];
  if (!block.inside) {
    if (block.ghost) remove_ghost(at);
    block.inside = true;
    block.parent = kNowhere;
    ++inside_;
    if (block.children == 0) add_leaf(at);
  }
  block.after = depth;
  if (block.parent == parent) return;
  orphan(at);
  block.parent = parent;
  if (parent == kNowhere) return;
  Block& above = blocks_[parent];
  if (above.leaf) remove_leaf(parent);
  ++above.children;
}

void Blocks::exit(std::uint32_t at) {
  Block& block = blocks_[at];
  if (block.leaf) remove_leaf(at);
  block.inside = false;
  --inside_;
  orphan(at);
  if (block.children == 0) add_ghost(at);
}

void Blocks::remove(std::uint32_t ghost) {
  remove_ghost(ghost);
  table_.erase(blocks_[ghost].key);
  free_.push_back(ghost);
}

void Blocks::orphan(std::uint32_t at) {
  const std::uint32_t parent = blocks_[at].parent;
  blocks_[at].parent = kNowhere;
  if (parent == kNowhere) return;
  Block& above = blocks_[parent];
  if (--above.children > 0) return;
  if (above.inside) {
    add_leaf(parent);
  } else {
    add_ghost(parent);
  }
}

void Blocks::add_leaf(std::uint32_t at) {
  blocks_[at].leaf = true;
  blocks_[at].before = static_cast<std::uint32_t>(leaves_.size());
  leaves_.push_back(at);
}

void Blocks::remove_leaf(std::uint32_t at) {
  const std::uint32_t place = blocks_[at].before, last = leaves_.back();
  leaves_[place] = last;
  blocks_[last].before = place;
  leaves_.pop_back();
  blocks_[at].leaf = false;
}

void Blocks::add_ghost(std::uint32_t at) {
  Block& block = blocks_[at];
  block.before = newest_;
  block.after = kNowhere;
  (newest_ == kNowhere ? oldest_ : blocks_[newest_].after) = at;
  newest_ = at;
  block.ghost = true;
  ++ghosts_;
}

void Blocks::remove_ghost(std::uint32_t at) {
  Block& block = blocks_[at];
  (block.before == kNowhere ? oldest_ : blocks_[block.before].after) = block.after;
  (block.after == kNowhere ? newest_ : blocks_[block.after].before) = block.before;
  block.ghost = false;
  --ghosts_;
}

std::size_t Blocks::nbytes() const {
  return blocks_.capacity() * sizeof(Block) + table_.nbytes() +
         (free_.capacity() + leaves_.capacity()) * sizeof(std::uint32_t);
}

}  // namespace kvterrace::policy
