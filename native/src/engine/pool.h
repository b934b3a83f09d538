// Threads that each do one piece at a time with preadv, pwritev and fdatasync: for kernels and containers that have, or
// allow, no io_uring.
#pragma once

#include <condition_variable>
#include <mutex>

#include "device.h"

namespace kvterrace {

class PoolDevice final : public Device {
 public:
  explicit PoolDevice(int threads) : count_(threads) {}

  int start(Core& core) override;
  void kick() override;
  void stop() override;

 private:
  void run(Core& core);

  const int count_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::uint64_t kicks_ = 0;
  bool stopping_ = false;
};

// Carry the piece out on this thread, to its end.
void perform(Piece& piece);

}  // namespace kvterrace
