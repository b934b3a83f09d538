// An engine without Python: from submitted operations to results, by way of a scheduler, a device and whoever finishes.
//
// Nothing here waits on behalf of Python, and no thread of ours ever takes the GIL: what a thread of Python waits for is
// an eventfd, which it does in Python. So neither a hung drive nor the interpreter's end finds one inside this code.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "descriptor.h"
#include "device.h"
#include "scheduler.h"

namespace kvterrace {

// Told once of an operation that the device still has at its deadline. Its memory is lent until the operation itself comes.
struct Late {
  std::uint64_t id;
  double started_s;
  double at_s;
};

// Threads that run hooks, and the copies among CALLs.
inline constexpr int kHookThreads = 4;

class Core {
 public:
  // `serial`: Python's finishes and CALLs go to one pool, whatever they are. Throws std::system_error.
  Core(std::unique_ptr<Device> device, const Limits& limits, bool serial);
  ~Core() = default;  // only of one that did not start, or was joined
  // Destroys it, or lets it be for ever if something is still in flight.
  static void dispose(std::unique_ptr<Core> core);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // 0, or the errno with which the device refuses or no more threads can be had: then none is left.
  int start();

  // For whoever submits. Thread-safe; none of it blocks.
  bool submit(std::vector<std::unique_ptr<Op>> ops);  // false after `close`; then nothing was taken
  // What has ended, and what has not at its deadline; `enough` says that a poll should wait no longer even if that is
  // nothing.
  std::vector<std::unique_ptr<Op>> take(std::vector<Late>& late, bool& enough);
  void wake();
  std::uint64_t in_flight() const;   // submitted, not taken
  std::uint64_t unfinished() const;  // submitted, not ended
  std::uint32_t depth() const;       // pieces that the device is given at once now

  // For Python's threads that finish. Pool 0: short ones; pool 1: CALLs of DEMOTION and SCRUB, which may block.
  Op* take_job(int pool);        // most urgent first; null if there is none
  void job_done(std::uint64_t id);

  // Take nothing new. `quiet_fd` becomes readable once nothing is unfinished.
  void close();
  // After `close`. Nothing unfinished: tells all threads but Python's to end and returns true; `gone_fd` becomes readable
  // once they have. Else: what has not started never will, and whatever is in flight keeps its memory and threads.
  bool end();
  // After `end` returned true. Short once `gone_fd` is readable; until then it waits, for a drive if need be: a thread may
  // be closing a file.
  void join();
  void release_fds();  // when nobody waits on them any more

  // eventfds: results to take; nothing unfinished after `close`; results came while none were there (for a subscriber);
  // one count for each job of a pool; all our threads have ended after `end`.
  int ready_fd() const { return ready_.get(); }
  int quiet_fd() const { return quiet_.get(); }
  int bell_fd() const { return bell_.get(); }
  int jobs_fd(int pool) const { return jobs_fd_[static_cast<std::size_t>(pool)].get(); }
  int gone_fd() const { return gone_.get(); }

  Device& device() { return *device_; }

  // For devices.
  void spawn(const char* name, std::function<void()> body);  // during `start` only; throws std::system_error
  std::unique_ptr<Piece> next_piece();
  void piece_done(const Piece& piece);
  std::vector<std::uint64_t> take_recalls();  // operations whose pieces the device should let go of
  void time_moved();                          // for a device that steps time

 private:
  using Queues = std::array<std::deque<Op*>, kClasses>;

  void land(Op* op);  // the device is through with it
  void let_finish(Op* op);
  void post(Op* op);  // it has ended
  void announce();    // there is something to take
  void expire(double now_s);
  void keep_time();
  void run_hooks();
  void close_left(std::unique_lock<std::mutex>& lock);  // unlocks
  static Op* first_of(Queues& queues);

  mutable std::mutex mutex_;
  std::condition_variable hook_work_;
  std::condition_variable clock_work_;
  const std::unique_ptr<Device> device_;
  Scheduler scheduler_;
  const bool serial_;
  const pid_t pid_;  // a fork has our memory, but none of our threads
  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  Queues hooks_;
  std::array<Queues, 2> jobs_;
  std::vector<std::unique_ptr<Op>> results_;
  std::vector<Late> late_;
  std::set<std::pair<double, std::uint64_t>> deadlines_;  // of what the device is not through with
  std::vector<std::uint64_t> recalls_;
  Leaving leaving_;
  std::uint64_t in_flight_ = 0;
  std::uint64_t unfinished_ = 0;
  bool woken_ = false;
  bool closed_ = false;
  bool ended_ = false;
  Descriptor ready_;
  Descriptor quiet_;
  Descriptor bell_;
  Descriptor gone_;
  std::array<Descriptor, 2> jobs_fd_;
  std::vector<std::thread> threads_;
  int running_ = 0;  // of `threads_`; one may end before it was counted
};

}  // namespace kvterrace
