// Which piece goes to the device next. Pure: no system call, no clock, no lock; the core holds its mutex around each call.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>

#include "depth.h"
#include "op.h"

namespace kvterrace {

// What may be in the device at once, at most: `Depth` says how much of it is of use. "Lower" is every class below DEMAND.
struct Limits {
  std::uint32_t depth = 64;        // pieces
  // Pieces of lower classes. What is left of `depth` is for DEMAND alone, also while less than `depth` is used: so, unless
  // they are equal, a demand read waits for nothing but other demand reads.
  std::uint32_t lower_depth = 32;
  std::uint64_t demand_piece_nbytes = 1 << 20;
  std::uint64_t lower_piece_nbytes = 512 << 10;
  // Never more bytes of lower classes than this: so no demand read, seen coming or not, has more of them ahead of it ...
  std::uint64_t lower_nbytes = 4 << 20;
  // ... and no more than this while demand reads run, or did within the last `busy_s`.
  std::uint64_t lower_nbytes_busy = 1 << 20;
  double busy_s = 0.010;
};

// Classes in strict order, first come first served within one. Operations are cut into pieces as they are handed out, so
// that what waits is never in the way of what is more urgent.
class Scheduler {
 public:
  explicit Scheduler(const Limits& limits) : limits_(limits), depth_(limits.depth) {}

  void add(Op* op);
  // The next piece that may go to the device now; null if none may. Its op is marked as started.
  std::unique_ptr<Piece> next(double now_s);
  // `piece` left the device; whether its op is over with that.
  bool done(const Piece& piece, double now_s);
  // The deadline of `op` has passed, with part of it waiting or in the device: no further piece of it is handed out.
  // Whether it is over with that.
  bool expire(Op* op, double now_s);
  // Forget what has not started. Returns how many operations that were.
  std::size_t drop_waiting();
  bool idle() const { return in_flight_ == 0; }
  std::uint32_t depth() const { return depth_.now(); }

 private:
  bool may_start(int io_class, std::uint64_t nbytes, double now_s) const;
  std::unique_ptr<Piece> cut(Op* op, std::uint64_t nbytes);

  void leave(Op* op);  // no further piece of it is handed out
  std::uint32_t lower_depth() const;
  bool at_depth() const;

  const Limits limits_;
  Depth depth_;
  std::array<std::list<Op*>, kClasses> waiting_;  // lists: what leaves from their middle is not searched for
  std::uint32_t in_flight_ = 0;
  std::uint32_t demand_ = 0;  // of those in flight
  std::uint64_t lower_nbytes_ = 0;
  bool full_ = false;  // it was the depth, and nothing else, that kept the last piece back
  double demand_seen_s_ = -1e9;
};

}  // namespace kvterrace
