"""Files changed one request at a time, past the page cache: what a purge does to a drive."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoClass, IoFile, IoKind, IoRequest
from kvterrace.io.posix import PosixEngine
from kvterrace.observe.folder import ERASED_SUFFIX

__all__ = ["Drive", "aligned"]

_PIECE_NBYTES = 4 << 20


class Drive:
    """An I/O engine whose requests are waited for. One owner."""

    def __init__(self) -> None:
        self.engine = PosixEngine(threads=1, name="purge")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close(30.0)

    def write(self, file: IoFile, offset: int, data: Bytes) -> None:
        """Write `data` (page-aligned memory, whole pages) at `offset`, all of it. Raises OSError."""
        self._now(IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, offset, (data,)))

    def sync(self, file: IoFile) -> None:
        """Make what was written durable. Raises OSError."""
        self._now(IoRequest(IoKind.SYNC, IoClass.DEMOTION, file))

    def sync_file(self, path: Path) -> None:
        """Make what was ever written to a file durable. Raises OSError."""
        file = self.engine.reopen(path)
        try:
            self.sync(file)
        finally:
            self.engine.close_file(file)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name in its folder, durably. Raises OSError."""
        path.rename(to)
        self.engine.sync_folder(path.parent)

    def retire(self, path: Path) -> Path:
        """Take a file out of use by giving it another name, durably; returns that. Overwritten in place, a file that
        somebody still believed would be found damaged. Raises OSError.
        """
        gone = path.with_name(path.name + ERASED_SUFFIX)
        self.rename(path, gone)
        return gone

    def erase(
        self, path: Path, kept: Iterable[tuple[int, int]] = (), on_written: Callable[[int], object] = lambda _: None
    ) -> int:
        """Overwrite a file with zeros, but for the extents `kept` (whole pages), and remove it, all of it durably;
        returns how many bytes were overwritten. Raises OSError; the file is there then.
        """
        file = self.engine.reopen(path)
        try:
            total = 0
            zeros = aligned(_PIECE_NBYTES)
            end = -(-path.stat().st_size // PAGE_NBYTES) * PAGE_NBYTES
            start = 0
            for begin, stop in (*sorted(kept), (end, end)):
                while start < begin:
                    nbytes = min(_PIECE_NBYTES, begin - start)
                    self.write(file, start, zeros[:nbytes])
                    on_written(nbytes)
                    total += nbytes
                    start += nbytes
                start = max(start, stop)
            self.sync(file)
        finally:
            self.engine.close_file(file)
        self.remove(path)
        return total

    def remove(self, path: Path) -> None:
        """Remove a file, durably. Raises OSError."""
        self.engine.unlink(path)
        self.engine.sync_folder(path.parent)

    def _now(self, request: IoRequest) -> None:
        self.engine.submit([request])
        while not (results := self.engine.poll(60.0)):
            pass
        result = results[0]
        fault = result.error or result.crash
        if fault is not None:
            raise fault
        if not result.complete:
            path = request.file.path if request.file is not None else ""
            raise OSError(errno.EIO, f"short write: {result.nbytes} of {result.wanted_nbytes} B", str(path))


def aligned(nbytes: int) -> Bytes:
    """Zeros in page-aligned memory."""
    memory = np.zeros(nbytes + PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
