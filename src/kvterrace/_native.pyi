"""The extension module (native/): an I/O engine's core, and hooks that run without the GIL."""

from collections.abc import Sequence

from kvterrace.io.base import IoResult

class Hook:
    """What runs once on a native thread when an operation has completed. Made by the module itself.

    Engines without native threads call it like any other `finish`; it then runs on theirs, without the GIL.
    """

    def __call__(self, result: IoResult, /) -> None: ...

class Recorder(Hook):
    """For tests: how often it ran, and the last completion that it was given."""

    def __init__(self) -> None: ...
    @property
    def runs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def error(self) -> int: ...

class FileTable:
    """Which files have a descriptor at the moment; at most `most` but for those in use."""

    def __init__(self, most: int) -> None: ...
    def __len__(self) -> int: ...

class File:
    """An open file. The descriptors that a call returns in a list are the caller's to close."""

    @staticmethod
    def adopt(table: FileTable, fd: int, path: bytes, flags: int, direct: bool, /) -> tuple[File, list[int]]:
        """Take `fd` over."""
    def hold(self) -> bool:
        """Keep it usable until `drop`; False after `close`."""
    def peek(self) -> int:
        """The descriptor of a held file, -1 if it has none now."""
    def offer(self, fd: int, /) -> tuple[int, list[int]]:
        """Give a held file a descriptor, unless it has one by now; returns the one it has."""
    def drop(self) -> list[int]: ...
    def close(self) -> list[int]: ...

#: id, bytes moved, errno, why it was refused ("" if it was not), started_s, ended_s
_Row = tuple[int, int, int, str, float, float]
#: id, kind, class, file, offset, buffers, finish (0 none, 1 hook, 2 Python), hook
_Op = tuple[int, int, int, object, object, object, int, Hook | None]

class Core:
    """An engine without Python objects. Thread-safe; no call blocks, waiting is done on the eventfds."""

    def __init__(self, kind: str, depth: int, serial: bool) -> None:
        """`kind` is uring, posix or manual. Raises OSError where the kernel refuses."""
    def submit(self, ops: Sequence[_Op], /) -> bool:
        """False after `close`."""
    def take(self) -> tuple[list[_Row], bool]:
        """What has ended, and whether a poll should return even if that is nothing."""
    def take_job(self, pool: int, /) -> _Row | None: ...
    def job_done(self, number: int, /) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def end(self) -> bool: ...
    def release_fds(self) -> None: ...
    def jobs_fd(self, pool: int, /) -> int: ...
    def register_memory(self, buffer: object, fd: int, /) -> None:
        """Answered by the eventfd: 2 if the kernel took it, 1 if not. The memory must outlive the core."""
    @property
    def ready_fd(self) -> int: ...
    @property
    def quiet_fd(self) -> int: ...
    @property
    def bell_fd(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def unfinished(self) -> int: ...
    # of kind manual only: a device for tests
    def set_now(self, now_s: float, /) -> None: ...
    def pull(self) -> tuple[int, int, int, int, int] | None:
        """The next piece: its number, id of its operation, place in the file, bytes, buffers."""
    def place(self, number: int, /) -> int: ...
    def answer(self, number: int, answer: int, /) -> bool:
        """What the system call says (bytes, or -errno); whether the piece goes on."""
    def perform(self, number: int, /) -> None: ...

def keep_forever(one: object, /) -> None: ...
