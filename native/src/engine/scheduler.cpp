#include "scheduler.h"

#include <algorithm>
#include <cerrno>

namespace kvterrace {

bool Piece::advance(std::int64_t answer) {
  if (recalled && (answer == -EINTR || answer == -EAGAIN)) answer = -ECANCELED;
  if (answer == -EINTR) return true;
  // io_uring alone answers this where a blocking call would wait: so let it block, on a thread of the kernel's.
  if (answer == -EAGAIN && !asynchronous) return asynchronous = true;
  if (answer < 0) {
    error = static_cast<std::int32_t>(-answer);
    return false;
  }
  if (op->kind == Kind::kSync) return false;
  std::uint64_t left = static_cast<std::uint64_t>(answer);
  moved += left;
  // With O_DIRECT, I/O cannot go on from an unaligned place; stopping there means end of file.
  if (moved >= nbytes || left == 0 || (op->file->direct() && left % kPageNbytes)) return false;
  if (recalled) {
    error = ECANCELED;
    return false;
  }
  auto first = memory.begin();
  for (; left >= first->iov_len; ++first) left -= first->iov_len;
  memory.erase(memory.begin(), first);
  memory.front().iov_base = static_cast<char*>(memory.front().iov_base) + left;
  memory.front().iov_len -= left;
  return true;
}

void Scheduler::add(Op* op) {
  auto& queue = waiting_[static_cast<std::size_t>(op->io_class)];
  op->place = queue.insert(queue.end(), op);
}

void Scheduler::leave(Op* op) {
  op->exhausted = true;
  waiting_[static_cast<std::size_t>(op->io_class)].erase(op->place);
}

std::uint32_t Scheduler::lower_depth() const {
  const std::uint64_t share = std::uint64_t{limits_.lower_depth} * depth_.now() / limits_.depth;
  return std::max<std::uint32_t>(1, static_cast<std::uint32_t>(share));
}

bool Scheduler::at_depth() const { return in_flight_ >= depth_.now() || in_flight_ - demand_ >= lower_depth(); }

bool Scheduler::may_start(int io_class, std::uint64_t nbytes, double now_s) const {
  if (io_class == kDemand) {
    // When the depth has just been lowered, pieces of lower classes may be all of it. Those and this share are within the limit.
    return in_flight_ < depth_.now() || demand_ + lower_depth() < depth_.now();
  }
  if (in_flight_ >= depth_.now()) return false;
  const bool busy = demand_ > 0 || now_s - demand_seen_s_ < limits_.busy_s;
  const std::uint64_t most = busy ? limits_.lower_nbytes_busy : limits_.lower_nbytes;
  return in_flight_ - demand_ < lower_depth() && lower_nbytes_ + nbytes <= most;
}

std::unique_ptr<Piece> Scheduler::next(double now_s) {
  for (int io_class = 0; io_class < kClasses; ++io_class) {
    auto& queue = waiting_[static_cast<std::size_t>(io_class)];
    if (queue.empty()) continue;
    Op* op = queue.front();
    const std::uint64_t most = io_class == kDemand ? limits_.demand_piece_nbytes : limits_.lower_piece_nbytes;
    const std::uint64_t nbytes = std::min(op->nbytes - op->handed_out, most);
    if (!may_start(io_class, nbytes, now_s)) break;  // nor anything less urgent
    if (!op->started) {
      op->started = true;
      op->started_s = now_s;
    }
    auto piece = cut(op, nbytes);
    if (op->handed_out == op->nbytes) leave(op);
    ++in_flight_;
    if (io_class == kDemand) {
      ++demand_;
      demand_seen_s_ = now_s;
    } else {
      lower_nbytes_ += nbytes;
    }
    full_ |= at_depth();
    return piece;
  }
  full_ = at_depth();
  return nullptr;
}

std::unique_ptr<Piece> Scheduler::cut(Op* op, std::uint64_t nbytes) {
  auto piece = std::make_unique<Piece>();
  piece->op = op;
  piece->start = op->handed_out;
  piece->nbytes = nbytes;
  for (std::uint64_t left = nbytes; left > 0;) {
    const iovec& whole = op->memory[op->next];
    const std::uint64_t size = std::min<std::uint64_t>(whole.iov_len - op->within, left);
    piece->memory.push_back({static_cast<char*>(whole.iov_base) + op->within, size});
    left -= size;
    op->within += size;
    if (op->within == whole.iov_len) {
      ++op->next;
      op->within = 0;
    }
  }
  op->handed_out += nbytes;
  ++op->in_flight;
  return piece;
}

bool Scheduler::done(const Piece& piece, double now_s) {
  Op* op = piece.op;
  depth_.ended(piece.moved, full_, now_s);
  --in_flight_;
  if (op->io_class == kDemand) {
    --demand_;
    demand_seen_s_ = now_s;
  } else {
    lower_nbytes_ -= piece.nbytes;
  }
  --op->in_flight;
  const bool partial = piece.error != 0 || (op->kind != Kind::kSync && piece.moved < piece.nbytes);
  // Pieces end in any order; what counts is the one that lies first, as if they had been done one after the other.
  if (partial && (!op->cut_short || piece.start + piece.moved < op->good_nbytes)) {
    op->cut_short = true;
    op->good_nbytes = piece.start + piece.moved;
    op->error = piece.error;
  }
  if (partial && !op->exhausted) leave(op);
  const bool over = op->exhausted && op->in_flight == 0;
  if (over) op->ended_s = now_s;
  return over;
}

bool Scheduler::expire(Op* op, double now_s) {
  op->late = true;
  if (!op->exhausted) leave(op);
  if (op->in_flight > 0) return false;
  if (!op->started) op->started_s = now_s;
  op->ended_s = now_s;
  return true;
}

std::size_t Scheduler::drop_waiting() {
  std::size_t dropped = 0;
  for (auto& queue : waiting_) {
    for (auto it = queue.begin(); it != queue.end();) {
      if ((*it)->started) {
        ++it;
        continue;
      }
      ++dropped;
      it = queue.erase(it);
    }
  }
  return dropped;
}

}  // namespace kvterrace
