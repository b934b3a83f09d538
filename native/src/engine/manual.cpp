#include "manual.h"

#include "core.h"
#include "pool.h"

namespace kvterrace {

std::uint64_t ManualDevice::pull() {
  auto piece = core_->next_piece();
  if (!piece) return 0;
  pieces_.emplace(++last_, std::move(piece));
  return last_;
}

bool ManualDevice::answer(std::uint64_t number, std::int64_t answer) {
  if (pieces_.at(number)->advance(answer)) return true;
  done(number);
  return false;
}

void ManualDevice::perform(std::uint64_t number) {
  kvterrace::perform(*pieces_.at(number));
  done(number);
}

void ManualDevice::done(std::uint64_t number) {
  core_->piece_done(*pieces_.at(number));
  pieces_.erase(number);
}

}  // namespace kvterrace
