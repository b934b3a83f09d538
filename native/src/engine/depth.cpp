#include "depth.h"

#include <algorithm>

namespace kvterrace {

void Depth::ended(std::uint64_t nbytes, bool full, double now_s) {
  if (limit_ <= kLeast) return;
  if (!full) {
    begun_ = false;
    return;
  }
  if (!begun_) {
    begun_ = true;
    pieces_ = 0;
    nbytes_ = 0;
    since_s_ = now_s;
    return;  // it has been under way since before the measurement
  }
  ++pieces_;
  nbytes_ += nbytes;
  if (pieces_ < kPieces * now_ || now_s <= since_s_) return;
  begun_ = false;
  measured(static_cast<double>(nbytes_) / (now_s - since_s_), static_cast<double>(nbytes_) / pieces_);
}

void Depth::measured(double nbytes_per_s, double piece_nbytes) {
  const bool alike = piece_nbytes <= piece_nbytes_ * kAlike && piece_nbytes_ <= piece_nbytes * kAlike;
  if (now_ != kept_ && rate_ > 0 && alike) {
    const bool better = nbytes_per_s >= rate_ * (now_ > kept_ ? kMore : kLess);
    if (!better) {
      now_ = kept_;
      up_ = !up_;
      quiet_ = kQuiet;
      return;
    }
    up_ = now_ > kept_;
    quiet_ = 0;
  } else if (now_ != kept_) {  // another load: this trial says nothing
    now_ = kept_;
    rate_ = 0.0;
    return;
  }
  kept_ = now_;
  rate_ = nbytes_per_s;
  piece_nbytes_ = piece_nbytes;
  if (quiet_ > 0) {
    --quiet_;
    return;
  }
  try_another();
}

void Depth::try_another() {
  if (up_ && now_ == limit_) up_ = false;
  if (!up_ && now_ == least()) up_ = true;
  now_ = up_ ? std::min(limit_, now_ + kStep) : std::max(least(), now_ - now_ / 4);
}

}  // namespace kvterrace
