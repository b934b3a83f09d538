#include "file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

namespace kvterrace {

void close_all(Leaving& leaving) {
  for (const int fd : leaving) ::close(fd);
  leaving.clear();
}

std::size_t FileTable::size() const {
  std::lock_guard lock(mutex_);
  return open_.size();
}

void FileTable::used(File* file, Leaving& leaving) {
  std::vector<std::shared_ptr<File>> surplus;
  {
    std::lock_guard lock(mutex_);
    if (file->listed_) {
      open_.splice(open_.end(), open_, file->place_);
    } else {
      file->place_ = open_.insert(open_.end(), file->weak_from_this());
      file->listed_ = true;
    }
    std::size_t more = open_.size() > most_ ? open_.size() - most_ : 0;
    for (auto it = open_.begin(); more > 0; ++it, --more) {
      auto other = it->lock();
      if (other && other.get() != file) surplus.push_back(std::move(other));
    }
  }
  for (auto& other : surplus) other->park(leaving);
}

void FileTable::gone(File* file) {
  std::lock_guard lock(mutex_);
  if (file->listed_) {
    open_.erase(file->place_);
    file->listed_ = false;
  }
}

std::shared_ptr<File> File::adopt(std::shared_ptr<FileTable> table, int fd, std::string path, int flags, bool direct,
                                  Leaving& leaving) {
  std::shared_ptr<File> file(new File(std::move(table), fd, std::move(path), flags, direct));
  file->table_->used(file.get(), leaving);
  return file;
}

File::File(std::shared_ptr<FileTable> table, int fd, std::string path, int flags, bool direct)
    : table_(std::move(table)),
      path_(std::move(path)),
      flags_((flags & ~(O_CREAT | O_EXCL)) | O_CLOEXEC),
      direct_(direct),
      fd_(fd) {}

File::~File() {
  table_->gone(this);
  if (fd_ >= 0) ::close(fd_);
}

bool File::hold() {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  ++users_;
  return true;
}

void File::drop(Leaving& leaving) {
  {
    std::lock_guard lock(mutex_);
    if (--users_ > 0 || !closed_) return;
    if (fd_ >= 0) leaving.push_back(std::exchange(fd_, -1));
  }
  table_->gone(this);
}

int File::peek() const {
  std::lock_guard lock(mutex_);
  return fd_;
}

int File::offer(int fd, Leaving& leaving) {
  int result;
  {
    std::lock_guard lock(mutex_);
    if (fd_ < 0) fd_ = std::exchange(fd, -1);
    result = fd_;
  }
  if (fd >= 0) leaving.push_back(fd);
  table_->used(this, leaving);
  return result;
}

int File::descriptor() {
  Leaving leaving;
  int fd = peek();
  if (fd >= 0) {
    table_->used(this, leaving);
  } else {
    do {
      fd = ::open(path_.c_str(), flags_);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return -errno;
    if (direct_) {
      const int flags = ::fcntl(fd, F_GETFL);
      if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_DIRECT) < 0) {
        const int number = errno;
        ::close(fd);
        return -number;
      }
    }
    fd = offer(fd, leaving);
  }
  close_all(leaving);
  return fd;
}

void File::park(Leaving& leaving) {
  std::lock_guard lock(mutex_);
  if (users_ > 0 || fd_ < 0) return;
  leaving.push_back(std::exchange(fd_, -1));
  table_->gone(this);  // under the lock: whoever opens it again is in the table after this, not before
}

void File::close(Leaving& leaving) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    ++users_;
  }
  drop(leaving);
}

}  // namespace kvterrace
