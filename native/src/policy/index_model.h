// What the return-index policy has learned: how likely the blocks of a turn are used again, by the time since, given that they
// were not yet. A logistic regression over small tables, one entry of each for an example, trained as it goes (AdaGrad:
// Duchi, Hazan, Singer, 2011, "Adaptive subgradient methods for online learning and stochastic optimization").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvterrace::policy {

// Bins of age: bin 0 from 0 s, bin i from 2^((i-1)/2) s on, up to kBins - 1; from kBins on "never".
inline constexpr int kBins = 31;
extern const std::array<double, kBins + 1> kBinStart_s;
int bin_of(double age_s);

enum class Kind : std::uint8_t { kBody, kLast, kShared };

// What a client says of a sequence. It is one more feature of the turn: the model starts from a guess of what each is worth and
// learns how often it is true. The next turn knows nothing of it.
enum class Hint : std::uint8_t {
  kNothing,
  kClosed,    // it will not be used again
  kOneOff,    // the same, of a job that never returns
  kReturns,   // in about so many seconds
  kShared,    // the prefix that ends here is used by others, too
  kPriority,  // for so many seconds, its uses count more
};

// What is known of a turn (or of a shared run's use) when it is made.
struct Features {
  double gap_s = -1.0;   // since the turn before; < 0: there was none
  double log_gap = 0.0;  // smoothed log2(1 + gap_s)
  std::int32_t turn = 1;  // of its session, from 1 on
  std::int32_t blocks = 0;
  std::int32_t known_blocks = 0;  // the known head of them
  std::int32_t output_tokens = -1;
};

// The tables' entries for one turn, without its age.
struct Row {
  static constexpr int kFull = 2, kCoarse = 4;  // tables by bin, by four bins
  std::array<std::uint16_t, kFull + kCoarse> at{};
  std::uint16_t output = 0, output_blocks = 0;  // of the tables with output length
  std::uint8_t twice_log_gap = 0;
  bool has_gap = false;
  Kind kind = Kind::kBody;
  std::uint8_t answered_bin = kBins;  // from it on the answer is over and its length known
  Hint hint = Hint::kNothing;            // none of kShared, kPriority
  std::uint8_t hint_bin = 0;          // from it on the hint is known
  std::uint8_t due_bin = 0;           // of kReturns
};

class Model {
 public:
  Model();

  static Row row(const Features& features, Kind kind);
  // That it happens in `bin`, if not before.
  double chance(const Row& row, int bin) const;
  void learn(const Row& row, int bin, bool used, double weight);
  // Best expected uses by block-second over any horizon from `bin` on (a Gittins index).
  double index(const Row& row, int bin) const;
  // Counts what was learned.
  std::uint64_t version() const { return version_; }
  std::size_t nbytes() const { return weights_.capacity() * sizeof(Weight); }

 private:
  struct Weight {
    double value = 0.0, squares = 0.0;
  };
  static constexpr int kMost = 11;
  // The entries that count for it; returns how many.
  static int entries(const Row& row, int bin, std::array<std::uint32_t, kMost>& at);

  std::vector<Weight> weights_;
  std::uint64_t version_ = 0;
};

}  // namespace kvterrace::policy
