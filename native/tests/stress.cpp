// Many threads against one core, for the sanitizers: random reads, writes, syncs, copies, hooks, deadlines, files opened and
// closed meanwhile; every byte read is compared with what its place must hold. Usage: kvterrace_stress FOLDER
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../src/engine/core.h"
#include "../src/engine/pool.h"
#include "../src/engine/uring.h"

using namespace kvterrace;

namespace {

constexpr int kSubmitters = 4;
constexpr int kRounds = 400;
constexpr int kFiles = 12;
constexpr int kDescriptors = 8;  // fewer than files: they are parked and opened again
constexpr std::uint64_t kFilePages = 1024;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::exit(1);
}

// What each page of each file holds, always: writers write the same again.
unsigned char content(int file, std::uint64_t page) {
  return static_cast<unsigned char>(static_cast<std::uint64_t>(file) * 37 + page * 11 + 1);
}

struct Free {
  void operator()(void* memory) const { ::free(memory); }
};
using Memory = std::unique_ptr<unsigned char, Free>;

Memory pages(std::uint64_t count) {
  void* memory = nullptr;
  if (::posix_memalign(&memory, kPageNbytes, count * kPageNbytes) != 0) fail("no memory");
  return Memory(static_cast<unsigned char*>(memory));
}

// One operation with its memory; checks what it got, on whatever thread it completes.
struct Job final : Hook {
  int file = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  bool read = false;
  bool hurried = false;  // it has a deadline, so it may end without having been done
  Memory memory;
  std::atomic<int> runs{0};

  void run(const Completion& completion) noexcept override {
    ++runs;
    if (memory == nullptr || (hurried && completion.error == ECANCELED)) return;
    if (completion.error != 0 || completion.nbytes != static_cast<std::int64_t>(count * kPageNbytes)) {
      fail("completion of " + std::to_string(completion.nbytes) + " B, error " + std::to_string(completion.error));
    }
    for (std::uint64_t n = 0; read && n < count; ++n) {
      const unsigned char* page = memory.get() + n * kPageNbytes;
      // The first byte is right, and each of the others is the one before it.
      if (page[0] != content(file, first + n) || std::memcmp(page, page + 1, kPageNbytes - 1) != 0) fail("a wrong byte");
    }
  }
};

std::shared_ptr<File> open_file(const std::shared_ptr<FileTable>& table, const std::string& folder, int number) {
  const std::string path = folder + "/stress" + std::to_string(number);
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  if (fd < 0) fail(path + ": " + std::strerror(errno));
  Leaving leaving;
  auto file = File::adopt(table, fd, path, O_RDWR, true, leaving);
  close_all(leaving);
  return file;
}

void run(std::unique_ptr<Device> device, const std::string& name, const std::string& folder) {
  Limits limits;
  limits.depth = 16;
  limits.lower_depth = 8;
  Core core(std::move(device), limits, false);
  if (const int number = core.start(); number != 0) {
    std::printf("%s: skipped, %s\n", name.c_str(), std::strerror(number));
    return;
  }
  auto table = std::make_shared<FileTable>(kDescriptors);
  std::vector<std::shared_ptr<File>> files;
  for (int n = 0; n < kFiles; ++n) files.push_back(open_file(table, folder, n));

  std::atomic<std::uint64_t> ids{0};
  std::vector<std::unique_ptr<Job>> jobs(kSubmitters * kRounds);
  std::vector<std::thread> threads;
  for (int submitter = 0; submitter < kSubmitters; ++submitter) {
    threads.emplace_back([&, submitter] {
      std::mt19937 random(static_cast<unsigned>(submitter));
      for (int round = 0; round < kRounds; ++round) {
        auto job = std::make_unique<Job>();
        auto op = std::make_unique<Op>();
        op->id = ++ids;
        op->io_class = static_cast<int>(random() % kClasses);
        op->finish = Finish::kHook;
        op->hook = job.get();
        const auto what = random() % 10;
        op->kind = what == 0 ? Kind::kCall : what == 1 ? Kind::kSync : what < 5 ? Kind::kWrite : Kind::kRead;
        if (op->kind != Kind::kCall) {
          job->file = static_cast<int>(random() % kFiles);
          op->file = files[static_cast<std::size_t>(job->file)];
        }
        if (op->kind == Kind::kRead || op->kind == Kind::kWrite) {
          job->read = op->kind == Kind::kRead;
          job->hurried = random() % 4 == 0;
          if (job->hurried) op->patience_s = static_cast<double>(random() % 100) * 1e-3;
          job->count = 1 + random() % 400;
          job->first = random() % (kFilePages - job->count);
          job->memory = pages(job->count);
          for (std::uint64_t n = 0; n < job->count; ++n) {
            std::memset(job->memory.get() + n * kPageNbytes, job->read ? 0 : content(job->file, job->first + n), kPageNbytes);
          }
          op->offset = job->first * kPageNbytes;
          op->nbytes = job->count * kPageNbytes;
          op->memory.push_back({job->memory.get(), op->nbytes});
        }
        jobs[static_cast<std::size_t>(submitter * kRounds + round)] = std::move(job);
        std::vector<std::unique_ptr<Op>> ops;
        ops.push_back(std::move(op));
        if (!core.submit(std::move(ops))) fail("refused before close");
        if (round % 16 == 0) core.wake();
      }
    });
  }
  std::uint64_t taken = 0, expired = 0;
  while (taken < jobs.size()) {
    pollfd ready{core.ready_fd(), POLLIN, 0};
    ::poll(&ready, 1, 1000);
    bool enough = false;
    std::vector<Late> late;
    for (const auto& op : core.take(late, enough)) {
      ++taken;
      if (op->expired()) ++expired;
    }
  }
  for (auto& thread : threads) thread.join();
  core.close();
  if (core.in_flight() != 0 || core.unfinished() != 0) fail("something is left");
  if (core.submit({})) fail("taken after close");
  if (!core.end()) fail("it does not end");
  core.join();
  for (auto& job : jobs) {
    if (job->runs != 1) fail("a hook ran " + std::to_string(job->runs) + " times");
  }
  Leaving leaving;
  for (auto& file : files) file->close(leaving);
  close_all(leaving);
  if (table->size() != 0) fail("files are left open");
  std::printf("%s: %zu operations, %llu of them past their deadline\n", name.c_str(), jobs.size(),
              static_cast<unsigned long long>(expired));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("usage: kvterrace_stress FOLDER");
  const std::string folder = arguments[1];
  auto memory = pages(1);
  for (int file = 0; file < kFiles; ++file) {
    const std::string path = folder + "/stress" + std::to_string(file);
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (std::uint64_t page = 0; page < kFilePages; ++page) {
      std::memset(memory.get(), content(file, page), kPageNbytes);
      if (::write(fd, memory.get(), kPageNbytes) != static_cast<ssize_t>(kPageNbytes)) fail(path);
    }
    ::close(fd);
  }
  run(std::make_unique<PoolDevice>(16), "native-posix", folder);
  run(std::make_unique<UringDevice>(), "uring", folder);
  for (int file = 0; file < kFiles; ++file) ::unlink((folder + "/stress" + std::to_string(file)).c_str());
}
