// The engine as Python sees it. Every call is short and keeps the GIL: see core.h.
#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core.h"
#include "manual.h"
#include "pool.h"
#include "uring.h"

namespace nb = nanobind;

namespace kvterrace {

namespace {

[[noreturn]] void raise_os_error(int number) {
  errno = number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// The memory of a buffer object. Its owner stays alive by the request that names it; NumPy does not move an array that
// somebody else refers to.
iovec memory_of(nb::handle buffer, bool to_fill) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, to_fill ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw nb::python_error();
  const iovec memory{view.buf, static_cast<std::size_t>(view.len)};
  PyBuffer_Release(&view);
  return memory;
}

void fill(Op& op, nb::handle file, nb::handle offset, nb::handle buffers) {
  if (!nb::isinstance<File>(file)) throw std::invalid_argument("it needs a file that this engine opened");
  op.file = nb::cast<std::shared_ptr<File>>(file);
  if (op.kind == Kind::kSync) return;
  std::int64_t at = 0;
  if (!nb::try_cast(offset, at)) throw std::invalid_argument("its offset is no whole number");
  if (at < 0) throw std::invalid_argument("offset " + std::to_string(at) + " is negative");
  op.offset = static_cast<std::uint64_t>(at);
  bool whole_pages = op.offset % kPageNbytes == 0;
  for (nb::handle buffer : buffers) {
    const iovec memory = memory_of(buffer, op.kind == Kind::kRead);
    whole_pages = whole_pages && memory.iov_len % kPageNbytes == 0;
    op.nbytes += memory.iov_len;
    if (memory.iov_len == 0) continue;
    // Neighbours in memory are one transfer: fewer entries, and one registered buffer.
    if (!op.memory.empty()) {
      iovec& last = op.memory.back();
      if (static_cast<char*>(last.iov_base) + last.iov_len == memory.iov_base) {
        last.iov_len += memory.iov_len;
        continue;
      }
    }
    op.memory.push_back(memory);
  }
  if (!whole_pages) {
    throw std::invalid_argument("offset " + std::to_string(at) + " or a buffer is not a multiple of " +
                                std::to_string(kPageNbytes) + " B");
  }
}

// `given`: (id, kind, io_class, file or None, offset, buffers, finish, hook or None, seconds to its deadline or None). What cannot be carried out as asked
// is an operation with a refusal.
std::unique_ptr<Op> op_of(nb::handle given) {
  auto op = std::make_unique<Op>();
  op->id = nb::cast<std::uint64_t>(given[0]);
  op->kind = static_cast<Kind>(nb::cast<int>(given[1]));
  op->io_class = nb::cast<int>(given[2]);
  if (op->io_class < 0 || op->io_class >= kClasses) throw std::invalid_argument("no such class");
  op->finish = static_cast<Finish>(nb::cast<int>(given[6]));
  if (op->finish == Finish::kHook) op->hook = nb::cast<Hook*>(given[7]);
  if (op->kind == Kind::kCall) return op;
  if (const nb::object patience = given[8]; !patience.is_none()) op->patience_s = nb::cast<double>(patience);
  try {
    fill(*op, given[3], given[4], given[5]);
  } catch (const std::exception& error) {  // of Python's, too
    op->refusal = error.what();
    op->error = EINVAL;
    op->nbytes = 0;
    op->memory.clear();
  }
  return op;
}

Limits limits_of(const std::string& kind, std::uint32_t depth) {
  Limits limits;
  limits.depth = depth;
  const bool threads = kind == "posix" || kind == "manual-posix";
  limits.lower_depth = std::max<std::uint32_t>(1, threads ? depth - 1 : depth / 2);
  return limits;
}

class PyCore {
 public:
  PyCore(const std::string& kind, std::uint32_t depth, bool serial) {
    // The ring has 512 entries.
    if (depth < 1 || depth > 128) throw std::invalid_argument("depth must be 1 to 128");
    std::unique_ptr<Device> device;
    if (kind == "uring") {
      device = std::make_unique<UringDevice>();
    } else if (kind == "posix") {
      device = std::make_unique<PoolDevice>(static_cast<int>(depth));
    } else if (kind == "manual" || kind == "manual-posix") {
      auto manual = std::make_unique<ManualDevice>();
      manual_ = manual.get();
      device = std::move(manual);
    } else {
      throw std::invalid_argument("no device of kind " + kind);
    }
    int number = 0;
    try {
      core_ = std::make_unique<Core>(std::move(device), limits_of(kind, depth), serial);
      number = core_->start();
    } catch (const std::system_error& error) {
      number = error.code().value();
    }
    if (number != 0) raise_os_error(number);
  }

  ~PyCore() { Core::dispose(std::move(core_)); }
  PyCore(const PyCore&) = delete;
  PyCore& operator=(const PyCore&) = delete;

  bool submit(nb::handle requests) {
    std::vector<std::unique_ptr<Op>> ops;
    for (nb::handle one : requests) ops.push_back(op_of(one));
    return core_->submit(std::move(ops));
  }

  nb::tuple take() {
    bool enough = false;
    std::vector<Late> late;
    auto ended = core_->take(late, enough);
    nb::list rows;
    for (const Late& one : late) rows.append(nb::make_tuple(one.id, 0, 0, "", one.started_s, one.at_s, true, true));
    for (const auto& op : ended) rows.append(row(*op));
    return nb::make_tuple(rows, enough);
  }

  nb::object take_job(int pool) {
    const Op* op = core_->take_job(pool);
    return op == nullptr ? nb::none() : nb::object(row(*op));
  }

  Core& core() { return *core_; }

  ManualDevice& manual() {
    if (manual_ == nullptr) throw std::invalid_argument("not a device for tests");
    return *manual_;
  }

 private:
  static nb::tuple row(const Op& op) {
    const bool expired = op.expired();
    return nb::make_tuple(op.id, op.moved(), expired ? 0 : op.error, op.refusal, op.started_s, op.ended_s, expired, false);
  }

  std::unique_ptr<Core> core_;
  ManualDevice* manual_ = nullptr;
};

// For tests: what a hook is given, how often.
class Recorder final : public Hook {
 public:
  void run(const Completion& completion) noexcept override {
    last = completion;
    ++runs;
  }
  Completion last{0, 0};
  std::atomic<int> runs{0};
};

// From an `IoResult`. An error is one, whatever number it has or lacks.
Completion completion_of(nb::handle result) {
  Completion made{nb::cast<std::int64_t>(result.attr("nbytes")), 0};
  const nb::object error = result.attr("error");
  if (nb::cast<bool>(result.attr("expired"))) {
    made.error = ECANCELED;
  } else if (!error.is_none()) {
    const nb::object number = nb::getattr(error, "errno", nb::none());
    if (!nb::try_cast(number, made.error) || made.error == 0) made.error = EIO;
  }
  return made;
}

nb::list listed(const Leaving& leaving) {
  nb::list fds;
  for (const int fd : leaving) fds.append(fd);
  return fds;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Hook>(m, "Hook").def(
      "__call__",
      [](Hook& self, nb::handle result) {
        const Completion completion = completion_of(result);
        const nb::gil_scoped_release released;
        self.run(completion);
      },
      nb::arg("result"), "Run, as the `finish` of an IoRequest in an engine of Python. Without the GIL; once.");
  nb::class_<Recorder, Hook>(m, "Recorder")
      .def(nb::init<>())
      .def_prop_ro("runs", [](const Recorder& self) { return self.runs.load(); })
      .def_prop_ro("nbytes", [](const Recorder& self) { return self.last.nbytes; })
      .def_prop_ro("error", [](const Recorder& self) { return self.last.error; });

  nb::class_<FileTable>(m, "FileTable").def(nb::init<std::size_t>(), nb::arg("most")).def("__len__", &FileTable::size);

  nb::class_<File>(m, "File")
      .def("__init__", [](nb::handle) { throw std::invalid_argument("files are made by `adopt`"); })
      .def_static("adopt",
                  [](std::shared_ptr<FileTable> table, int fd, nb::bytes path, int flags, bool direct) {
                    Leaving leaving;
                    auto file = File::adopt(std::move(table), fd, std::string(path.c_str(), path.size()), flags, direct,
                                            leaving);
                    return nb::make_tuple(std::move(file), listed(leaving));
                  })
      .def("hold", &File::hold)
      .def("peek", &File::peek)
      .def("offer",
           [](File& self, int fd) {
             Leaving leaving;
             const int used = self.offer(fd, leaving);
             return nb::make_tuple(used, listed(leaving));
           })
      .def("drop",
           [](File& self) {
             Leaving leaving;
             self.drop(leaving);
             return listed(leaving);
           })
      .def("close", [](File& self) {
        Leaving leaving;
        self.close(leaving);
        return listed(leaving);
      });

  nb::class_<PyCore>(m, "Core")
      .def(nb::init<const std::string&, std::uint32_t, bool>(), nb::arg("kind"), nb::arg("depth"), nb::arg("serial"))
      .def("submit", &PyCore::submit)
      .def("take", &PyCore::take)
      .def("take_job", &PyCore::take_job)
      .def("job_done", [](PyCore& self, std::uint64_t id) { self.core().job_done(id); })
      .def("wake", [](PyCore& self) { self.core().wake(); })
      .def("close", [](PyCore& self) { self.core().close(); })
      .def("end", [](PyCore& self) { return self.core().end(); })
      .def("join", [](PyCore& self) { self.core().join(); })
      .def("release_fds", [](PyCore& self) { self.core().release_fds(); })
      .def("jobs_fd", [](PyCore& self, int pool) { return self.core().jobs_fd(pool); })
      .def("register_memory",
           [](PyCore& self, nb::handle buffer, int fd) {
             const iovec memory = memory_of(buffer, true);
             self.core().device().register_memory(memory.iov_base, memory.iov_len, fd);
           })
      .def_prop_ro("ready_fd", [](PyCore& self) { return self.core().ready_fd(); })
      .def_prop_ro("quiet_fd", [](PyCore& self) { return self.core().quiet_fd(); })
      .def_prop_ro("gone_fd", [](PyCore& self) { return self.core().gone_fd(); })
      .def_prop_ro("bell_fd", [](PyCore& self) { return self.core().bell_fd(); })
      .def_prop_ro("in_flight", [](PyCore& self) { return self.core().in_flight(); })
      .def_prop_ro("depth", [](PyCore& self) { return self.core().depth(); })
      .def_prop_ro("unfinished", [](PyCore& self) { return self.core().unfinished(); })
      .def("set_now", [](PyCore& self, double now_s) { self.manual().set_now_s(now_s); })
      .def("pull",
           [](PyCore& self) -> nb::object {
             const std::uint64_t number = self.manual().pull();
             if (number == 0) return nb::none();
             const Piece& piece = self.manual().piece(number);
             return nb::make_tuple(number, piece.op->id, piece.place(), piece.nbytes, piece.memory.size());
           })
      .def("place", [](PyCore& self, std::uint64_t number) { return self.manual().piece(number).place(); })
      .def("answer", [](PyCore& self, std::uint64_t number, std::int64_t answer) { return self.manual().answer(number, answer); })
      .def("recalls", [](PyCore& self) { return self.manual().recalls(); })
      .def("perform", [](PyCore& self, std::uint64_t number) { self.manual().perform(number); });

  m.def("keep_forever", [](nb::object one) { one.inc_ref(); });
}

}  // namespace kvterrace
