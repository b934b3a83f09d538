#include "policy/replay.h"

#include <algorithm>

namespace kvterrace::policy {

Replay::Replay(const Trace& trace, std::string_view policy, std::size_t upper, std::size_t lower)
    : trace_(trace), seen_(trace.distinct) {
  if (policy == "belady") foresight_ = std::make_unique<Foresight>(trace.ids, trace.distinct);
  upper_ = make_reference(policy, upper, foresight_.get());
  if (lower) lower_ = make_reference(policy, lower, foresight_.get());
}

std::size_t Replay::run(std::size_t requests) {
  const std::size_t end = at_ + std::min(requests, trace_.requests() - at_);
  for (; at_ < end; ++at_) one(at_);
  return trace_.requests() - at_;
}

void Replay::one(std::size_t request) {
  const std::size_t begin = trace_.offsets[request];
  const auto ids = trace_.ids.subspan(begin, trace_.offsets[request + 1] - begin);
  keys_.assign(ids.begin(), ids.end());
  look_up(ids, trace_.tokens[request]);
  if (foresight_)
    for (std::size_t at = 0; at < ids.size(); ++at) foresight_->pass(begin + at);
  touch_lower();
  upper_->request({keys_});
  for (const Key key : read_) tally_.promoted += upper_->inside(key);
  settle();
}

void Replay::look_up(std::span<const std::uint32_t> ids, std::uint32_t tokens) {
  read_.clear();
  std::uint64_t hit_tokens = 0;
  std::size_t at = 0;
  for (; at < ids.size(); ++at) {
    const bool upper = upper_->inside(ids[at]);
    if (!upper && !in_lower(ids[at])) break;
    const std::uint64_t upto = std::min<std::uint64_t>(tokens, (at + 1) * std::uint64_t{trace_.block_tokens});
    tally_.hits[!upper] += 1;
    tally_.hit_tokens[!upper] += upto - hit_tokens;
    hit_tokens = upto;
    if (!upper) read_.push_back(ids[at]);
  }
  for (; at < ids.size(); ++at) {
    const std::uint32_t id = ids[at];
    if (!seen_[id]) {
      seen_[id] = true;
      ++tally_.missed_new;
    } else if (upper_->inside(id) || in_lower(id)) {
      ++tally_.missed_behind;
    } else {
      ++tally_.missed_dropped;
    }
  }
  ++tally_.requests;
  tally_.blocks += ids.size();
  tally_.tokens += tokens;
  tally_.tokens_squared += static_cast<double>(tokens) * tokens;
  tally_.hit_tokens_squared += static_cast<double>(hit_tokens) * static_cast<double>(hit_tokens);
}

// The lower tier hears of each use of what it holds, whoever serves it.
void Replay::touch_lower() {
  if (!lower_) return;
  const bool reversed = lower_->order() == Order::kTailFirst;
  for (std::size_t at = 0; at < keys_.size(); ++at) {
    const Key key = keys_[reversed ? keys_.size() - 1 - at : at];
    if (lower_->inside(key)) lower_->access(key);
  }
}

void Replay::settle() {
  for (const Key key : upper_->take_evicted()) {
    if (upper_->inside(key)) continue;  // it came back within the request
    if (!lower_) {
      ++tally_.dropped;
      continue;
    }
    if (!lower_->inside(key)) {
      lower_->access(key);
      tally_.written += lower_->inside(key);
    }
    tally_.demoted += lower_->inside(key);
  }
  if (!lower_) return;
  for (const Key key : lower_->take_evicted()) {
    if (lower_->inside(key)) continue;
    ++(upper_->inside(key) ? tally_.copies_lost : tally_.dropped);
  }
}

}  // namespace kvterrace::policy
