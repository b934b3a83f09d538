"""The engines of the extension module: io_uring, and a pool of native threads where io_uring is forbidden.

Both share one scheduler. Classes go in strict order. Operations are cut into pieces (1 MiB for DEMAND, 512 KiB for the
rest), and of the lower classes at most 4 MiB are in the device at any time, 1 MiB while demand reads run or did in the
last 10 ms: that is all that a demand read can find ahead of it there. Results are those of the pieces done one after
the other; what a failed write left behind its first gap is undefined.

Past its deadline, no further piece of a request goes to the device; io_uring is told to let go of those it has (what
is with a drive's own queue it cannot), a native thread ends the one that it is at.

Threads: the device's own; one that watches deadlines; four that run native hooks (`kvterrace._native.Hook` as a
request's `finish`) without the GIL; `workers` of Python that run any other `finish` and the copies among CALLs, most
urgent first; four more for CALLs of class DEMOTION and SCRUB, which may block, and end in any order. A single worker
does all of these in order. Threads of Python wait in Python, on an eventfd, and never inside the extension: neither a
hung drive nor the interpreter's end finds one there.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvterrace import _native
from kvterrace.buffers import Bytes
from kvterrace.errors import ConfigError, StoreClosedError
from kvterrace.io.base import IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.descriptors import most_descriptors, set_direct
from kvterrace.io.files import FileCalls
from kvterrace.io.threads import start_all

__all__ = ["NativeEngine", "NativeFile", "NativePosixEngine", "UringEngine"]

_log = logging.getLogger(__name__)

_KINDS = {IoKind.READ: 0, IoKind.WRITE: 1, IoKind.SYNC: 2, IoKind.CALL: 3}
_NO_FINISH, _HOOK, _PYTHON = range(3)
_SHORT_JOBS, _LONG_JOBS = range(2)
#: Threads for CALLs that may block: opening a store reads its segments in them.
_LONG_THREADS = 4
#: How long `close` gives idle threads to end; they have nothing left to wait for, but for a drive that closes a file.
_JOIN_S = 1.0
#: Longest single wait: poll(2) counts milliseconds in 31 bits.
_WAIT_S = 3600.0
#: What the interpreter's end waits for an engine that nobody closed.
_EXIT_S = 1.0

#: Engines that were not closed, and those that would not: neither they nor the memory of what is in flight may be
#: collected.
_alive: set[NativeEngine] = set()
_hung: set[NativeEngine] = set()


class NativeFile:
    """An open file. Thread-safe. As `PosixFile`, it may lose its descriptor while nobody uses it."""

    __slots__ = ("_flags", "direct", "handle", "path")

    def __init__(self, path: Path, flags: int, table: _native.FileTable) -> None:
        """Open `path` with `flags` of os.open; a file that this makes has mode 0600. Raises OSError."""
        self.path = path
        self._flags = flags & ~(os.O_CREAT | os.O_EXCL)
        fd = os.open(path, flags, 0o600)
        try:
            self.direct = set_direct(fd)
        except BaseException:
            os.close(fd)
            if flags & os.O_EXCL:
                path.unlink()
            raise
        self.handle, leaving = _native.File.adopt(table, fd, os.fsencode(path), self._flags, self.direct)
        _close_all(leaving)

    @contextlib.contextmanager
    def using(self) -> Iterator[int]:
        """The descriptor, kept open for the length of the block. Raises OSError (EBADF) after `close`."""
        if not self.handle.hold():
            raise OSError(errno.EBADF, "file was closed", str(self.path))
        try:
            fd = self.handle.peek()
            if fd < 0:
                mine = os.open(self.path, self._flags)
                try:
                    if self.direct:
                        set_direct(mine)
                except BaseException:
                    os.close(mine)
                    raise
                fd, leaving = self.handle.offer(mine)
                _close_all(leaving)
            yield fd
        finally:
            _close_all(self.handle.drop())

    def close(self) -> None:
        """Refuse further use; close the descriptor now, or when the last user leaves. Closing twice does nothing."""
        _close_all(self.handle.close())


class NativeEngine(FileCalls[NativeFile]):
    """`IoEngine` over the extension module. Must be closed: it keeps itself alive otherwise.

    A request that waits while its file is closed ends with EBADF; one that has begun ends normally. One that cannot be
    carried out as asked (unaligned, no file of this engine) ends with EINVAL. After a fork the engine is the parent's:
    the child's calls raise `StoreClosedError`.
    """

    def __init__(self, kind: str, name: str, *, depth: int, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"an I/O engine needs at least 1 worker, not {workers}; leave it at 4 if in doubt")
        super().__init__(name)
        # What is in the device keeps its file's descriptor, so it must not be more than there may be of those.
        descriptors = most_descriptors()
        self._core = _native.Core(kind, min(depth, descriptors), workers == 1)
        self._table = _native.FileTable(descriptors)
        self._requests: dict[int, tuple[IoRequest, object, tuple[Bytes, ...]]] = {}
        self._finished: dict[int, IoResult] = {}  # by a worker, not yet polled
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._waiting = 0  # threads inside a wait on one of the core's descriptors
        self._ended = False
        self._memory: object = None  # registered with the kernel
        self._on_result: Callable[[], None] | None = None
        jobs = [(f"finish{number}", _SHORT_JOBS) for number in range(workers)]
        if workers > 1:
            jobs += [(f"files{number}", _LONG_JOBS) for number in range(_LONG_THREADS)]
        self._threads = [
            (threading.Thread(target=self._work, args=(pool,), name=f"kvterrace-{name}-{job}", daemon=True), pool)
            for job, pool in jobs
        ]
        self._bell: threading.Thread | None = None
        try:
            start_all([thread for thread, _ in self._threads])
        except BaseException:
            self._threads = [(thread, pool) for thread, pool in self._threads if thread.ident is not None]
            self.close(_JOIN_S)
            raise
        _alive.add(self)

    # Requests

    def submit(self, requests: Sequence[IoRequest]) -> None:
        self._require_mine()
        taken = {}
        ops = []
        for request in requests:
            number = next(self._ids)
            finish, buffers = request.finish, tuple(request.buffers)
            how, hook = _PYTHON, None
            if finish is None:
                how = _NO_FINISH
            elif isinstance(finish, _native.Hook):
                how, hook = _HOOK, finish
            file = request.file.handle if isinstance(request.file, NativeFile) else None
            kind = _KINDS[request.kind]
            ops.append(
                (number, kind, int(request.io_class), file, request.offset, buffers, how, hook, request.deadline_s)
            )
            # What the native side refers to stays as it is, whatever becomes of the request's attributes.
            taken[number] = (request, finish, buffers)
        self._requests.update(taken)
        if not self._core.submit(ops):
            for number in taken:
                del self._requests[number]
            raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")

    def poll(self, timeout_s: float) -> list[IoResult]:
        self._require_mine()
        deadline_s = time.monotonic() + timeout_s
        while True:
            rows, enough = self._core.take()
            left_s = deadline_s - time.monotonic()
            results = [result for row in rows if (result := self._result(row)) is not None]
            if results or enough or left_s <= 0:
                return results
            self._wait(self._core.ready_fd, left_s)

    def wake(self) -> None:
        """Make a waiting `poll` return; if none waits, the next one returns at once."""
        if self._is_mine:
            self._core.wake()
            self._ring()

    def subscribe(self, on_result: Callable[[], None]) -> bool:
        with self._lock:
            self._on_result = on_result
            if self._bell is None and not self._ended:
                bell = threading.Thread(target=self._watch, name=f"kvterrace-{self.name}-bell", daemon=True)
                start_all([bell])
                self._bell = bell
        self._ring()  # for what ended before
        return True

    @property
    def in_flight(self) -> int:
        return self._core.in_flight if self._is_mine else 0

    def register_memory(self, memory: Bytes) -> bool:
        """Have the kernel pin `memory` (page-aligned, e.g. the DRAM arena) once, so that it need not for each transfer.

        False where this engine has no use for it, RLIMIT_MEMLOCK forbids it, or the kernel is older than 6.1 (older
        ones may give pinned pages to a fork's child and leave us with others); all works the same then. At most once.
        The engine keeps `memory` alive until it is closed; nobody may take pages away from it meanwhile (as
        MADV_DONTNEED does), since the kernel would go on using those that it pinned. Waits for the kernel.
        """
        self._require_mine()
        self._require_open()
        if self._memory is not None:
            raise AssertionError(f"{self.name}: memory was registered before; an engine takes one piece")
        answer = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._core.register_memory(memory, answer)
            taken = os.eventfd_read(answer) == 2
        finally:
            os.close(answer)
        if taken:
            self._memory = memory
        return taken

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`; results stay for `poll`. Closes the files still open. Not to be called from a `finish`.

        When it returns False, requests that had not started never will, and their results never come. May be repeated.
        """
        if not self._is_mine:
            return True
        self._closed = True
        self._core.close()
        deadline_s = time.monotonic() + timeout_s
        while self._core.unfinished and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait(self._core.quiet_fd, left_s)
        with self._ending:
            if self._ended:
                return True
            left_s = max(_JOIN_S, deadline_s - time.monotonic())
            if not (self._core.end() and self._wait(self._core.gone_fd, left_s)):
                _log.warning(
                    "%s: I/O hangs after %.1f s; its threads and buffers are left behind", self.name, timeout_s
                )
                _hung.add(self)
                _alive.discard(self)
                return False
            self._core.join()
            with self._lock:
                self._ended = True
                self._waiting += 1  # for the threads to be joined: they wait on descriptors, too
            self._close_files()
            self._memory = None
            if self._join():
                self._leave()
        _alive.discard(self)
        _hung.discard(self)
        return True

    def _join(self) -> bool:
        for _, pool in self._threads:
            os.eventfd_write(self._core.jobs_fd(pool), 1)
        threads = [thread for thread, _ in self._threads]
        if self._bell is not None:
            os.eventfd_write(self._core.bell_fd, 1)
            threads.append(self._bell)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        return not any(thread.is_alive() for thread in threads)

    def _wait(self, fd: int, left_s: float) -> bool:
        """Until `fd`, one of the core's, is readable; whether it is, or will be no more."""
        with self._lock:
            if self._ended:  # then the descriptor may be another's by now
                return True
            self._waiting += 1
        try:
            waiter = select.poll()
            waiter.register(fd, select.POLLIN)
            return bool(waiter.poll(math.ceil(min(left_s, _WAIT_S) * 1000)))
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._waiting -= 1
            if self._ended and not self._waiting:
                self._core.release_fds()

    def _result(self, row: _native.Row) -> IoResult | None:
        number, lent = row[0], row[-1]
        if lent:
            taken = self._requests.get(number)  # another poller may have had the result itself by now
            return None if taken is None else _result_of(taken[0], row)
        request = self._requests.pop(number)[0]
        return self._finished.pop(number, None) or _result_of(request, row)

    # Threads

    def _work(self, pool: int) -> None:
        fd = self._core.jobs_fd(pool)
        while True:
            os.eventfd_read(fd)
            row = self._core.take_job(pool)
            if row is not None:
                self._finish(row)
            elif self._ended:
                return

    def _finish(self, row: _native.Row) -> None:
        number = row[0]
        request, finish, _ = self._requests[number]
        result = _result_of(request, row)
        try:
            assert callable(finish)
            result.value = finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
        self._finished[number] = result
        self._core.job_done(number)

    def _watch(self) -> None:
        fd = self._core.bell_fd
        while True:
            os.eventfd_read(fd)
            if self._ended:
                return
            self._ring()

    def _ring(self) -> None:
        if self._on_result is not None:
            self._on_result()

    # Files

    def _make_file(self, path: Path, flags: int) -> NativeFile:
        self._require_mine()
        return NativeFile(path, flags, self._table)

    def _own(self, file: IoFile | None) -> NativeFile:
        self._require_mine()
        if not isinstance(file, NativeFile):
            raise TypeError(f"this engine cannot use {file!r}; it wants what its own create or open returned")
        return file


class UringEngine(NativeEngine):
    """`IoEngine` over io_uring; Linux 5.6 or newer. The constructor raises OSError where the kernel refuses it: ENOSYS
    or EPERM where it is forbidden, EOPNOTSUPP where the kernel is too old.
    """

    def __init__(self, name: str = "uring", *, depth: int = 64, workers: int = 4) -> None:
        """`depth`: pieces in the device at once, 1 to 128; half as many of the lower classes."""
        super().__init__("uring", name, depth=depth, workers=workers)


class NativePosixEngine(NativeEngine):
    """`IoEngine` over native threads that do preadv and pwritev."""

    def __init__(self, name: str = "native-posix", *, threads: int = 16, workers: int = 4) -> None:
        """`threads`: one does one piece at a time; with two or more, one of them takes DEMAND only. 1 to 128."""
        super().__init__("posix", name, depth=threads, workers=workers)


def _result_of(request: IoRequest, row: _native.Row) -> IoResult:
    _, nbytes, code, refusal, started_s, ended_s, expired, lent = row
    error = _os_error(request, code, refusal)
    return IoResult(request, nbytes, error, started_s, ended_s, expired=expired, lent=lent)


def _os_error(request: IoRequest, code: int, refusal: str) -> OSError | None:
    if code == 0:
        return None
    path = str(request.file.path) if isinstance(request.file, NativeFile) else None
    text = os.strerror(code) if not refusal else refusal if code == errno.EBADF else f"request refused: {refusal}"
    return OSError(code, text) if path is None else OSError(code, text, path)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _end_all() -> None:
    engines = [*_alive]
    for engine in _alive | _hung:  # before anything can go wrong, and a parent's, in its fork, as well
        _native.keep_forever(engine)
    for engine in engines:
        try:
            engine.close(_EXIT_S)
        except Exception:  # noqa: BLE001 - the next one has to end all the same
            _log.exception("%s: it could not be closed at the interpreter's end", engine.name)


# Before the interpreter takes memory down that native threads may still use.
atexit.register(_end_all)
