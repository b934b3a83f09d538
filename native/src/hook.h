#pragma once
#include <cstdint>
namespace kvterrace {
struct Completion { std::int64_t nbytes; std::int32_t error; /* errno, 0 = none */ };
class Hook {            // run once, without the GIL, on the thread that completed the operation; must not throw
 public:
  virtual ~Hook() = default;
  virtual void run(const Completion&) noexcept = 0;
};
}
