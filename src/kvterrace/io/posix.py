"""The engine that is always there: a pool of threads doing preadv and pwritev with O_DIRECT.

Order: a free thread takes the waiting request of the smallest `IoClass`, first come first served within a class. With
two threads or more, one of them takes DEMAND only: otherwise a flood of slow DEMOTION writes could hold every thread,
and a demand read would wait for a write that started before it. Then two more threads take nothing but CALLs of class
DEMAND and PREFETCH, which are copies in memory: these go on while a drive that hangs holds every other thread. Threads
that are free help with copies, after the I/O of the same class.

Where the file system refuses O_DIRECT, a file is read and written through the page cache. One warning names the folder;
after each read and each SYNC the kernel is told to drop the pages (POSIX_FADV_DONTNEED), since the store budgets DRAM.

Deadlines are watched by the threads that copy, and by `poll`. A request that a thread has begun is never called back.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvterrace.errors import ConfigError
from kvterrace.io.base import IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.deadlines import Deadlines, Given
from kvterrace.io.descriptors import Descriptors, PosixFile
from kvterrace.io.files import FileCalls, transfer
from kvterrace.io.threads import start_all

__all__ = ["PosixEngine", "PosixFile"]

_log = logging.getLogger(__name__)

#: How long `close` gives idle threads to end; they have nothing left to wait for.
_JOIN_S = 1.0
#: Longest single wait: `Condition.wait` refuses infinity.
_WAIT_S = 3600.0
#: Threads that copy only.
_COPY_THREADS = 2

#: Requests that wait, in order. One whose deadline passes leaves from the middle without a search.
_Queue = OrderedDict[Given, None]


class PosixEngine(FileCalls[PosixFile]):
    """`IoEngine` over the operating system's files. Must be closed: its (daemon) threads keep it alive otherwise.

    A request that waits while its file is closed ends with EBADF; one that runs ends normally, and the descriptor
    is closed after it. One that cannot be carried out as asked (unaligned, not a file of this kind) ends with
    EINVAL. After a fork the engine is the parent's: the child's calls raise `StoreClosedError`.
    """

    def __init__(self, threads: int = 8, name: str = "posix") -> None:
        if threads < 1:
            raise ConfigError(f"an I/O engine needs at least 1 thread, not {threads}; leave it at 8 if in doubt")
        super().__init__(name)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._demand_work = threading.Condition(self._lock)
        self._copy_work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues: tuple[_Queue, ...] = tuple(OrderedDict() for _ in IoClass)
        #: Copies of class DEMAND and PREFETCH; not used by a single thread, which keeps to the order they came in.
        self._copies: tuple[_Queue, ...] = (OrderedDict(), OrderedDict()) if threads > 1 else ()
        self._results: deque[IoResult] = deque()
        self._deadlines = Deadlines()
        self._overdue: deque[Given] = deque()  # past their deadline, and not answered yet
        self._unfinished = 0  # queued or running
        self._in_flight = 0  # those, and the results not yet polled
        self._woken = False
        self._on_result: Callable[[], None] | None = None
        self._stopped = False
        self._descriptors = Descriptors()
        every = self._queues
        jobs: list[tuple[str, Sequence[_Queue], threading.Condition]] = []
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
        try:
            start_all(self._threads)
        except BaseException:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close(_JOIN_S)
            raise

    # Requests

    def submit(self, requests: Sequence[IoRequest]) -> None:
        self._require_mine()
        with self._lock:
            self._require_open()
            copies = 0
            now_s, due_s = time.monotonic(), self._deadlines.next_s
            for request in requests:
                given = self._deadlines.give(request, now_s)
                if request.kind is IoKind.CALL and request.io_class < len(self._copies):
                    self._copies[request.io_class][given] = None
                    copies += 1
                else:
                    self._queues[request.io_class][given] = None
            self._unfinished += len(requests)
            self._in_flight += len(requests)
            self._work.notify(len(requests))
            if self._deadlines.next_s < due_s:
                copies += 1  # one that waits has to wake earlier
                self._done.notify()
            if copies:
                self._copy_work.notify(copies)
            if self._queues[IoClass.DEMAND] or (self._copies and self._copies[IoClass.DEMAND]):
                self._demand_work.notify()

    def poll(self, timeout_s: float) -> list[IoResult]:
        self._require_mine()
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                overdue = self._overdue_by(time.monotonic())
                while overdue is None and not (self._results or self._woken or (self._closed and not self._unfinished)):
                    now_s = time.monotonic()
                    if now_s >= deadline_s:
                        break
                    self._done.wait(min(deadline_s, self._deadlines.next_s, now_s + _WAIT_S) - now_s)
                    overdue = self._overdue_by(time.monotonic())
                if overdue is None:
                    self._woken = False
                    results = list(self._results)
                    self._results.clear()
                    self._in_flight -= sum(not result.lent for result in results)
                    return results
            self._answer_late(overdue)

    def wake(self) -> None:
        """Make a waiting `poll` return; if none waits, the next one returns at once."""
        if not self._is_mine:
            return
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
        return self._in_flight if self._is_mine else 0

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`; results stay for `poll`. Closes the files still open. Not to be called from a `finish`.

        When it returns False, requests that had not started never will, and their results never come. May be repeated.
        """
        if not self._is_mine:
            return True
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            while self._unfinished and (left_s := deadline_s - time.monotonic()) > 0:
                self._idle.wait(min(left_s, _WAIT_S))
            ended = not self._unfinished
            self._stopped = True
            for condition in (self._work, self._demand_work, self._copy_work, self._done):
                condition.notify_all()
        if not ended:
            _log.warning("%s: I/O hangs after %.1f s; its threads and buffers are left behind", self.name, timeout_s)
            return False
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._close_files()
        return True

    def _run(self, queues: Sequence[_Queue], work: threading.Condition) -> None:
        while True:
            with self._lock:
                while (job := self._next(queues)) is None and not self._stopped:
                    watches = work is self._copy_work
                    due_s = self._deadlines.next_s if watches else math.inf
                    work.wait(min(max(0.0, due_s - time.monotonic()), _WAIT_S))
            if job is None:
                return
            given, do = job
            do(given)
            del given, do, job  # an idle thread must not keep a caller's memory alive

    def _next(self, queues: Sequence[_Queue]) -> tuple[Given, Callable[[Given], None]] | None:
        if self._stopped:
            return None
        now_s = time.monotonic()
        overdue = self._overdue_by(now_s)
        if overdue is not None:
            return overdue, self._answer_late
        for queue in queues:
            if queue:
                given = queue.popitem(last=False)[0]
                given.started_s = now_s
                return given, self._carry_out
        return None

    def _overdue_by(self, now_s: float) -> Given | None:
        """One that has to be answered because of its deadline, if there is any."""
        for given in self._deadlines.due(now_s):
            if given.started_s is None:
                del self._queues[given.request.io_class][given]
            self._overdue.append(given)
        return self._overdue.popleft() if self._overdue else None

    def _answer_late(self, given: Given) -> None:
        """Answer a request whose deadline has passed."""
        now_s = time.monotonic()
        if given.started_s is None:
            self._post(given, _finished(given.unsent(now_s)))
            return
        with self._lock:
            if given.ended:  # meanwhile
                return
            self._results.append(given.lent(now_s))
            self._done.notify()
        self._ring()

    def _carry_out(self, given: Given) -> None:
        self._post(given, _perform(given.request))

    def _post(self, given: Given, result: IoResult) -> None:
        with self._lock:
            self._deadlines.ended(given)
            self._results.append(result)
            self._unfinished -= 1
            self._done.notify()
            if not self._unfinished:
                self._idle.notify_all()
        self._ring()

    # Files

    def _make_file(self, path: Path, flags: int) -> PosixFile:
        self._require_mine()
        return PosixFile(path, flags, self._descriptors)

    def _own(self, file: IoFile | None) -> PosixFile:
        self._require_mine()
        return _posix(file)


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
                    move = os.preadv if request.kind is IoKind.READ else os.pwritev
                    result.nbytes, result.error = transfer(
                        fd, request.offset, request.buffers, move, direct=file.direct
                    )
    except OSError as error:
        result.error = error
    except Exception as error:  # noqa: BLE001 - a request that makes no sense must not end the thread
        result.error = OSError(errno.EINVAL, f"request refused: {error}")
        result.error.__cause__ = error
    result.ended_s = time.monotonic()
    return _finished(result)


def _finished(result: IoResult) -> IoResult:
    """The same, once its `finish` has run."""
    if result.request.finish is not None:
        try:
            result.value = result.request.finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
    return result
