// What carries pieces out. A device asks the core for them (`Core::next_piece`) and tells it what came of them
// (`Core::piece_done`); it may do so from one thread or from several.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op.h"

namespace kvterrace {

class Core;

double monotonic_s();  // CLOCK_MONOTONIC, as Python's time.monotonic
// Let `body` start a thread that never sees a signal: those are for the threads of Python.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();

 private:
  alignas(8) unsigned char before_[128];
};

class Device {
 public:
  virtual ~Device() = default;
  // Takes up its threads, by `Core::spawn`. 0, or an errno; throws what `spawn` throws. Either way it has to be stopped.
  virtual int start(Core& core) = 0;
  // There may be something new to do. Any thread; does not block.
  virtual void kick() = 0;
  // `Core::take_recalls` has something. Under the core's mutex, any thread; does not block. False: it can call nothing back,
  // and lets it run to its end.
  virtual bool recall() { return false; }
  // Have the threads end; does not wait for them. Nothing may be in flight or waiting.
  virtual void stop() = 0;
  // Make I/O on this memory cheaper, if the device can: answered by `fd` (an eventfd) becoming readable, with 1 for no
  // and 2 for yes. The memory has to outlive the device.
  virtual void register_memory(void* start, std::size_t nbytes, int fd);
  virtual double now_s() { return monotonic_s(); }
  virtual bool steps_time() const { return false; }  // whether `now_s` moves only when somebody says so, and tells the core
};

}  // namespace kvterrace
