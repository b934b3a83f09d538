"""What the store asks of a device: submit and poll, and a handful of calls on files.

One engine serves one drive. `submit` never blocks; `poll` hands back what ended. A request's buffers belong to the
engine from `submit` until its (last) result was returned by `poll`: nobody else may touch them in between, since I/O
in flight cannot be called back at will. Nothing here knows about records or segments; nothing above opens a file by
itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvterrace.buffers import Bytes

__all__ = ["PAGE_NBYTES", "IoClass", "IoEngine", "IoFile", "IoKind", "IoRequest", "IoResult", "RegistersMemory"]

#: Alignment of every offset, length and buffer address of a READ or WRITE: what O_DIRECT asks for on common drives.
PAGE_NBYTES = 4096


class IoKind(enum.Enum):
    """What a request does."""

    READ = "read"
    WRITE = "write"
    #: Make what was written to the file so far durable (fdatasync).
    SYNC = "sync"
    #: No I/O: run `finish` on one of the engine's threads (memory copies).
    CALL = "call"


class IoClass(enum.IntEnum):
    """Smaller goes first. An engine starts no request while one of a smaller class is waiting."""

    DEMAND = 0
    PREFETCH = 1
    DEMOTION = 2
    SCRUB = 3


class IoFile(Protocol):
    """An open file of an engine."""

    @property
    def path(self) -> Path: ...

    @property
    def direct(self) -> bool:
        """Whether I/O on it bypasses the page cache."""
        ...


@dataclass(slots=True, eq=False)
class IoRequest:
    """One operation.

    Attributes:
        kind: what to do.
        io_class: how urgent it is.
        file: None for CALL only.
        offset: byte offset in the file, a multiple of `PAGE_NBYTES`.
        buffers: memory to fill or to write, one after the other from `offset` on (preadv, pwritev). Each starts on a
            page boundary and is a multiple of `PAGE_NBYTES` long.
        finish: run once on the thread that completed the operation, before the result is posted, with the result so
            far; what it returns becomes `IoResult.value`. An exception that it raises becomes `IoResult.crash`. Only in
            a CALL of class DEMOTION may it block on other I/O (make, cut or remove a file).
        tag: the submitter's own, handed back untouched.
        deadline_s: seconds from `submit`; None: none, and it is ignored in a CALL. Past it, a request that the device
            was not given never is, and ends as `expired`. One that the device has is answered then, `expired` and
            `lent`; what can be called back is. Its buffers stay the engine's until a second result, which says what
            came of it after all.
    """

    kind: IoKind
    io_class: IoClass
    file: IoFile | None = None
    offset: int = 0
    buffers: Sequence[Bytes] = ()
    finish: Callable[[IoResult], object] | None = None
    tag: object = None
    deadline_s: float | None = None


@dataclass(slots=True, eq=False)
class IoResult:
    """How a request ended.

    `nbytes` is what the device moved; less than asked with no `error` means a short read (end of file) or a short
    write. An engine retries EINTR and partial transfers that still make progress; it never retries an error.
    """

    request: IoRequest
    nbytes: int = 0
    error: OSError | None = None
    #: When the device was given it and when it answered, in the engine's monotonic seconds: without the time in line.
    started_s: float = 0.0
    ended_s: float = 0.0
    value: object = None
    crash: BaseException | None = None
    #: Its deadline passed before the device had done all of it. No error of the device.
    expired: bool = False
    #: An answer ahead of its result, at the deadline: the buffers are still the engine's, and `finish` has not run.
    lent: bool = False

    @property
    def wanted_nbytes(self) -> int:
        """Bytes that the request asked for."""
        return sum(buffer.nbytes for buffer in self.request.buffers)

    @property
    def complete(self) -> bool:
        """Whether the device did all of it."""
        return self.error is None and not self.expired and self.nbytes == self.wanted_nbytes


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One directory entry: `name`, `nbytes` (apparent size), `allocated_nbytes` (what it takes of the drive).

    `mark` is another number once the name stands for another file, or the file was changed; two changes within one tick
    of the file system's clock may be told as one. 0: this engine cannot tell.
    """

    name: str
    nbytes: int
    allocated_nbytes: int = field(default=0)
    mark: int = field(default=0)


class IoEngine(Protocol):
    """A drive. `submit`, `poll` and `wake` may be called from any thread; the file calls block and raise OSError."""

    name: str

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Queue requests. Does not block. Raises `StoreClosedError` after `close`."""
        ...

    def poll(self, timeout_s: float) -> list[IoResult]:
        """Results that have come in; waits up to `timeout_s` for the first, or until `wake`."""
        ...

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        ...

    def subscribe(self, on_result: Callable[[], None]) -> bool:
        """Have `on_result` called, on any thread, whenever `poll` has become worth calling; replaces the one before.

        Returns False if this engine never calls it, since its results only come into being within `poll`.
        """
        ...

    @property
    def in_flight(self) -> int:
        """Requests submitted whose last result `poll` has not yet returned."""
        ...

    def create(self, path: Path, nbytes: int) -> IoFile:
        """Make a new file (mode 0600, fails if it exists) with `nbytes` reserved on the drive, open for reading and
        writing.
        """
        ...

    def open(self, path: Path) -> IoFile:
        """Open an existing file for reading."""
        ...

    def reopen(self, path: Path) -> IoFile:
        """Open an existing file for reading and writing."""
        ...

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        """Read into `buffer` (page-aligned, as for READ) and wait for it; returns the bytes read, fewer at the end of
        the file.
        """
        ...

    def truncate(self, file: IoFile, nbytes: int) -> None:
        """Set the size of a file from `create` or `reopen`."""
        ...

    def close_file(self, file: IoFile) -> None:
        """Close. No request on it may be in flight."""
        ...

    def unlink(self, path: Path) -> None: ...

    def list(self, folder: Path) -> Sequence[FileInfo]:
        """Regular files in `folder`, sorted by name; an empty list if the folder is missing."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make creations, removals and renames in `folder` durable."""
        ...

    def free_nbytes(self, folder: Path) -> int:
        """Bytes that an unprivileged writer can still add on the drive of `folder`."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Wait for what is in flight, then stop the threads. False if something still hangs (then it leaks,
        untouched).
        """
        ...


@runtime_checkable
class RegistersMemory(Protocol):
    """What some engines can besides: have the kernel pin memory once, rather than for each transfer."""

    def register_memory(self, memory: Bytes) -> bool:
        """Register `memory` (page-aligned) for the life of the engine; False if it goes on without. At most once."""
        ...
