// What travels through the engine: operations, as submitted, and the pieces that a device is given of them.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "../hook.h"
#include "file.h"

namespace kvterrace {

inline constexpr std::uint64_t kPageNbytes = 4096;
inline constexpr int kClasses = 4;  // DEMAND, PREFETCH, DEMOTION, SCRUB, as IoClass
inline constexpr int kDemand = 0;
inline constexpr int kDemotion = 2;

enum class Kind : std::uint8_t { kRead, kWrite, kSync, kCall };

// Who runs what is to be done when the device is through: nobody, a thread of ours, one of Python's.
enum class Finish : std::uint8_t { kNone, kHook, kPython };

// One request. Memory and hook belong to the submitter, who keeps both alive until the result was taken.
struct Op {
  std::uint64_t id = 0;
  Kind kind = Kind::kCall;
  int io_class = 0;
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;
  std::vector<iovec> memory;
  std::uint64_t nbytes = 0;
  Finish finish = Finish::kNone;
  Hook* hook = nullptr;
  // Seconds from `submit`. After that nothing more of it goes to the device, and what is there is called back, if it can be.
  double patience_s = std::numeric_limits<double>::infinity();
  std::string refusal;  // not empty: it never reaches a device; `error` says the same in a number

  // How far it is, guarded by the core's mutex.
  std::size_t next = 0;         // first of `memory` not handed out wholly
  std::uint64_t within = 0;     // bytes of that one handed out
  std::uint64_t handed_out = 0; // bytes handed out in pieces
  std::uint32_t in_flight = 0;  // pieces in the device
  bool started = false;
  bool exhausted = false;       // no further piece will be handed out
  std::list<Op*>::iterator place;  // in the scheduler's queue, from `add` until it is exhausted
  bool late = false;            // its deadline has passed while the device was not through with it
  bool advise = false;          // the kernel has to be told to drop the pages of a file without O_DIRECT
  bool cut_short = false;       // a piece ended early; then:
  std::uint64_t good_nbytes = 0;  // bytes moved in front of the first gap
  std::int32_t error = 0;       // errno of the piece at that gap
  double deadline_s = std::numeric_limits<double>::infinity();
  double started_s = 0.0;
  double ended_s = 0.0;

  std::uint64_t moved() const { return cut_short ? good_nbytes : (refusal.empty() ? handed_out : 0); }
  // Whether it ended early because of its deadline. What ended before a piece that was called back, or was never handed
  // out, ended by itself.
  bool expired() const { return late && (cut_short ? error == ECANCELED : !started || handed_out < nbytes); }
  std::int32_t number() const { return expired() ? ECANCELED : error; }  // for hooks
};

// A part of one READ or WRITE, or one SYNC: what a device does at a time.
struct Piece {
  Op* op = nullptr;
  std::uint64_t start = 0;  // in the operation
  std::uint64_t nbytes = 0;
  std::uint64_t moved = 0;
  std::vector<iovec> memory;  // what is left of it
  bool recalled = false;      // its operation's deadline has passed, and the kernel was told to let it go
  bool asynchronous = false;  // tell the kernel not to try without blocking first

  std::uint64_t place() const { return op->offset + start + moved; }

  // Take in what a system call answered (bytes, or -errno); whether the piece has to be given to the device again.
  bool advance(std::int64_t answer);

  std::int32_t error = 0;
};

}  // namespace kvterrace
