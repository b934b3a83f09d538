// Records of the return-index policy: each stands for blocks that share one history, and lives as long as one of them has it.
// Timers tell the model of those that were not used again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "policy/index_model.h"
#include "policy/key_table.h"

namespace kvterrace::policy {

struct Record {
  double since_s = 0.0;      // its turn's time
  std::uint64_t number = 0;  // the older the lower
  Features turn;             // of the turn that made it
  double shared_log_gap = 0.0;  // of a shared run: its own, and how often it was used as one
  std::int32_t shared_turn = 0;
  Row row;
  std::uint32_t at_first = 0, alive = 0;               // blocks
  std::uint32_t before = kNowhere, after = kNowhere;  // by age
  // of a last block: the record of the others of its turn, if that has this number still
  std::uint32_t body = kNowhere;
  std::uint64_t body_number = 0;
  double priority_until_s = -std::numeric_limits<double>::infinity();
  std::uint8_t first_bin = 0;  // that timers count for it
  std::int8_t index_bin = -1;  // that the index below is of; -1: there is none
  double index = 0.0;
  std::uint64_t index_version = 0;  // of the model
};
static_assert(sizeof(Record) <= 144);

class Records {
 public:
  explicit Records(Model& model) : model_(model) { cursors_.fill(kNowhere); }

  Record& operator[](std::uint32_t record) { return records_[record]; }
  const Record& operator[](std::uint32_t record) const { return records_[record]; }

  // A record of no block yet; one that gets none must be freed.
  std::uint32_t add(Kind kind, const Features& turn, double since_s, double now_s);
  std::uint32_t add_last(std::uint32_t body, const Features& turn, double since_s, double now_s);
  void set(std::uint32_t record, Kind kind, const Features& turn);
  void join(std::uint32_t record);  // a new block of it
  void leave(std::uint32_t record, std::uint32_t count);
  void free(std::uint32_t record);
  // `count` blocks of it are used, now.
  void used(std::uint32_t record, std::uint32_t count, double now_s);
  // kClosed, kOneOff, kReturns or kPriority.
  void hint(std::uint32_t record, Hint hint, double seconds, double now_s);
  // Learn of all that has passed the end of a bin.
  void advance(double now_s);
  double index(std::uint32_t record, double now_s);
  std::size_t nbytes() const { return records_.capacity() * sizeof(Record) + free_.capacity() * sizeof(std::uint32_t); }

 private:
  Model& model_;
  std::vector<Record> records_;
  std::vector<std::uint32_t> free_;
  std::uint32_t oldest_ = kNowhere, newest_ = kNowhere;
  std::array<std::uint32_t, kBins> cursors_;  // by bin: the oldest that has not passed its end; kNowhere if all have
  std::uint64_t number_ = 0;
};

}  // namespace kvterrace::policy
