#include "policy/index_records.h"

#include <cmath>

namespace kvterrace::policy {
namespace {

constexpr double kPriority = 4.0;  // a use with priority is worth so many others

}  // namespace

std::uint32_t Records::add(Kind kind, const Features& turn, double since_s, double now_s) {
  std::uint32_t at;
  if (free_.empty()) {
    at = static_cast<std::uint32_t>(records_.size());
    records_.emplace_back();
  } else {
    at = free_.back();
    free_.pop_back();
  }
  Record& record = records_[at];
  record = Record{};
  record.since_s = since_s;
  record.number = ++number_;
  record.turn = turn;
  record.row = Model::row(turn, kind);
  record.first_bin = static_cast<std::uint8_t>(bin_of(now_s - since_s));
  record.before = newest_;
  (newest_ == kNowhere ? oldest_ : records_[newest_].after) = at;
  newest_ = at;
  for (std::uint32_t& cursor : cursors_) {
    if (cursor == kNowhere) cursor = at;
  }
  return at;
}

std::uint32_t Records::add_last(std::uint32_t body, const Features& turn, double since_s, double now_s) {
  const std::uint32_t at = add(Kind::kLast, turn, since_s, now_s);
  records_[at].body = body;
  if (body != kNowhere) records_[at].body_number = records_[body].number;
  return at;
}

void Records::set(std::uint32_t at, Kind kind, const Features& turn) {
  Record& record = records_[at];
  const Row old = record.row;
  record.turn = turn;
  record.row = Model::row(turn, kind);
  record.row.hint = old.hint;
  record.row.hint_bin = old.hint_bin;
  record.row.due_bin = old.due_bin;
  record.index_bin = -1;
}

void Records::join(std::uint32_t record) {
  ++records_[record].at_first;
  ++records_[record].alive;
}

void Records::leave(std::uint32_t record, std::uint32_t count) {
  records_[record].alive -= count;
  if (records_[record].alive == 0) free(record);
}

void Records::free(std::uint32_t at) {
  const Record& record = records_[at];
  (record.before == kNowhere ? oldest_ : records_[record.before].after) = record.after;
  (record.after == kNowhere ? newest_ : records_[record.after].before) = record.before;
  for (std::uint32_t& cursor : cursors_) {
    if (cursor == at) cursor = record.after;
  }
  free_.push_back(at);
}

void Records::used(std::uint32_t at, std::uint32_t count, double now_s) {
  const Record& record = records_[at];
  model_.learn(record.row, bin_of(now_s - record.since_s), true, count / std::sqrt(static_cast<double>(record.at_first)));
}

void Records::hint(std::uint32_t at, Hint hint, double seconds, double now_s) {
  Record& record = records_[at];
  if (hint == Hint::kPriority) {
    record.priority_until_s = now_s + seconds;
    return;
  }
  const double age_s = now_s - record.since_s;
  record.row.hint = hint;
  record.row.hint_bin = static_cast<std::uint8_t>(bin_of(age_s));
  record.row.due_bin = static_cast<std::uint8_t>(bin_of(age_s + seconds));
  record.index_bin = -1;
}

void Records::advance(double now_s) {
  for (int bin = 0; bin < kBins; ++bin) {
    std::uint32_t& cursor = cursors_[static_cast<std::size_t>(bin)];
    const double end_s = kBinStart_s[static_cast<std::size_t>(bin) + 1];
    while (cursor != kNowhere && now_s - records_[cursor].since_s >= end_s) {
      const Record& record = records_[cursor];
      if (bin >= record.first_bin) {
        model_.learn(record.row, bin, false, record.alive / std::sqrt(static_cast<double>(record.at_first)));
      }
      cursor = record.after;
    }
  }
}

double Records::index(std::uint32_t at, double now_s) {
  Record& record = records_[at];
  const int bin = bin_of(now_s - record.since_s);
  if (record.index_bin != bin || record.index_version != model_.version()) {
    record.index = model_.index(record.row, bin);
    record.index_bin = static_cast<std::int8_t>(bin);
    record.index_version = model_.version();
  }
  return now_s < record.priority_until_s ? kPriority * record.index : record.index;
}

}  // namespace kvterrace::policy
