// Open files without as many open descriptors, as io/descriptors.py: the same invariants, for threads without the GIL.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvterrace {

class File;

// Descriptors that the caller has to close, where it holds no lock: closing the last one of an unlinked file frees its
// space, which waits for the drive.
using Leaving = std::vector<int>;
void close_all(Leaving& leaving);

// Which files have a descriptor at the moment, the least recently used first. Thread-safe.
class FileTable {
 public:
  explicit FileTable(std::size_t most) : most_(most) {}

  std::size_t size() const;

 private:
  friend class File;
  void used(File* file, Leaving& leaving);  // it may cost others their descriptors
  void gone(File* file);

  const std::size_t most_;
  mutable std::mutex mutex_;
  std::list<std::weak_ptr<File>> open_;
};

// An open file. Thread-safe. `descriptor` may wait for the drive; nothing else does.
//
// Invariant: the descriptor is closed only when nobody holds the file, and `hold` refuses once `close` was called. So no
// I/O ever reaches a descriptor number that the process has since given to another file.
class File : public std::enable_shared_from_this<File> {
 public:
  // Takes over `fd`, opened at `path`; `flags` open it again, without O_CREAT and O_EXCL.
  static std::shared_ptr<File> adopt(std::shared_ptr<FileTable> table, int fd, std::string path, int flags, bool direct,
                                     Leaving& leaving);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool hold();  // keeps the file usable until `drop`; false after `close`
  void drop(Leaving& leaving);
  int peek() const;  // of a held file: its descriptor, -1 if it has none now
  // Of a held file: `fd` becomes its descriptor if it has none, else it leaves. Returns the descriptor.
  int offer(int fd, Leaving& leaving);
  int descriptor();  // of a held file, for a thread of ours: opened again if need be; -errno where that fails
  void close(Leaving& leaving);  // refuses further use; the descriptor leaves with the last holder

  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }

 private:
  friend class FileTable;
  File(std::shared_ptr<FileTable> table, int fd, std::string path, int flags, bool direct);
  void park(Leaving& leaving);  // let the descriptor go if nobody holds the file

  const std::shared_ptr<FileTable> table_;
  const std::string path_;
  const int flags_;
  const bool direct_;
  mutable std::mutex mutex_;
  int fd_;
  std::size_t users_ = 0;
  bool closed_ = false;
  // guarded by the table's mutex
  bool listed_ = false;
  std::list<std::weak_ptr<File>>::iterator place_;
};

}  // namespace kvterrace
