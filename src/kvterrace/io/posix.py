"""The engine that is always there: a pool of threads doing preadv and pwritev with O_DIRECT.

Order: a free thread takes the waiting request of the smallest `IoClass`, first come first served within a class. With
two threads or more, one of them takes DEMAND only: otherwise a flood of slow DEMOTION writes could hold every thread,
and a demand read would wait for a write that started before it. Then two more threads take nothing but CALLs of class
DEMAND and PREFETCH, which are copies in memory: these go on while a drive that hangs holds every other thread. Threads
that are free help with copies, after the I/O of the same class.

Where the file system refuses O_DIRECT, a file is read and written through the page cache. One warning names the folder;
after each read and each SYNC the kernel is told to drop the pages (POSIX_FADV_DONTNEED), since the store budgets DRAM.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.errors import ConfigError, StoreClosedError
from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.descriptors import Descriptors, PosixFile

__all__ = ["PosixEngine", "PosixFile"]

_log = logging.getLogger(__name__)

#: Most buffers that one preadv or pwritev takes: IOV_MAX on Linux.
_IOV_MAX = 1024
#: How long `close` gives idle threads to end; they have nothing left to wait for.
_JOIN_S = 1.0
#: Longest single wait: `Condition.wait` refuses infinity.
_WAIT_S = 3600.0
#: Threads that copy only.
_COPY_THREADS = 2


class PosixEngine:
    """`IoEngine` over the operating system's files. Must be closed: its (daemon) threads keep it alive otherwise.

    A request that waits while its file is closed ends with EBADF; one that runs ends normally, and the descriptor is
    closed after it. One that cannot be carried out as asked (unaligned, not a file of this kind) ends with EINVAL.
    """

    def __init__(self, threads: int = 8, name: str = "posix") -> None:
        if threads < 1:
            raise ConfigError(f"an I/O engine needs at least 1 thread, not {threads}; leave it at 8 if in doubt")
        self.name = name
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._demand_work = threading.Condition(self._lock)
        self._copy_work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues: tuple[deque[IoRequest], ...] = tuple(deque() for _ in IoClass)
        #: Copies of class DEMAND and PREFETCH; not used by a single thread, which keeps to the order they came in.
        self._copies: tuple[deque[IoRequest], ...] = (deque(), deque()) if threads > 1 else ()
        self._results: deque[IoResult] = deque()
        self._unfinished = 0  # queued or running
        self._in_flight = 0  # those, and the results not yet polled
        self._woken = False
        self._on_result: Callable[[], None] | None = None
        self._closed = False
        self._stopped = False
        self._files: set[PosixFile] = set()
        self._descriptors = Descriptors()
        self._buffered_folders: set[Path] = set()
        every = self._queues
        jobs: list[tuple[str, Sequence[deque[IoRequest]], threading.Condition]] = []
        if self._copies:
            every = (self._queues[0], self._copies[0], self._queues[1], self._copies[1], *self._queues[2:])
            jobs = [("demand", every[:2], self._demand_work)]
            jobs += [(f"copy{number}", self._copies, self._copy_work) for number in range(_COPY_THREADS)]
            threads -= 1
        jobs += [(str(number), every, self._work) for number in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(queues, work), name=f"kvterrace-{name}-{job}", daemon=True)
            for job, queues, work in jobs
        ]
        for thread in self._threads:
            thread.start()

    # Requests

    def submit(self, requests: Sequence[IoRequest]) -> None:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")
            copies = 0
            for request in requests:
                if request.kind is IoKind.CALL and request.io_class < len(self._copies):
                    self._copies[request.io_class].append(request)
                    copies += 1
                else:
                    self._queues[request.io_class].append(request)
            self._unfinished += len(requests)
            self._in_flight += len(requests)
            self._work.notify(len(requests))
            if copies:
                self._copy_work.notify(copies)
            if self._queues[IoClass.DEMAND] or (copies and self._copies[IoClass.DEMAND]):
                self._demand_work.notify()

    def poll(self, timeout_s: float) -> list[IoResult]:
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while not self._results and not self._woken and not (self._closed and not self._unfinished):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._done.wait(min(left_s, _WAIT_S))
            self._woken = False
            results = list(self._results)
            self._results.clear()
            self._in_flight -= len(results)
        return results

    def wake(self) -> None:
        """Make a waiting `poll` return; if none waits, the next one returns at once."""
        with self._lock:
            self._woken = True
            self._done.notify()
        self._ring()

    def subscribe(self, on_result: Callable[[], None]) -> bool:
        self._on_result = on_result
        return True

    def _ring(self) -> None:
        if self._on_result is not None:
            self._on_result()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`; results stay for `poll`. Closes the files still open. Not to be called from a `finish`.

        When it returns False, requests that had not started never will, and their results never come. May be repeated.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            while self._unfinished and (left_s := deadline_s - time.monotonic()) > 0:
                self._idle.wait(min(left_s, _WAIT_S))
            ended = not self._unfinished
            self._stopped = True
            files = list(self._files) if ended else []
            for condition in (self._work, self._demand_work, self._copy_work, self._done):
                condition.notify_all()
        if not ended:
            _log.warning("%s: I/O hangs after %.1f s; its threads and buffers are left behind", self.name, timeout_s)
            return False
        for thread in self._threads:
            thread.join(_JOIN_S)
        for file in files:
            self.close_file(file)
        return True

    def _run(self, queues: Sequence[deque[IoRequest]], work: threading.Condition) -> None:
        while True:
            with self._lock:
                while (request := self._next(queues)) is None and not self._stopped:
                    work.wait()
            if request is None:
                return
            result = _perform(request)
            with self._lock:
                self._results.append(result)
                self._unfinished -= 1
                self._done.notify()
                if not self._unfinished:
                    self._idle.notify_all()
            self._ring()
            del request, result  # an idle thread must not keep a caller's memory alive

    def _next(self, queues: Sequence[deque[IoRequest]]) -> IoRequest | None:
        if self._stopped:
            return None
        return next((queue.popleft() for queue in queues if queue), None)

    # Files

    def create(self, path: Path, nbytes: int) -> PosixFile:
        file = self._open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            with file.using() as fd:
                _reserve(fd, nbytes)
        except BaseException:
            self.close_file(file)
            path.unlink()
            raise
        return file

    def open(self, path: Path) -> PosixFile:
        return self._open(path, os.O_RDONLY)

    def reopen(self, path: Path) -> PosixFile:
        return self._open(path, os.O_RDWR)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        request = IoRequest(IoKind.READ, IoClass.DEMAND, file, offset, (buffer,))
        result = _perform(request)
        if result.error is not None:
            raise result.error
        return result.nbytes

    def truncate(self, file: IoFile, nbytes: int) -> None:
        with _posix(file).using() as fd:
            os.ftruncate(fd, nbytes)

    def close_file(self, file: IoFile) -> None:
        """As in `IoEngine`. Closing twice does nothing; a request still running on it puts the closing off."""
        posix = _posix(file)
        with self._lock:
            self._files.discard(posix)
        posix.close()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def list(self, folder: Path) -> Sequence[FileInfo]:
        found = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed since scandir saw it
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            # st_blocks counts 512 B units on Linux, whatever the file system's block size: stat(2).
                            mark = info.st_ino << 64 | info.st_ctime_ns
                            found.append(FileInfo(entry.name, info.st_size, info.st_blocks * 512, mark))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda info: info.name)

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_nbytes(self, folder: Path) -> int:
        info = os.statvfs(folder)
        return info.f_bavail * info.f_frsize

    def _open(self, path: Path, flags: int) -> PosixFile:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")
        file = PosixFile(path, flags, self._descriptors)
        direct = file.direct
        with self._lock:
            self._files.add(file)
            warn = not direct and path.parent not in self._buffered_folders
            if warn:
                self._buffered_folders.add(path.parent)
        if warn:
            _log.warning("%s: %s refuses O_DIRECT; reading and writing through the page cache", self.name, path.parent)
        return file


def _reserve(fd: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        # EINVAL: glibc emulates a missing fallocate by 1-byte writes, which O_DIRECT refuses.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _posix(file: IoFile | None) -> PosixFile:
    if not isinstance(file, PosixFile):
        raise TypeError(f"a PosixEngine cannot use {file!r}; it wants what its own create or open returned")
    return file


def _perform(request: IoRequest) -> IoResult:
    """Carry out a request on this thread, `finish` included. Never raises."""
    result = IoResult(request, started_s=time.monotonic())
    try:
        if request.kind is not IoKind.CALL:
            file = _posix(request.file)
            with file.using() as fd:
                if request.kind is IoKind.SYNC:
                    os.fdatasync(fd)
                    if not file.direct:
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    _transfer(result, fd, direct=file.direct)
    except OSError as error:
        result.error = error
    except Exception as error:  # noqa: BLE001 - a request that makes no sense must not end the thread
        result.error = OSError(errno.EINVAL, f"request refused: {error}")
        result.error.__cause__ = error
    result.ended_s = time.monotonic()
    if request.finish is not None:
        try:
            result.value = request.finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
    return result


def _transfer(result: IoResult, fd: int, *, direct: bool) -> None:
    """Move the request's bytes, counted in `result.nbytes` as they move. Python itself retries EINTR (PEP 475).

    What lies past `nbytes` in the buffers of a short read is undefined: with O_DIRECT the kernel fills it with zeros.
    """
    request = result.request
    sizes = [buffer.nbytes for buffer in request.buffers]
    if request.offset % PAGE_NBYTES or any(size % PAGE_NBYTES for size in sizes):
        raise OSError(errno.EINVAL, f"offset {request.offset} or a buffer is not a multiple of {PAGE_NBYTES} B")
    buffers = [buffer.data for buffer in request.buffers]
    first = 0  # the first buffer not fully moved
    while first < len(buffers):
        batch, place = buffers[first : first + _IOV_MAX], request.offset + result.nbytes
        moved = os.preadv(fd, batch, place) if request.kind is IoKind.READ else os.pwritev(fd, batch, place)
        result.nbytes += moved
        # With O_DIRECT, I/O cannot go on from an unaligned place; stopping there means end of file.
        if moved == 0 or (direct and moved % PAGE_NBYTES):
            break
        while first < len(buffers) and moved >= buffers[first].nbytes:
            moved -= buffers[first].nbytes
            first += 1
        if moved:
            buffers[first] = buffers[first][moved:]
    if request.kind is IoKind.READ and not direct:
        os.posix_fadvise(fd, request.offset, sum(sizes), os.POSIX_FADV_DONTNEED)
