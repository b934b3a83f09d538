#include "pool.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "core.h"

namespace kvterrace {

void perform(Piece& piece) {
  const int fd = piece.op->file->descriptor();
  ssize_t answer;
  do {
    if (fd < 0) {
      answer = fd;
      continue;
    }
    const auto count = static_cast<int>(piece.memory.size());
    const auto place = static_cast<off_t>(piece.place());
    switch (piece.op->kind) {
      case Kind::kRead:
        answer = ::preadv(fd, piece.memory.data(), count, place);
        break;
      case Kind::kWrite:
        answer = ::pwritev(fd, piece.memory.data(), count, place);
        break;
      default:
        answer = ::fdatasync(fd);
    }
    if (answer < 0) answer = -errno;
  } while (piece.advance(answer));
}

int PoolDevice::start(Core& core) {
  for (int n = 0; n < count_; ++n) core.spawn("kvt-posix", [this, &core] { run(core); });
  return 0;
}

void PoolDevice::kick() {
  std::lock_guard lock(mutex_);
  ++kicks_;
  work_.notify_one();
}

void PoolDevice::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  work_.notify_all();
}

void PoolDevice::run(Core& core) {
  while (true) {
    std::uint64_t seen;
    {
      std::lock_guard lock(mutex_);
      seen = kicks_;
    }
    if (auto piece = core.next_piece()) {
      kick();  // there may be more: each thread that finds work wakes one other
      perform(*piece);
      core.piece_done(*piece);
      continue;
    }
    std::unique_lock lock(mutex_);
    work_.wait(lock, [&] { return stopping_ || kicks_ != seen; });
    if (stopping_) return;
  }
}

}  // namespace kvterrace
