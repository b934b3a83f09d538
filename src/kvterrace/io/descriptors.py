"""Open files without as many open descriptors: a large store has more segments than a process may have files open."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Descriptors", "PosixFile", "most_descriptors", "set_direct"]

#: Most descriptors that one engine keeps open, and the share of what the process may have.
_MOST = 512
_SHARE = 4


def most_descriptors() -> int:
    """How many descriptors one engine keeps: 512, or a quarter of what the process may have open if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = soft // _SHARE if soft > 0 else _MOST
    return max(8, min(_MOST, allowed))


class Descriptors:
    """Which files have a descriptor at the moment, the least recently used first. Thread-safe.

    One that is in use is never taken away, so that there may be more than `most` for as long as that many are in use.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most` is `most_descriptors()` unless it is given."""
        self.most = most_descriptors() if most is None else most
        self._open: OrderedDict[PosixFile, None] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, file: PosixFile) -> None:
        """`file` has a descriptor and was just used; another may lose its own for that."""
        with self._lock:
            self._open[file] = None
            self._open.move_to_end(file)
            surplus = list(self._open)[: len(self._open) - self.most] if len(self._open) > self.most else []
        for other in surplus:
            if other is not file:
                other.park()

    def gone(self, file: PosixFile) -> None:
        """`file` has no descriptor any more. Called where it cannot get a new one meanwhile: under its lock, or
        after its `close`.
        """
        with self._lock:
            self._open.pop(file, None)

    def __len__(self) -> int:
        return len(self._open)


class PosixFile:
    """An open file. Thread-safe. It may lose its descriptor while nobody uses it, and gets another for its next use.

    Invariant: the descriptor is closed only when nobody is inside `using`, and `using` refuses once `close` was called.
    So no I/O ever reaches a descriptor number that the process has since given to another file.
    """

    __slots__ = ("_closed", "_descriptors", "_fd", "_flags", "_lock", "_users", "direct", "path")

    def __init__(self, path: Path, flags: int, descriptors: Descriptors) -> None:
        """Open `path` with `flags` of os.open; a file that this makes has mode 0600. Raises OSError."""
        self.path = path
        self._flags = flags & ~(os.O_CREAT | os.O_EXCL)
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()
        self._descriptors = descriptors
        self._fd = os.open(path, flags, 0o600)
        try:
            self.direct = set_direct(self._fd)
        except BaseException:
            os.close(self._fd)
            if flags & os.O_EXCL:
                path.unlink()
            raise
        descriptors.used(self)

    @contextlib.contextmanager
    def using(self) -> Iterator[int]:
        """The descriptor, kept open for the length of the block. Raises OSError (EBADF) after `close`."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "file was closed", str(self.path))
            if self._fd < 0:
                self._fd = os.open(self.path, self._flags)
                if self.direct:
                    set_direct(self._fd)
            self._users += 1
            fd = self._fd
        self._descriptors.used(self)
        try:
            yield fd
        finally:
            self._leave()

    def park(self) -> bool:
        """Let the descriptor go if nobody uses it; whether there is none now."""
        with self._lock:
            if self._users == 0 and self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self._descriptors.gone(self)
            return self._fd < 0

    def close(self) -> None:
        """Refuse further use; close the descriptor now, or when the last user leaves. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._users += 1
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and self._users == 0
            fd, self._fd = (self._fd, -1) if last else (-1, self._fd)
        if fd >= 0:
            os.close(fd)
        if last:
            self._descriptors.gone(self)


def set_direct(fd: int) -> bool:
    """Ask for O_DIRECT; False where the file system refuses it. Other refusals raise OSError."""
    # Not by open(O_CREAT | O_DIRECT): where that is refused, Linux has made the file already, and O_EXCL fails next.
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
