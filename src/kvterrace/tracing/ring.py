"""A folder of trace files under a cap: the oldest goes when room is wanted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from pathlib import Path

from kvterrace.errors import ConfigError
from kvterrace.tracing.files import SUFFIX

__all__ = ["FILES", "Ring"]

#: Files that the cap is divided into, about.
FILES = 8


class Ring:
    """Appends to the newest file of a folder, whose trace files together stay within `cap_nbytes` at any time.

    Not thread-safe. The folder is locked: of two processes that record into one, each would count without the other.
    """

    def __init__(self, folder: Path, cap_nbytes: int, began_unix_ns: int) -> None:
        """Make the folder (0700) if it is missing, and lock it. Changes nothing else.

        Raises:
            ConfigError: it is no folder, others may look into it, another process records into it, or it cannot be
                made.
        """
        self.folder = folder
        self._cap_nbytes = cap_nbytes
        self._fd: int | None = None
        self._lock_fd: int | None = None
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            mode = stat.S_IMODE(os.fstat(self._lock_fd).st_mode)
            if mode & 0o077:
                raise ConfigError(f"trace: others may look into {folder}: chmod 700 it, or name a folder to be made")
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sizes = {one: one.stat().st_size for one in sorted(folder.glob(f"*{SUFFIX}"))}
        except BlockingIOError as error:
            self._unlock()
            raise ConfigError(f"trace: another store records into {folder}; give each a folder of its own") from error
        except OSError as error:
            self._unlock()
            raise ConfigError(
                f"trace: cannot record into {folder}: {error.strerror or error}; give a folder that you can write to"
            ) from error
        except ConfigError:
            self._unlock()
            raise
        # Names sort by age, also after a clock was set back.
        newest = max((_stamp(one) for one in self._sizes), default=0)
        self._stamp = max(began_unix_ns, newest + 1)
        self._newest: Path | None = None
        self.files = 0
        _rings.add(self)

    @property
    def nbytes(self) -> int:
        """What the folder's trace files take. From any thread."""
        return sum(list(self._sizes.values()))

    @property
    def file_nbytes(self) -> int:
        """Size of the newest file; 0 if there is none."""
        return self._sizes[self._newest] if self._newest is not None else 0

    @property
    def is_full(self) -> bool:
        """Whether the newest file has its share of the cap, or there is none: it is time for `begin`."""
        return self._newest is None or self.file_nbytes >= self._cap_nbytes // FILES

    def begin(self) -> None:
        """End the newest file, and make the next (0600). Raises OSError."""
        self._shut()
        path = self.folder / f"{self._stamp:020d}-{self.files:06d}{SUFFIX}"
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._newest = path
        self._sizes[path] = 0
        self.files += 1

    def append(self, data: bytes) -> bool:
        """Append to the newest file, all or nothing, once older files have made room. False: it does not fit the cap.

        Raises:
            OSError: the drive is full, or fails. What it had taken of `data` is cut off again, where that can be.
        """
        assert self._fd is not None and self._newest is not None, "begin a file first"
        for path in list(self._sizes):
            if self.nbytes + len(data) <= self._cap_nbytes:
                break
            if path != self._newest:
                with contextlib.suppress(FileNotFoundError):  # somebody has removed it: as well
                    path.unlink()
                del self._sizes[path]
        if self.nbytes + len(data) > self._cap_nbytes:
            return False
        before, view = self.file_nbytes, memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise
        self._sizes[self._newest] += len(data)
        return True

    def close(self) -> None:
        """Close the newest file and unlock the folder, also for a forked process. Closing twice does nothing."""
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self.disown()

    def disown(self) -> None:
        """Close this process's descriptors. The folder stays locked if another process has some."""
        self._shut()
        self._unlock()

    def _shut(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)


def _stamp(path: Path) -> int:
    text = path.name.partition("-")[0]
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= 20 else 0


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _disown_in_child() -> None:
    # A lock lives as long as any descriptor of its open file: a forked child would keep it after its parent is gone.
    for ring in list(_rings):
        ring.disown()


os.register_at_fork(after_in_child=_disown_in_child)
