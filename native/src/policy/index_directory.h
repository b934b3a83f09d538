// The return-index policy, without its gate. A request is a turn of a session. For each turn it estimates how likely its
// blocks are used again as time passes, and of some leaves drawn at random it evicts the one whose index is lowest: the best
// expected uses by block-second over any horizon from now on. Prefixes stay whole: only leaves go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "policy/directory.h"
#include "policy/index_blocks.h"
#include "policy/index_model.h"
#include "policy/index_records.h"

namespace kvterrace::policy {

class IndexDirectory final : public Directory {
 public:
  // A use of a block with n blocks before it is worth 1 + n x `depth_worth`: 0 for most hits, and where a miss is computed
  // again, whose attention takes the longer the deeper the block lies, the share of that in the first block's time.
  IndexDirectory(std::size_t capacity, std::uint64_t seed, double depth_worth = 0.0);

  void request(const Request& request) override;
  bool inside(Key key) const override;
  std::size_t size() const override { return blocks_.inside(); }
  void resize(std::size_t capacity) override;
  void evict(std::size_t n) override;
  void forget(Key key) override;
  std::size_t nbytes() const override;
  // Of the sequence whose last turn used `key` last; one of a shared run names only what it shares. Unknown keys are ignored.
  // Throws std::invalid_argument where a time is not finite, or `seconds` negative.
  void hint(Key key, Hint hint, double seconds, double now_s);
  std::vector<Key> keys() const;  // inside, of a chain the tail first

 private:
  static constexpr std::size_t kSample = 64;

  struct Run {  // consecutive blocks of the chain with one record
    std::size_t begin, end;
    std::uint32_t record;
  };

  std::size_t find(const Request& request);
  void begin_turn(std::size_t known, std::int32_t output_tokens);
  void learn_used();
  void label();
  std::uint32_t add_shared(std::uint32_t before, std::size_t at);
  void extend_turn(std::size_t known, std::int32_t output_tokens);
  void set_record(std::uint32_t block, std::uint32_t record);
  void share(std::uint32_t at);
  void enter();
  void shrink(std::size_t most);
  void exit(std::uint32_t at);
  std::uint32_t victim();
  std::size_t most_ghosts() const;

  std::size_t capacity_;
  std::uint64_t random_;
  double depth_worth_;
  double now_s_ = -std::numeric_limits<double>::infinity();
  std::uint32_t sessions_ = 0;
  Model model_;
  Records records_{model_};
  Blocks blocks_;
  // of the request under way
  std::uint32_t session_ = 0;
  double since_s_ = 0.0;
  Features turn_;
  std::vector<std::uint32_t> chain_;
  std::vector<Run> runs_;
};

}  // namespace kvterrace::policy
