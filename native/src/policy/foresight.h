// When each block of a trace is used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvterrace::policy {

class Foresight {
 public:
  // `ids`: of all requests end to end, each below `distinct`; they outlive this.
  Foresight(std::span<const std::uint32_t> ids, std::size_t distinct) : ids_(ids), distinct_(distinct) {
    after_.resize(ids.size());
    next_.resize(distinct);
    for (std::size_t id = 0; id < distinct; ++id) next_[id] = ids.size() + id;
    for (std::size_t at = ids.size(); at-- > 0;) {
      after_[at] = next_[ids[at]];
      next_[ids[at]] = at;
    }
  }

  // Use number `at` is under way, and all before it are past.
  void pass(std::size_t at) { next_[ids_[at]] = after_[at]; }
  // The number of its next use. One that never comes has a number of its own, higher than any use's.
  std::size_t next(std::uint32_t id) const { return next_[id]; }
  bool never(std::size_t use) const { return use >= ids_.size(); }
  std::uint32_t id_of(std::size_t use) const {
    return never(use) ? static_cast<std::uint32_t>(use - ids_.size()) : ids_[use];
  }
  // All numbers are below.
  std::size_t limit() const { return ids_.size() + distinct_; }
  std::size_t distinct() const { return distinct_; }

 private:
  std::span<const std::uint32_t> ids_;
  std::size_t distinct_;
  std::vector<std::size_t> after_;  // by use: the next one of the same block
  std::vector<std::size_t> next_;   // by block
};

}  // namespace kvterrace::policy
