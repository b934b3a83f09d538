#include "policy/index_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvterrace::policy {
namespace {

constexpr double kBias = -2.0;
constexpr double kRate = 0.2;
constexpr double kSquaresAtFirst = 8.0;

// Values of the features. Tables lie one after another; three sets of them.
constexpr int kKinds = 2, kTurns = 12, kRelative = 26, kLengths = 16, kGaps = 33, kSizes = 13;
constexpr int kCoarseBins = 8;
constexpr std::uint32_t kKindAt = 0;
constexpr std::uint32_t kTurnAt = kKindAt + kKinds * 32;
constexpr std::uint32_t kRelativeAt = kTurnAt + kTurns * 32;
constexpr std::uint32_t kBlocksAt = kRelativeAt + kRelative * kCoarseBins;
constexpr std::uint32_t kNewAt = kBlocksAt + kLengths * kCoarseBins;
constexpr std::uint32_t kGapAt = kNewAt + 2 * kLengths * kCoarseBins;
constexpr std::uint32_t kKnownNewAt = kGapAt + kGaps * kCoarseBins;
constexpr std::uint32_t kOutputAt = kKnownNewAt + kSizes * kSizes * kCoarseBins;
constexpr std::uint32_t kOutputBlocksAt = kOutputAt + kLengths * 32;
constexpr std::uint32_t kSet = kOutputBlocksAt + kLengths * kLengths * kCoarseBins;
// Tables of hints, after the sets.
constexpr int kDistances = 25;  // in bins, from the one that the hint names
constexpr std::uint32_t kClosedAt = 3 * kSet;
constexpr std::uint32_t kOneOffAt = kClosedAt + 32;
constexpr std::uint32_t kDistanceAt = kOneOffAt + 32;
constexpr std::uint32_t kDueAt = kDistanceAt + kDistances * kCoarseBins;
constexpr std::uint32_t kEnd = kDueAt + 32 * 32;
// What hints are taken to be worth before anything is learned of them.
constexpr double kNever = -4.0;
constexpr double kTooEarly = -2.0, kAboutThen = 2.0;

std::array<double, kBins + 1> bin_starts() {
  std::array<double, kBins + 1> starts{};
  for (int bin = 1; bin <= kBins; ++bin) {
    starts[static_cast<std::size_t>(bin)] = std::exp2(0.5 * (bin - 1));
  }
  return starts;
}

// 0 for none, else 1 + floor(log2), at most `values` - 1.
int size_class(std::int64_t count, int values) {
  return std::min(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(count, 0)))), values - 1);
}

int turn_class(std::int64_t turn) {
  return turn <= 4 ? static_cast<int>(turn) - 1 : std::min(size_class(turn, 64) + 1, kTurns - 1);
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

const std::array<double, kBins + 1> kBinStart_s = bin_starts();

int bin_of(double age_s) {
  return static_cast<int>(std::upper_bound(kBinStart_s.begin() + 1, kBinStart_s.end(), age_s) - kBinStart_s.begin()) - 1;
}

Model::Model() : weights_(kEnd) {
  for (std::uint32_t at = kClosedAt; at < kDistanceAt; ++at) weights_[at].value = kNever;
  for (int distance = -12; distance <= 2; ++distance) {
    const auto row = static_cast<std::uint32_t>(distance + 12) * kCoarseBins;
    for (std::uint32_t at = 0; at < kCoarseBins; ++at) {
      weights_[kDistanceAt + row + at].value = distance < -3 ? kTooEarly : distance < -1 ? 0.0 : kAboutThen;
    }
  }
}

Row Model::row(const Features& f, Kind kind) {
  const bool known = f.gap_s >= 0;
  const std::int32_t fresh = f.blocks - f.known_blocks;
  const int gap = known ? std::min(static_cast<int>(2.0 * std::log2(1.0 + f.gap_s)), kGaps - 2) : kGaps - 1;
  const auto at = [](std::uint32_t table, int value, int bins) {
    return static_cast<std::uint16_t>(table + static_cast<std::uint32_t>(value * bins));
  };
  Row row;
  row.kind = kind;
  row.at = {at(kKindAt, kind == Kind::kLast ? 1 : 0, 32),
            at(kTurnAt, turn_class(f.turn), 32),
            at(kBlocksAt, size_class(f.blocks, kLengths), kCoarseBins),
            at(kNewAt, 2 * size_class(fresh, kLengths) + (known ? 1 : 0), kCoarseBins),
            at(kGapAt, gap, kCoarseBins),
            at(kKnownNewAt, size_class(f.known_blocks, kSizes) * kSizes + size_class(fresh, kSizes), kCoarseBins)};
  row.has_gap = known;
  row.twice_log_gap = static_cast<std::uint8_t>(std::clamp(std::floor(2.0 * f.log_gap + 0.5), 0.0, 200.0));
  if (f.output_tokens >= 0 && kind != Kind::kShared) {
    const int output = size_class(f.output_tokens, kLengths);
    row.output = at(kOutputAt, output, 32);
    row.output_blocks = at(kOutputBlocksAt, output * kLengths + size_class(f.blocks, kLengths), kCoarseBins);
    const double over_s = 1.0 + 0.015 * f.output_tokens;
    const auto first = std::lower_bound(kBinStart_s.begin(), kBinStart_s.end() - 1, over_s);
    row.answered_bin = static_cast<std::uint8_t>(first - kBinStart_s.begin());
  }
  return row;
}

int Model::entries(const Row& row, int bin, std::array<std::uint32_t, kMost>& at) {
  const auto full = static_cast<std::uint32_t>(bin), coarse = full / 4;
  const bool answered = bin >= row.answered_bin;
  const std::uint32_t set = row.kind == Kind::kShared ? 2 * kSet : answered ? kSet : 0;
  int count = 0;
  for (; count < Row::kFull + Row::kCoarse; ++count) {
    const auto table = static_cast<std::size_t>(count);
    at[table] = set + row.at[table] + (count < Row::kFull ? full : coarse);
  }
  const int relative = row.has_gap ? std::clamp(bin - row.twice_log_gap, -12, 12) + 12 : kRelative - 1;
  at[static_cast<std::size_t>(count++)] = set + kRelativeAt + static_cast<std::uint32_t>(relative) * kCoarseBins + coarse;
  if (answered) {
    at[static_cast<std::size_t>(count++)] = set + row.output + full;
    at[static_cast<std::size_t>(count++)] = set + row.output_blocks + coarse;
  }
  if (row.hint != Hint::kNothing && bin >= row.hint_bin) {
    if (row.hint == Hint::kReturns) {
      const int distance = std::clamp(bin - row.due_bin, -12, 12) + 12;
      at[static_cast<std::size_t>(count++)] = kDistanceAt + static_cast<std::uint32_t>(distance) * kCoarseBins + coarse;
      at[static_cast<std::size_t>(count++)] = kDueAt + row.due_bin * std::uint32_t{32} + full;
    } else {
      at[static_cast<std::size_t>(count++)] = (row.hint == Hint::kClosed ? kClosedAt : kOneOffAt) + full;
    }
  }
  return count;
}

double Model::chance(const Row& row, int bin) const {
  std::array<std::uint32_t, kMost> at{};
  const int count = entries(row, bin, at);
  double sum = kBias;
  for (int n = 0; n < count; ++n) sum += weights_[at[static_cast<std::size_t>(n)]].value;
  return sigmoid(sum);
}

void Model::learn(const Row& row, int bin, bool used, double weight) {
  if (bin >= kBins) return;
  std::array<std::uint32_t, kMost> at{};
  const int count = entries(row, bin, at);
  double sum = kBias;
  for (int n = 0; n < count; ++n) sum += weights_[at[static_cast<std::size_t>(n)]].value;
  const double gradient = (sigmoid(sum) - (used ? 1.0 : 0.0)) * weight;
  for (int n = 0; n < count; ++n) {
    Weight& one = weights_[at[static_cast<std::size_t>(n)]];
    one.squares += gradient * gradient;
    one.value -= kRate * gradient / std::sqrt(kSquaresAtFirst + one.squares);
  }
  ++version_;
}

double Model::index(const Row& row, int bin) const {
  double best = 0.0, uses = 0.0, held_s = 0.0, left = 1.0;
  for (int at = bin; at < kBins; ++at) {
    const double chance_now = chance(row, at);
    const auto place = static_cast<std::size_t>(at);
    uses += left * chance_now;
    held_s += left * (1.0 - 0.5 * chance_now) * (kBinStart_s[place + 1] - kBinStart_s[place]);
    best = std::max(best, uses / held_s);
    left *= 1.0 - chance_now;
  }
  return best;
}

}  // namespace kvterrace::policy
