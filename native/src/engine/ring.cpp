#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace kvterrace {

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t user_addr;
};
struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  std::uint64_t user_addr;
};
struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

namespace {

// The same numbers on every architecture but alpha.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

constexpr std::uint32_t kSetupCoopTaskrun = 1U << 8;    // Linux 5.19
constexpr std::uint32_t kSetupSingleIssuer = 1U << 12;  // 6.0
constexpr std::uint32_t kSetupDeferTaskrun = 1U << 13;  // 6.1
constexpr std::uint32_t kFeatSingleMmap = 1U << 0;
constexpr std::uint32_t kFeatNodrop = 1U << 1;
constexpr std::uint32_t kEnterGetevents = 1U << 0;
constexpr unsigned kRegisterBuffers = 0;
constexpr unsigned kRegisterProbe = 8;
constexpr std::uint64_t kRingsAt = 0;
constexpr std::uint64_t kSqesAt = 0x10000000;
constexpr std::size_t kRegionNbytes = std::size_t{1} << 30;  // the most that one registered buffer may have

struct Probe {
  struct One {
    std::uint8_t op, reserved;
    std::uint16_t flags;
    std::uint32_t reserved2;
  };
  std::uint8_t last_op, ops_len;
  std::uint16_t reserved;
  std::uint32_t reserved2[3];
  One ops[64];
};

template <typename T>
T* at(void* base, std::uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

Ring::~Ring() {
  if (sqes_ != nullptr) ::munmap(sqes_, sqes_nbytes_);
  if (rings_ != nullptr) ::munmap(rings_, rings_nbytes_);
  if (fd_ >= 0) ::close(fd_);
}

int Ring::open(std::uint32_t entries) {
  Params params{};
  // One thread submits and reaps: then completions need interrupt nobody, they are worked on when that thread asks.
  for (const std::uint32_t flags : {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupCoopTaskrun, std::uint32_t{0}}) {
    params = {};
    params.flags = flags;
    fd_ = static_cast<int>(::syscall(kSetup, entries, &params));
    if (fd_ >= 0 || errno != EINVAL) break;
  }
  if (fd_ < 0) return errno;
  may_register_ = (params.flags & kSetupDeferTaskrun) != 0;
  constexpr std::uint32_t needed = kFeatSingleMmap | kFeatNodrop;
  if ((params.features & needed) != needed || !supports_all()) return EOPNOTSUPP;
  return map(params);
}

bool Ring::supports_all() {
  Probe probe{};
  if (::syscall(kRegister, fd_, kRegisterProbe, &probe, 64) < 0) return false;
  for (const int op : {kOpReadv, kOpWritev, kOpFsync, kOpReadFixed, kOpWriteFixed, kOpAsyncCancel, kOpRead}) {
    if (op > probe.last_op || (probe.ops[op].flags & 1U) == 0) return false;
  }
  return true;
}

int Ring::map(const Params& params) {
  const auto map_at = [this](std::uint64_t where, std::size_t nbytes) -> void* {
    void* memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(where));
    if (memory == MAP_FAILED) return nullptr;
    ::madvise(memory, nbytes, MADV_DONTFORK);  // a child must not move our heads and tails
    return memory;
  };
  rings_nbytes_ = std::max<std::size_t>(params.sq.array + params.sq_entries * sizeof(std::uint32_t),
                                        params.cq.cqes + params.cq_entries * sizeof(Cqe));
  rings_ = map_at(kRingsAt, rings_nbytes_);
  if (rings_ == nullptr) return errno;
  sqes_nbytes_ = params.sq_entries * sizeof(Sqe);
  sqes_ = static_cast<Sqe*>(map_at(kSqesAt, sqes_nbytes_));
  if (sqes_ == nullptr) return errno;
  sq_head_ = at<std::uint32_t>(rings_, params.sq.head);
  sq_tail_ = at<std::uint32_t>(rings_, params.sq.tail);
  sq_array_ = at<std::uint32_t>(rings_, params.sq.array);
  sq_mask_ = *at<std::uint32_t>(rings_, params.sq.ring_mask);
  sq_entries_ = params.sq_entries;
  tail_ = *sq_tail_;
  cq_head_ = at<std::uint32_t>(rings_, params.cq.head);
  cq_tail_ = at<std::uint32_t>(rings_, params.cq.tail);
  cq_mask_ = *at<std::uint32_t>(rings_, params.cq.ring_mask);
  cqes_ = at<Cqe>(rings_, params.cq.cqes);
  return 0;
}

Sqe* Ring::next() {
  if (tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) == sq_entries_) return nullptr;
  const std::uint32_t index = tail_ & sq_mask_;
  sq_array_[index] = index;
  ++tail_;
  sqes_[index] = {};
  return &sqes_[index];
}

int Ring::enter() {
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  while (true) {
    const std::uint32_t waiting = tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const bool ready = *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    const long done = ::syscall(kEnter, fd_, waiting, ready ? 0 : 1, kEnterGetevents, nullptr, 0);
    if (done >= 0) return 0;
    if (errno != EINTR) return errno;
  }
}

int Ring::register_memory(void* start, std::size_t nbytes) {
  if (!may_register_) return EOPNOTSUPP;
  if (memory_nbytes_ > 0) return EBUSY;
  std::vector<iovec> regions;
  for (std::size_t done = 0; done < nbytes; done += kRegionNbytes) {
    regions.push_back({static_cast<char*>(start) + done, std::min(kRegionNbytes, nbytes - done)});
  }
  if (::syscall(kRegister, fd_, kRegisterBuffers, regions.data(), regions.size()) < 0) return errno;
  memory_ = reinterpret_cast<std::uintptr_t>(start);
  memory_nbytes_ = nbytes;
  return 0;
}

int Ring::registered(const void* start, std::size_t nbytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(start);
  if (first < memory_ || nbytes == 0 || first - memory_ + nbytes > memory_nbytes_) return -1;
  const std::size_t region = (first - memory_) / kRegionNbytes;
  return (first - memory_ + nbytes - 1) / kRegionNbytes == region ? static_cast<int>(region) : -1;
}

}  // namespace kvterrace
