// io_uring, driven by one thread: it alone submits and reaps, so that the ring needs no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "descriptor.h"
#include "device.h"
#include "ring.h"

namespace kvterrace {

class UringDevice final : public Device {
 public:
  int start(Core& core) override;
  void kick() override;
  bool recall() override {
    kick();
    return true;
  }
  void stop() override;
  void register_memory(void* start, std::size_t nbytes, int fd) override;

 private:
  struct Region {
    void* start;
    std::size_t nbytes;
    int fd;  // where to answer; -1 if there is nothing to do
  };

  void run(Core& core, int started_fd);
  void drive(Core& core);
  void wake_thread();
  void watch_kicks();
  void give(Core& core, std::unique_ptr<Piece> piece);
  void took(Core& core, std::unique_ptr<Piece> piece, std::int64_t answer);
  void call_back(const std::vector<std::uint64_t>& ids);
  void register_now();

  // of the thread
  std::unique_ptr<Ring> ring_;
  std::unordered_set<Piece*> in_ring_;
  int start_error_ = 0;
  std::uint64_t kick_count_ = 0;  // where the kernel puts what it reads from `kick_fd_`
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  Descriptor kick_fd_;
  Region region_{nullptr, 0, -1};
};

}  // namespace kvterrace
