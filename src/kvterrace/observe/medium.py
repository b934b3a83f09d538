"""Reading a file so that its medium is read: O_DIRECT, or, where a file system refuses that, with the pages dropped
first.

For tools that only look: nothing is written, locked or created. Blocks on every read; one owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.record import PAGE_NBYTES

__all__ = ["MediumFile"]

_NOTHING: Bytes = np.zeros(0, dtype=np.uint8)
_NO_FAULT = ("", 0)


class MediumFile:
    """A regular file, read through a window of `piece_nbytes`. Views are valid until the next call."""

    def __init__(
        self, path: Path, *, piece_nbytes: int = 4 << 20, on_read: Callable[[int], object] | None = None
    ) -> None:
        """Open `path`. `on_read` hears of every read's bytes. Raises OSError, also for what is no regular file."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            self.direct = _set_direct(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        self._piece = piece_nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._on_read = on_read
        self._memory = _aligned(self._piece)
        self._start, self._window = 0, _NOTHING
        #: The last read that failed: what was said, and where. Empty if none did.
        self.fault: tuple[str, int] = _NO_FAULT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def nbytes(self) -> int:
        """Size of the file at this moment."""
        return os.fstat(self._fd).st_size

    def forget(self) -> None:
        """Drop the window: what is asked for next is read again. Clears `fault`."""
        self._window = _NOTHING
        self.fault = _NO_FAULT

    def read(self, offset: int, nbytes: int) -> Bytes:
        """The bytes at `offset` (a multiple of the page size), fewer at the end of the file. Raises OSError."""
        self._window = _NOTHING
        want = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if want > self._memory.nbytes:
            self._memory = _aligned(want)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, want, os.POSIX_FADV_DONTNEED)
        have = 0
        while have < want:
            moved = os.preadv(self._fd, [self._memory[have:want].data], offset + have)
            have += moved
            if not moved or moved % PAGE_NBYTES:
                break
        if not self.direct:
            os.posix_fadvise(self._fd, offset, want, os.POSIX_FADV_DONTNEED)
        if self._on_read is not None:
            self._on_read(min(have, nbytes))
        return self._memory[: min(have, nbytes)]

    def some(self, offset: int, nbytes: int) -> Bytes:
        """From 1 to `nbytes` bytes at `offset`; none at the end of the file, or, with `fault` set, where it fails."""
        at = offset - self._start
        if not 0 <= at < self._window.nbytes:
            start = offset // PAGE_NBYTES * PAGE_NBYTES
            try:
                window = self.read(start, self._piece)
            except OSError as error:
                self.fault = (error.strerror or str(error), start)
                return _NOTHING
            self._start, self._window = start, window
            at = offset - start
        return self._window[at : at + nbytes]

    def whole(self, offset: int, nbytes: int) -> Bytes:
        """All `nbytes` bytes at `offset`, copied if they span pieces; fewer where the file ends or a read fails."""
        first = self.some(offset, nbytes)
        if first.nbytes == nbytes or not first.nbytes:
            return first
        parts = [first.copy()]
        for view in self.stream(offset + first.nbytes, nbytes - first.nbytes):
            parts.append(view.copy())  # noqa: PERF401 - a view is void at the next step
        return np.concatenate(parts)

    def stream(self, offset: int, nbytes: int) -> Iterator[Bytes]:
        """The bytes at `offset`, piece by piece; ends early where the file ends or a read fails."""
        end = offset + nbytes
        while offset < end and (view := self.some(offset, end - offset)).nbytes:
            yield view
            offset += view.nbytes


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _aligned(nbytes: int) -> Bytes:
    memory = np.zeros(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
