// How many pieces a device is given at once. Pure; the scheduler holds it.
//
// The rule: a measurement is the throughput over 16 times the depth in pieces, all of them ended while the depth was used
// up. Now and then another depth is tried for one measurement:
//   - a quarter less: kept, if it moves at least 95 % as much. The rest of the depth only added latency (Little's law:
//     as many more in the device at the same throughput wait as much longer there);
//   - 8 more: kept, if it moves at least 5 % more, and then tried again at once.
// Else it goes back, and eight measurements pass before the next trial, which goes the other way. Additive up,
// multiplicative down, as TCP does (Chiu and Jain, 1989, "Analysis of the increase and decrease algorithms ..."), but by
// throughput, since a drive drops nothing: hill climbing, as the thread pool of .NET does it. Measurements whose pieces
// differ in size by more than a quarter are not compared. It starts at the limit: a burst into an idle drive is not held up.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvterrace {

class Depth {
 public:
  static constexpr std::uint32_t kLeast = 8;

  explicit Depth(std::uint32_t limit) : limit_(limit), now_(limit), kept_(limit) {}

  std::uint32_t now() const { return now_; }
  // A piece has ended. `full`: the depth was used up when the device last asked for more.
  void ended(std::uint64_t nbytes, bool full, double now_s);

 private:
  static constexpr std::uint32_t kStep = 8;
  static constexpr std::uint32_t kPieces = 16;  // of a measurement, times the depth
  static constexpr std::uint32_t kQuiet = 8;   // measurements between trials
  static constexpr double kLess = 0.95;        // of the throughput is enough for a smaller depth
  static constexpr double kMore = 1.05;        // of it is asked of a larger one
  static constexpr double kAlike = 1.25;       // sizes

  std::uint32_t least() const { return std::min(kLeast, limit_); }
  void measured(double nbytes_per_s, double piece_nbytes);
  void try_another();

  const std::uint32_t limit_;
  std::uint32_t now_;
  std::uint32_t kept_;  // the depth that `rate_` was measured at
  double rate_ = 0.0;   // bytes/s; 0: not known
  double piece_nbytes_ = 0.0;
  std::uint32_t quiet_ = 0;  // measurements until the next trial
  bool up_ = false;          // where that will go
  // the measurement under way
  bool begun_ = false;
  std::uint32_t pieces_ = 0;
  std::uint64_t nbytes_ = 0;
  double since_s_ = 0.0;
};

}  // namespace kvterrace
