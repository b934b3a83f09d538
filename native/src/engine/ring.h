// io_uring by its system calls, without liburing and without the kernel's headers: those of a build machine are older than
// the kernels that this runs on. From include/uapi/linux/io_uring.h, which is stable. Needs Linux 5.6.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sys/uio.h>

namespace kvterrace {

struct Sqe {
  std::uint8_t opcode;
  std::uint8_t flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t off;
  std::uint64_t addr;
  std::uint32_t len;
  std::uint32_t op_flags;
  std::uint64_t user_data;
  std::uint16_t buf_index;
  std::uint16_t personality;
  std::int32_t splice_fd_in;
  std::uint64_t pad[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
  std::uint64_t user_data;
  std::int32_t res;
  std::uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

enum : std::uint8_t {
  kOpReadv = 1,
  kOpWritev = 2,
  kOpFsync = 3,
  kOpReadFixed = 4,
  kOpWriteFixed = 5,
  kOpAsyncCancel = 14,
  kOpRead = 22,
};
inline constexpr std::uint8_t kSqeAsync = 1U << 4;
inline constexpr std::uint32_t kFsyncDatasync = 1U << 0;

// A ring for the one thread that opened it.
class Ring {
 public:
  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0, or an errno: ENOSYS or EPERM where io_uring is forbidden, EOPNOTSUPP where the kernel is too old.
  int open(std::uint32_t entries);
  // A free entry, zeroed, to be filled in before `enter`; null if there is none.
  Sqe* next();
  // Hand over what `next` gave, and wait for a completion if none is there. 0, or an errno.
  int enter();
  // Calls `take` for each completion that is there.
  template <typename Take>
  void reap(Take take);

  // Pin memory in pieces of 1 GiB, once. 0, or an errno: ENOMEM beyond RLIMIT_MEMLOCK, EOPNOTSUPP before Linux 6.1. Older
  // kernels may give pinned pages to the child of a fork: the ring would go on with pages that are ours no more.
  int register_memory(void* start, std::size_t nbytes);
  // The number under which [start, start + nbytes) is registered, -1 if it is not.
  int registered(const void* start, std::size_t nbytes) const;

 private:
  int map(const struct Params& params);
  bool supports_all();

  int fd_ = -1;
  void* rings_ = nullptr;
  std::size_t rings_nbytes_ = 0;
  Sqe* sqes_ = nullptr;
  std::size_t sqes_nbytes_ = 0;
  std::uint32_t* sq_head_ = nullptr;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t* sq_array_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  std::uint32_t sq_entries_ = 0;
  std::uint32_t tail_ = 0;  // ours; published by `enter`
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  Cqe* cqes_ = nullptr;
  std::uint32_t cq_mask_ = 0;
  bool may_register_ = false;
  std::uintptr_t memory_ = 0;
  std::size_t memory_nbytes_ = 0;
};

template <typename Take>
void Ring::reap(Take take) {
  std::uint32_t head = *cq_head_;  // only we move it
  while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
    const Cqe cqe = cqes_[head & cq_mask_];
    __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
    take(cqe);
  }
}

}  // namespace kvterrace
