#include "manual.h"

#include "core.h"
#include "pool.h"

namespace kvterrace {

void ManualDevice::set_now_s(double now_s) {
  now_s_ = now_s;
  core_->time_moved();
}

std::vector<std::uint64_t> ManualDevice::recalls() {
  std::vector<std::uint64_t> numbers;
  for (const std::uint64_t id : core_->take_recalls()) {
    for (auto& [number, piece] : pieces_) {
      if (piece->op->id != id) continue;
      piece->recalled = true;
      numbers.push_back(number);
    }
  }
  return numbers;
}

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
