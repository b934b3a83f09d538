// A whole trace against a ladder of one or two tiers that play a reference policy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "policy/foresight.h"
#include "policy/references.h"

namespace kvterrace::policy {

// The arrays outlive whatever is made of this.
struct Trace {
  std::span<const std::uint32_t> ids;      // of the blocks of all requests end to end, head first; each below `distinct`
  std::span<const std::uint64_t> offsets;  // where each request begins, and the end of the last
  std::span<const std::uint32_t> tokens;   // of each prompt; what is behind its last block is in none
  std::size_t distinct = 0;
  std::uint32_t block_tokens = 1;

  std::size_t requests() const { return tokens.size(); }
};

// Blocks, except where a name says otherwise.
struct Tally {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;
  std::uint64_t tokens = 0;
  double tokens_squared = 0;  // the sum over requests of the square of their tokens
  std::array<std::uint64_t, 2> hits{};
  std::array<std::uint64_t, 2> hit_tokens{};
  double hit_tokens_squared = 0;  // the same of what was hit, in any tier
  // Misses: never seen before; seen, and in no tier; in a tier, behind one that is in none.
  std::uint64_t missed_new = 0;
  std::uint64_t missed_dropped = 0;
  std::uint64_t missed_behind = 0;
  std::uint64_t promoted = 0;     // hit in the lower tier, and in the upper one after it
  std::uint64_t demoted = 0;      // left the upper tier, and lie in the lower one
  std::uint64_t written = 0;      // of these, those that had no copy there
  std::uint64_t copies_lost = 0;  // left the lower tier while the upper one has them
  std::uint64_t dropped = 0;      // left the ladder; one that comes in and leaves again counts each time
};

class Replay {
 public:
  // `lower` 0: one tier. The policy is one of `make_reference`'s, which has said yes.
  Replay(const Trace& trace, std::string_view policy, std::size_t upper, std::size_t lower);

  // The next `requests`, or what is left; how many are left then.
  std::size_t run(std::size_t requests);
  const Tally& tally() const { return tally_; }
  std::size_t nbytes() const { return upper_->nbytes() + (lower_ ? lower_->nbytes() : 0); }

 private:
  void one(std::size_t request);
  void look_up(std::span<const std::uint32_t> ids, std::uint32_t tokens);
  void touch_lower();
  void settle();
  bool in_lower(Key key) const { return lower_ && lower_->inside(key); }

  Trace trace_;
  std::unique_ptr<Foresight> foresight_;
  std::unique_ptr<BlockPolicy> upper_;
  std::unique_ptr<BlockPolicy> lower_;
  std::vector<bool> seen_;
  std::vector<Key> keys_;
  std::vector<Key> read_;  // of a request: hit in the lower tier
  std::size_t at_ = 0;
  Tally tally_;
};

}  // namespace kvterrace::policy
