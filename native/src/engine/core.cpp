#include "core.h"

#include <fcntl.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <new>
#include <system_error>
#include <utility>

namespace kvterrace {

namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kLongestWaitS = 3600.0;

}  // namespace

double monotonic_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

SignalsBlocked::SignalsBlocked() {
  static_assert(sizeof(sigset_t) <= sizeof before_);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, reinterpret_cast<sigset_t*>(before_));
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, reinterpret_cast<sigset_t*>(before_), nullptr); }

void Device::register_memory(void*, std::size_t, int fd) { add_to(fd); }

Core::Core(std::unique_ptr<Device> device, const Limits& limits, bool serial)
    : device_(std::move(device)),
      scheduler_(limits),
      serial_(serial),
      pid_(::getpid()),
      ready_(Descriptor::eventfd(EFD_NONBLOCK)),
      quiet_(Descriptor::eventfd(EFD_NONBLOCK)),
      bell_(Descriptor::eventfd(0)),
      gone_(Descriptor::eventfd(EFD_NONBLOCK)),
      jobs_fd_{Descriptor::eventfd(EFD_SEMAPHORE), Descriptor::eventfd(EFD_SEMAPHORE)} {}

void Core::dispose(std::unique_ptr<Core> core) {
  // In a fork the threads are not here, so there is nothing to end and no lock to trust.
  if (::getpid() == core->pid_) {
    core->close();
    if (core->end()) return core->join();
  }
  static_cast<void>(core.release());
}

int Core::start() {
  const SignalsBlocked blocked;
  int number = 0;
  try {
    number = device_->start(*this);
    for (int n = 0; number == 0 && n < kHookThreads; ++n) spawn("kvt-finish", [this] { run_hooks(); });
    if (number == 0 && !device_->steps_time()) spawn("kvt-clock", [this] { keep_time(); });
  } catch (const std::system_error& error) {
    number = error.code().value();
  } catch (const std::bad_alloc&) {
    number = ENOMEM;
  }
  if (number != 0) {
    close();
    end();
    join();
  }
  return number;
}

void Core::spawn(const char* name, std::function<void()> body) {
  threads_.emplace_back([this, body = std::move(body)] {
    body();
    std::lock_guard lock(mutex_);
    if (--running_ == 0 && ended_) add_to(gone_.get());
  });
  pthread_setname_np(threads_.back().native_handle(), name);
  std::lock_guard lock(mutex_);
  ++running_;
}

bool Core::submit(std::vector<std::unique_ptr<Op>> ops) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    unfinished_ += ops.size();
    in_flight_ += ops.size();
    for (auto& owned : ops) {
      Op* op = owned.get();
      ops_.emplace(op->id, std::move(owned));
      if (op->refusal.empty() && op->kind != Kind::kCall) {
        scheduler_.add(op);
        if (op->patience_s < kForever) {
          op->deadline_s = device_->now_s() + op->patience_s;
          const auto added = deadlines_.emplace(op->deadline_s, op->id).first;
          if (added == deadlines_.begin()) clock_work_.notify_one();
        }
        continue;
      }
      if (!op->refusal.empty()) op->started_s = op->ended_s = device_->now_s();
      land(op);
    }
  }
  device_->kick();
  return true;
}

std::unique_ptr<Piece> Core::next_piece() {
  std::unique_lock lock(mutex_);
  std::unique_ptr<Piece> piece;
  while (true) {
    const double now_s = device_->now_s();
    expire(now_s);
    piece = scheduler_.next(now_s);
    if (!piece) break;
    Op* op = piece->op;
    if (piece->start == 0 && !op->file->hold()) {
      piece->error = EBADF;
      op->refusal = "file was closed";
      op->file.reset();
    }
    if (piece->error == 0 && (op->nbytes > 0 || op->kind == Kind::kSync)) break;
    if (scheduler_.done(*piece, now_s)) land(op);
  }
  close_left(lock);
  return piece;
}

void Core::piece_done(const Piece& piece) {
  std::unique_lock lock(mutex_);
  if (scheduler_.done(piece, device_->now_s())) land(piece.op);
  close_left(lock);
}

void Core::close_left(std::unique_lock<std::mutex>& lock) {
  Leaving leaving = std::exchange(leaving_, {});
  lock.unlock();
  close_all(leaving);
}

void Core::expire(double now_s) {
  bool recall = false;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_s) {
    Op* op = ops_.at(deadlines_.begin()->second).get();
    deadlines_.erase(deadlines_.begin());
    if (scheduler_.expire(op, now_s)) {
      land(op);
      continue;
    }
    announce();
    late_.push_back({op->id, op->started_s, now_s});
    recalls_.push_back(op->id);
    recall = true;
  }
  if (recall && !device_->recall()) recalls_.clear();
}

void Core::keep_time() {
  std::unique_lock lock(mutex_);
  while (!ended_) {
    expire(device_->now_s());
    close_left(lock);
    lock.lock();
    if (ended_) return;
    if (deadlines_.empty()) {
      clock_work_.wait(lock);
      continue;
    }
    const double left_s = std::clamp(deadlines_.begin()->first - device_->now_s(), 0.0, kLongestWaitS);
    clock_work_.wait_for(lock, std::chrono::duration<double>(left_s));
  }
}

void Core::time_moved() {
  std::unique_lock lock(mutex_);
  expire(device_->now_s());
  close_left(lock);
}

std::vector<std::uint64_t> Core::take_recalls() {
  std::lock_guard lock(mutex_);
  return std::exchange(recalls_, {});
}

void Core::land(Op* op) {
  if (op->deadline_s < kForever) deadlines_.erase({op->deadline_s, op->id});
  op->advise = op->file && op->started && !op->file->direct() && op->kind != Kind::kWrite;
  if (op->advise) {
    // The store budgets DRAM: what went through the page cache leaves it, by a thread that may take its time.
    hooks_[static_cast<std::size_t>(op->io_class)].push_back(op);
    hook_work_.notify_one();
    return;
  }
  if (op->file && op->started) op->file->drop(leaving_);
  let_finish(op);
}

void Core::let_finish(Op* op) {
  const auto io_class = static_cast<std::size_t>(op->io_class);
  switch (op->finish) {
    case Finish::kNone:
      if (op->kind == Kind::kCall && op->refusal.empty()) op->started_s = op->ended_s = device_->now_s();
      post(op);
      break;
    case Finish::kHook:
      hooks_[io_class].push_back(op);
      hook_work_.notify_one();
      break;
    case Finish::kPython: {
      const std::size_t pool = !serial_ && op->kind == Kind::kCall && op->io_class >= kDemotion ? 1 : 0;
      jobs_[pool][io_class].push_back(op);
      add_to(jobs_fd_[pool].get());
      break;
    }
  }
}

void Core::post(Op* op) {
  auto node = ops_.extract(op->id);
  announce();
  results_.push_back(std::move(node.mapped()));
  --unfinished_;
  if (closed_ && unfinished_ == 0) {
    add_to(ready_.get());
    add_to(quiet_.get());
  }
}

void Core::announce() {
  if (!results_.empty() || !late_.empty()) return;
  add_to(ready_.get());
  add_to(bell_.get());
}

Op* Core::first_of(Queues& queues) {
  for (auto& queue : queues) {
    if (queue.empty()) continue;
    Op* op = queue.front();
    queue.pop_front();
    return op;
  }
  return nullptr;
}

void Core::run_hooks() {
  std::unique_lock lock(mutex_);
  while (true) {
    Op* op = nullptr;
    hook_work_.wait(lock, [&] { return (op = first_of(hooks_)) != nullptr || ended_; });
    if (op == nullptr) return;
    if (op->advise) {
      op->advise = false;
      lock.unlock();
      const int fd = op->file->descriptor();
      if (fd >= 0) ::posix_fadvise(fd, static_cast<off_t>(op->offset), static_cast<off_t>(op->nbytes), POSIX_FADV_DONTNEED);
      lock.lock();
      op->file->drop(leaving_);
      let_finish(op);
      close_left(lock);
      lock.lock();
      continue;
    }
    const bool call = op->kind == Kind::kCall && op->refusal.empty();
    if (call) op->started_s = op->ended_s = device_->now_s();
    const Completion completion{static_cast<std::int64_t>(op->moved()), op->number()};
    lock.unlock();
    op->hook->run(completion);
    lock.lock();
    post(op);
  }
}

Op* Core::take_job(int pool) {
  std::lock_guard lock(mutex_);
  Op* op = first_of(jobs_[static_cast<std::size_t>(pool)]);
  if (op != nullptr && op->kind == Kind::kCall && op->refusal.empty()) op->started_s = op->ended_s = device_->now_s();
  return op;
}

void Core::job_done(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  post(ops_.at(id).get());
}

std::vector<std::unique_ptr<Op>> Core::take(std::vector<Late>& late, bool& enough) {
  std::lock_guard lock(mutex_);
  const bool over = closed_ && unfinished_ == 0;
  enough = std::exchange(woken_, false) || over;
  if (!over) clear(ready_.get());
  late = std::exchange(late_, {});
  in_flight_ -= results_.size();
  return std::exchange(results_, {});
}

void Core::wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  add_to(ready_.get());
}

std::uint64_t Core::in_flight() const {
  std::lock_guard lock(mutex_);
  return in_flight_;
}

std::uint64_t Core::unfinished() const {
  std::lock_guard lock(mutex_);
  return unfinished_;
}

std::uint32_t Core::depth() const {
  std::lock_guard lock(mutex_);
  return scheduler_.depth();
}

void Core::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  if (unfinished_ == 0) {
    add_to(ready_.get());
    add_to(quiet_.get());
  }
}

bool Core::end() {
  {
    std::lock_guard lock(mutex_);
    if (unfinished_ > 0) {
      scheduler_.drop_waiting();
      std::erase_if(deadlines_, [this](const auto& one) { return !ops_.at(one.second)->started; });
      const auto waits = [](const Op* op) { return op->kind == Kind::kCall; };
      for (auto* queues : {&hooks_, &jobs_[0], &jobs_[1]}) {
        for (auto& queue : *queues) std::erase_if(queue, waits);
      }
      return false;
    }
    if (std::exchange(ended_, true)) return true;
    hook_work_.notify_all();
    clock_work_.notify_all();
    if (running_ == 0) add_to(gone_.get());
  }
  device_->stop();
  return true;
}

void Core::join() {
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Core::release_fds() {
  std::lock_guard lock(mutex_);
  for (Descriptor* fd : {&ready_, &quiet_, &bell_, &gone_, &jobs_fd_[0], &jobs_fd_[1]}) fd->close();
}

}  // namespace kvterrace
