// A descriptor with an owner.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace kvterrace {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }

  // Throws std::system_error.
  static Descriptor eventfd(int flags) {
    const int fd = ::eventfd(0, EFD_CLOEXEC | flags);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    return Descriptor(fd);
  }

  int get() const { return fd_; }  // -1 if there is none
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// Of an eventfd; -1 is none.
inline void add_to(int fd, std::uint64_t count = 1) {
  if (fd < 0) return;
  while (::write(fd, &count, sizeof count) < 0 && errno == EINTR) {
  }
}

// Waits for a count if there is none, unless `fd` is non-blocking.
inline void clear(int fd) {
  std::uint64_t count;
  while (::read(fd, &count, sizeof count) < 0 && errno == EINTR) {
  }
}

}  // namespace kvterrace
