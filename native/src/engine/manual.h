// A device for tests: pieces wait until somebody says what came of them, and time is what somebody says it is.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace kvterrace {

class ManualDevice final : public Device {
 public:
  int start(Core& core) override {
    core_ = &core;
    return 0;
  }
  void kick() override {}
  void stop() override {}
  double now_s() override { return now_s_; }
  bool steps_time() const override { return true; }
  bool recall() override { return true; }

  void set_now_s(double now_s);
  std::uint64_t pull();                                   // number of the next piece, 0 if none may start
  const Piece& piece(std::uint64_t number) const { return *pieces_.at(number); }
  bool answer(std::uint64_t number, std::int64_t answer);  // as a system call would; whether the piece goes on
  void perform(std::uint64_t number);                      // carry it out
  std::vector<std::uint64_t> recalls();                    // pieces that the core wants back since it was last asked

 private:
  void done(std::uint64_t number);

  Core* core_ = nullptr;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::unique_ptr<Piece>> pieces_;
  double now_s_ = 0.0;
};

}  // namespace kvterrace
