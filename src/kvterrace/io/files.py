"""What every engine over the operating system's files shares: its calls on files, and how one transfer is done."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvterrace.buffers import Bytes
from kvterrace.errors import StoreClosedError
from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoFile

__all__ = ["FileCalls", "OpenFile", "transfer"]

_log = logging.getLogger(__name__)

#: Most buffers that one preadv or pwritev takes: IOV_MAX on Linux.
_IOV_MAX = 1024


class OpenFile(IoFile, Protocol):
    """A file that lends its descriptor."""

    def using(self) -> contextlib.AbstractContextManager[int]:
        """The descriptor, kept open for the length of the block. Raises OSError (EBADF) after `close`."""
        ...

    def close(self) -> None:
        """Refuse further use; close the descriptor now, or when the last user leaves. Closing twice does nothing."""
        ...


_File = TypeVar("_File", bound=OpenFile)


class FileCalls(ABC, Generic[_File]):
    """The calls on files of an `IoEngine`. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._files: set[_File] = set()
        self._files_lock = threading.Lock()
        self._buffered_folders: set[Path] = set()

    @abstractmethod
    def _make_file(self, path: Path, flags: int) -> _File:
        """Open `path` with `flags` of os.open, with O_DIRECT besides where the file system takes it; mode 0600."""

    @property
    def _is_mine(self) -> bool:
        return os.getpid() == self._pid

    def _require_mine(self) -> None:
        """A fork has the memory of an engine, its locks as they were, and none of its threads."""
        if not self._is_mine:
            raise StoreClosedError(
                f"I/O engine {self.name} belongs to process {self._pid}, not to its fork; open the store here"
            )

    @abstractmethod
    def _own(self, file: IoFile | None) -> _File:
        """`file`, if this engine can use it. Raises TypeError."""

    def create(self, path: Path, nbytes: int) -> _File:
        file = self._open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            with file.using() as fd:
                _reserve(fd, nbytes)
        except BaseException:
            self.close_file(file)
            path.unlink()
            raise
        return file

    def open(self, path: Path) -> _File:
        return self._open(path, os.O_RDONLY)

    def reopen(self, path: Path) -> _File:
        return self._open(path, os.O_RDWR)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        own = self._own(file)
        with own.using() as fd:
            moved, error = transfer(fd, offset, (buffer,), os.preadv, direct=own.direct)
        if error is not None:
            raise error
        return moved

    def truncate(self, file: IoFile, nbytes: int) -> None:
        with self._own(file).using() as fd:
            os.ftruncate(fd, nbytes)

    def close_file(self, file: IoFile) -> None:
        """As in `IoEngine`. Closing twice does nothing; a request still running on it puts the closing off."""
        own = self._own(file)
        with self._files_lock:
            self._files.discard(own)
        own.close()

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

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")

    def _open(self, path: Path, flags: int) -> _File:
        self._require_open()
        file = self._make_file(path, flags)
        direct = file.direct
        with self._files_lock:
            self._files.add(file)
            warn = not direct and path.parent not in self._buffered_folders
            if warn:
                self._buffered_folders.add(path.parent)
        if warn:
            _log.warning("%s: %s refuses O_DIRECT; reading and writing through the page cache", self.name, path.parent)
        return file

    def _close_files(self) -> None:
        with self._files_lock:
            files = [*self._files]
        for file in files:
            self.close_file(file)


def _reserve(fd: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        # EINVAL: glibc emulates a missing fallocate by 1-byte writes, which O_DIRECT refuses.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


class _Move(Protocol):
    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


def transfer(fd: int, offset: int, memory: Sequence[Bytes], move: _Move, *, direct: bool) -> tuple[int, OSError | None]:
    """Move bytes by `move` (os.preadv or os.pwritev) to the end, and say how many it were and what ended them early.

    Python itself retries EINTR (PEP 475). What lies past them in the buffers of a short read is undefined: with
    O_DIRECT the kernel fills it with zeros. Raises OSError, or what the buffers raise, before anything was moved.
    """
    sizes = [buffer.nbytes for buffer in memory]
    if offset % PAGE_NBYTES or any(size % PAGE_NBYTES for size in sizes):
        raise OSError(errno.EINVAL, f"offset {offset} or a buffer is not a multiple of {PAGE_NBYTES} B")
    buffers = [buffer.data for buffer in memory]
    first = total = 0  # the first buffer not fully moved; bytes moved
    while first < len(buffers):
        try:
            moved = move(fd, buffers[first : first + _IOV_MAX], offset + total)
        except OSError as error:
            return total, error
        total += moved
        # With O_DIRECT, I/O cannot go on from an unaligned place; stopping there means end of file.
        if moved == 0 or (direct and moved % PAGE_NBYTES):
            break
        while first < len(buffers) and moved >= buffers[first].nbytes:
            moved -= buffers[first].nbytes
            first += 1
        if moved:
            buffers[first] = buffers[first][moved:]
    if move is os.preadv and not direct:
        os.posix_fadvise(fd, offset, sum(sizes), os.POSIX_FADV_DONTNEED)
    return total, None
