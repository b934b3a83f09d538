#include "policy/index_directory.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <unordered_map>

namespace kvterrace::policy {
namespace {

// Steele, Lea, Flood, 2014, "Fast splittable pseudorandom number generators".
std::uint64_t splitmix64(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

IndexDirectory::IndexDirectory(std::size_t capacity, std::uint64_t seed, double depth_worth)
    : capacity_(capacity), random_(seed), depth_worth_(depth_worth) {
  if (!std::isfinite(depth_worth) || depth_worth < 0) throw std::invalid_argument("depth_worth must be finite, and at least 0");
}

void IndexDirectory::request(const Request& request) {
  if (!std::isfinite(request.now_s)) throw std::invalid_argument("now_s must be a finite time in seconds");
  if (request.keys.empty()) return;
  now_s_ = std::max(now_s_, request.now_s);
  records_.advance(now_s_);
  const std::size_t known = find(request);
  if (request.extend && known > 0) {
    extend_turn(known, request.output_tokens);
  } else {
    begin_turn(known, request.output_tokens);
    learn_used();
    label();
  }
  enter();
  shrink(capacity_);
}

// Fills `chain_` with the blocks, added where they are not known; returns how many of its head are known. What follows a key
// that came before in the same request is left out: no chain has a key twice.
std::size_t IndexDirectory::find(const Request& request) {
  chain_.clear();
  runs_.clear();
  std::size_t known = 0;
  bool whole = true;
  for (const Key key : request.keys) {
    std::uint32_t at = blocks_.find(key);
    if (at == kNowhere) {
      whole = false;
      at = blocks_.add(key);
    } else if (blocks_[at].in_request) {
      break;
    } else if (whole) {
      ++known;
    }
    blocks_[at].in_request = true;
    chain_.push_back(at);
  }
  for (std::size_t at = 0; at < chain_.size(); ++at) {
    Block& block = blocks_[chain_[at]];
    block.in_request = false;
    if (block.record == kNowhere) continue;
    if (!runs_.empty() && runs_.back().end == at && runs_.back().record == block.record) {
      ++runs_.back().end;
    } else {
      runs_.push_back({at, at + 1, block.record});
    }
  }
  return known;
}

void IndexDirectory::begin_turn(std::size_t known, std::int32_t output_tokens) {
  turn_ = Features{};
  turn_.blocks = static_cast<std::int32_t>(chain_.size());
  turn_.known_blocks = static_cast<std::int32_t>(known);
  turn_.output_tokens = output_tokens;
  since_s_ = now_s_;
  if (known > 0) {
    const Block& deepest = blocks_[chain_[known - 1]];
    const Record& before = records_[deepest.record];
    if (2 * std::int64_t{turn_.known_blocks} >= before.turn.blocks) {
      session_ = deepest.session;
      turn_.turn = before.turn.turn + 1;
      turn_.gap_s = now_s_ - before.since_s;
      const double log_gap = std::log2(1.0 + turn_.gap_s);
      turn_.log_gap = turn_.turn == 2 ? log_gap : 0.5 * before.turn.log_gap + 0.5 * log_gap;
      return;
    }
  }
  session_ = ++sessions_;
}

void IndexDirectory::learn_used() {
  for (const Run& run : runs_) records_.used(run.record, static_cast<std::uint32_t>(run.end - run.begin), now_s_);
}

// New records for the chain: one for each shared run, one for the last block, one for the others.
void IndexDirectory::label() {
  std::uint32_t body = kNowhere, shared = kNowhere, shared_before = kNowhere;
  for (std::size_t at = 0; at < chain_.size(); ++at) {
    Block& block = blocks_[chain_[at]];
    const std::uint32_t before = block.record;
    if (before != kNowhere && block.session != session_) block.shared = true;
    block.session = session_;
    if (block.shared) {
      if (before != shared_before) shared = add_shared(before, at);
      shared_before = before;
      block.record = shared;
    } else {
      shared_before = kNowhere;
      if (at > 0 && at + 1 == chain_.size()) {
        block.record = records_.add_last(body, turn_, since_s_, now_s_);
      } else {
        if (body == kNowhere) body = records_.add(Kind::kBody, turn_, since_s_, now_s_);
        block.record = body;
      }
    }
    records_.join(block.record);
  }
  for (const Run& run : runs_) records_.leave(run.record, static_cast<std::uint32_t>(run.end - run.begin));
}

std::uint32_t IndexDirectory::add_shared(std::uint32_t before, std::size_t at) {
  const Record& old = records_[before];
  Features own;
  own.blocks = turn_.blocks;
  own.known_blocks = static_cast<std::int32_t>(at);
  own.turn = old.row.kind == Kind::kShared ? old.shared_turn + 1 : 1;
  own.gap_s = now_s_ - old.since_s;
  const double log_gap = std::log2(1.0 + own.gap_s);
  own.log_gap = old.row.kind == Kind::kShared ? 0.6 * old.shared_log_gap + 0.4 * log_gap : log_gap;
  const std::uint32_t record = records_.add(Kind::kShared, own, since_s_, now_s_);
  records_[record].shared_turn = own.turn;
  records_[record].shared_log_gap = own.log_gap;
  records_[record].turn = turn_;
  return record;
}

// The new tail joins the turn that touched the chain last.
void IndexDirectory::extend_turn(std::size_t known, std::int32_t output_tokens) {
  const Block& deepest = blocks_[chain_[known - 1]];
  session_ = deepest.session;
  since_s_ = records_[deepest.record].since_s;
  turn_ = records_[deepest.record].turn;
  turn_.blocks = std::max(turn_.blocks, static_cast<std::int32_t>(chain_.size()));
  if (output_tokens >= 0) turn_.output_tokens = output_tokens;
  std::uint32_t body = kNowhere;
  for (std::size_t at = known; at-- > 0;) {
    const Block& block = blocks_[chain_[at]];
    const Record& record = records_[block.record];
    if (block.session != session_ || record.since_s != since_s_) break;
    if (record.row.kind == Kind::kBody) {
      body = block.record;
      break;
    }
  }
  const bool was_last = records_[deepest.record].row.kind == Kind::kLast;
  if (known == chain_.size()) {
    if (was_last) records_.set(deepest.record, Kind::kLast, turn_);
  } else if (was_last) {
    if (body == kNowhere) {
      body = deepest.record;
    } else {
      set_record(chain_[known - 1], body);
    }
  }
  if (body != kNowhere) records_.set(body, Kind::kBody, turn_);
  for (std::size_t at = known; at < chain_.size(); ++at) {
    blocks_[chain_[at]].session = session_;
    if (at + 1 == chain_.size()) {
      set_record(chain_[at], records_.add_last(body, turn_, since_s_, now_s_));
    } else {
      if (body == kNowhere) body = records_.add(Kind::kBody, turn_, since_s_, now_s_);
      set_record(chain_[at], body);
    }
  }
}

void IndexDirectory::hint(Key key, Hint hint, double seconds, double now_s) {
  if (!std::isfinite(now_s) || !std::isfinite(seconds) || seconds < 0) {
    throw std::invalid_argument("a hint's now_s and seconds must be finite, and seconds at least 0");
  }
  now_s_ = std::max(now_s_, now_s);
  const std::uint32_t at = blocks_.find(key);
  if (at == kNowhere || hint == Hint::kNothing) return;
  if (hint == Hint::kShared) return share(at);
  const std::uint32_t record = blocks_[at].record;
  const Record& named = records_[record];
  if (named.row.kind == Kind::kShared && hint != Hint::kPriority) return;
  records_.hint(record, hint, seconds, now_s_);
  if (named.body != kNowhere && records_[named.body].number == named.body_number) {
    records_.hint(named.body, hint, seconds, now_s_);
  }
}

// The block and those before it are shared runs from now on, as old as they are.
void IndexDirectory::share(std::uint32_t at) {
  std::uint32_t shared = kNowhere, shared_before = kNowhere;
  for (; at != kNowhere && !blocks_[at].shared; at = blocks_[at].parent) {
    const std::uint32_t before = blocks_[at].record;
    if (before != shared_before) {
      const Record old = records_[before];
      Features own;
      own.blocks = old.turn.blocks;
      shared = records_.add(Kind::kShared, own, old.since_s, now_s_);
      records_[shared].shared_turn = own.turn;
      records_[shared].turn = old.turn;
      shared_before = before;
    }
    blocks_[at].shared = true;
    set_record(at, shared);
  }
}

void IndexDirectory::set_record(std::uint32_t block, std::uint32_t record) {
  const std::uint32_t before = blocks_[block].record;
  if (before == record) return;
  blocks_[block].record = record;
  records_.join(record);
  if (before != kNowhere) records_.leave(before, 1);
}

void IndexDirectory::enter() {
  for (std::size_t at = chain_.size(); at-- > 0;) {
    blocks_.enter(chain_[at], at == 0 ? kNowhere : chain_[at - 1], static_cast<std::uint32_t>(at));
  }
}

void IndexDirectory::shrink(std::size_t most) {
  while (blocks_.inside() > most) {
    std::uint32_t at = victim();
    for (;;) {
      const std::uint32_t parent = blocks_[at].parent, record = blocks_[at].record;
      exit(at);
      if (blocks_.inside() <= most || parent == kNowhere || !blocks_[parent].leaf || blocks_[parent].record != record) break;
      at = parent;
    }
  }
}

void IndexDirectory::exit(std::uint32_t at) {
  evicted_.push_back(blocks_[at].key);
  blocks_.exit(at);
  while (blocks_.ghosts() > most_ghosts()) {
    const std::uint32_t ghost = blocks_.oldest_ghost();
    records_.leave(blocks_[ghost].record, 1);
    blocks_.remove(ghost);
  }
}

// Of some leaves the one with the lowest index, and of equal ones the oldest.
std::uint32_t IndexDirectory::victim() {
  const std::vector<std::uint32_t>& leaves = blocks_.leaves();
  const bool all = leaves.size() <= kSample;
  std::uint32_t best = kNowhere;
  double best_index = 0.0;
  for (std::size_t n = 0; n < (all ? leaves.size() : kSample); ++n) {
    const std::uint32_t at = leaves[all ? n : splitmix64(random_) % leaves.size()];
    const double index = records_.index(blocks_[at].record, now_s_) * (1.0 + depth_worth_ * blocks_[at].depth());
    if (best == kNowhere || index < best_index ||
        (index == best_index && records_[blocks_[at].record].number < records_[blocks_[best].record].number)) {
      best = at;
      best_index = index;
    }
  }
  return best;
}

std::size_t IndexDirectory::most_ghosts() const {
  return std::max<std::size_t>(131072, std::min<std::size_t>(16 * capacity_, 1000000));
}

bool IndexDirectory::inside(Key key) const {
  const std::uint32_t at = blocks_.find(key);
  return at != kNowhere && blocks_[at].inside;
}

void IndexDirectory::resize(std::size_t capacity) {
  capacity_ = capacity;
  shrink(capacity);
}

void IndexDirectory::evict(std::size_t n) { shrink(blocks_.inside() - std::min(n, blocks_.inside())); }

void IndexDirectory::forget(Key key) {
  const std::uint32_t at = blocks_.find(key);
  if (at == kNowhere || !blocks_[at].inside) return;
  exit(at);
  evicted_.pop_back();
}

std::vector<Key> IndexDirectory::keys() const {
  std::vector<Key> keys;
  keys.reserve(blocks_.inside());
  std::unordered_map<std::uint32_t, std::uint32_t> seen;  // children of blocks with more than one
  for (const std::uint32_t leaf : blocks_.leaves()) {
    for (std::uint32_t at = leaf; at != kNowhere; at = blocks_[at].parent) {
      if (blocks_[at].children > 1 && ++seen[at] < blocks_[at].children) break;
      if (blocks_[at].inside) keys.push_back(blocks_[at].key);
    }
  }
  return keys;
}

std::size_t IndexDirectory::nbytes() const {
  return sizeof(*this) + model_.nbytes() + records_.nbytes() + blocks_.nbytes() + runs_.capacity() * sizeof(Run) +
         chain_.capacity() * sizeof(std::uint32_t) + evicted_.capacity() * sizeof(Key);
}

}  // namespace kvterrace::policy
