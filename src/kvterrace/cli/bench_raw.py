"""The plain file beside which `kvterrace bench store` measures: `pwritev` and `preadv`, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.engine.dirty import WritePolicy
from kvterrace.errors import StoreUnusableError

__all__ = ["RawFile"]

_READ_DEPTH = 8  # threads of the store's engine
_READ_NBYTES = 4 << 20  # what the store merges neighbouring reads to
_WRITE_DEPTH = 2  # write batches that the store has in flight


class RawFile:
    """A plain file with its room reserved, moved by threads of its own at the store's depth and request size."""

    def __init__(self, path: Path, nbytes: int, block_nbytes: int) -> None:
        """Make the file, of `nbytes`. Requests move whole blocks. Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system that reserves nothing
            os.posix_fallocate(self._fd, 0, nbytes)
        self.direct = _set_direct(self._fd)
        self._read_nbytes = max(block_nbytes, _READ_NBYTES // block_nbytes * block_nbytes)
        policy_nbytes = WritePolicy().batch_nbytes
        self._write_nbytes = max(block_nbytes, policy_nbytes // block_nbytes * block_nbytes)
        self._readers = ThreadPoolExecutor(_READ_DEPTH, "kvterrace-bench-read")
        self._writers = ThreadPoolExecutor(_WRITE_DEPTH, "kvterrace-bench-write")

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        os.close(self._fd)

    def write(self, memory: Bytes, offset: int) -> None:
        """Write all of `memory` at `offset`; ends when the last request has."""
        _spread(self._writers, os.pwritev, self._fd, _pieces(memory, offset, self._write_nbytes))

    def read(self, memory: Bytes, offset: int) -> None:
        """Fill `memory` from `offset`; ends when the last request has."""
        _spread(self._readers, os.preadv, self._fd, _pieces(memory, offset, self._read_nbytes))

    def sync(self) -> None:
        """fdatasync."""
        os.fdatasync(self._fd)

    def drop_cache(self) -> None:
        """Where O_DIRECT is refused, have the page cache let go of the file."""
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


_Piece = tuple[Bytes, int]


def _pieces(memory: Bytes, offset: int, nbytes: int) -> list[_Piece]:
    return [(memory[at : at + nbytes], offset + at) for at in range(0, memory.nbytes, nbytes)]


def _spread(
    pool: ThreadPoolExecutor, move: Callable[[int, Sequence[memoryview], int], int], fd: int, pieces: list[_Piece]
) -> None:
    def whole(piece: _Piece) -> None:
        memory, offset = piece
        while memory.nbytes:
            moved = move(fd, [memory.data], offset)
            if not moved:
                raise StoreUnusableError(f"the plain file ends at {offset}: no result")
            memory, offset = memory[moved:], offset + moved

    list(pool.map(whole, pieces))


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
