"""What a fake drive keeps: files in memory, and which of their changes a power cut may undo. No time, no requests.

Not thread-safe: the `FakeDevice` that owns it takes care of that.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.io.base import PAGE_NBYTES, FileInfo

__all__ = ["Content", "FakeFile", "Medium", "Unsynced", "keep_randomly", "os_error"]


_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class Unsynced:
    """One change that a power cut may undo: a page written, a size set, or a name made or removed in its folder."""

    path: Path
    what: Literal["page", "size", "name"]
    page: int = 0


def keep_randomly(rng: Random, *, changes: float = 0.5, names: float = 1.0) -> Callable[[Unsynced], bool]:
    """For `crash_image`: each page and size survives with probability `changes`, each name change with `names`."""
    return lambda change: rng.random() < (names if change.what == "name" else changes)


def os_error(number: int, path: Path) -> OSError:
    """The error that Linux would raise for `path`."""
    return OSError(number, os.strerror(number), str(path))


def pages_nbytes(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Content:
    """A file's bytes. Invariant: `durable` with `journal` replayed over it equals `current`, what a read sees."""

    def __init__(self, current: Bytes) -> None:
        self.current = current
        self.durable = current.copy()
        self.journal: deque[tuple[int, bytes | None]] = deque()  # (offset, data), or (new size, None)
        self.handles = 0
        self.serial = next(_serials)
        self._synced = 0  # changes that have left the journal since the start

    @property
    def allocated_nbytes(self) -> int:
        """What the file takes of the drive."""
        return pages_nbytes(self.current.nbytes)

    @property
    def changes(self) -> int:
        """Changes made since the start, durable or not."""
        return self._synced + len(self.journal)

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at `offset`, longer than the file if need be."""
        self.current = _changed(self.current, offset, data)
        self.journal.append((offset, data))

    def resize(self, nbytes: int) -> None:
        """Cut, or add zeros."""
        self.current = _changed(self.current, nbytes, None)
        self.journal.append((nbytes, None))

    def sync(self, changes: int) -> None:
        """Make the first `changes` changes since the start durable."""
        while self._synced < changes:
            self.durable = _changed(self.durable, *self.journal.popleft())
            self._synced += 1

    def after_crash(
        self, path: Path, in_flight: Iterable[tuple[int, bytes]], keep: Callable[[Unsynced], bool]
    ) -> Content:
        """What a power cut leaves of it. `in_flight`: writes (offset, data) under way; part may have arrived."""
        left = self.durable.copy()
        for place, data in [*self.journal, *in_flight]:
            if data is None:
                if keep(Unsynced(path, "size")):
                    left = _changed(left, place, None)
                continue
            for start in range(0, len(data), PAGE_NBYTES):
                if keep(Unsynced(path, "page", (place + start) // PAGE_NBYTES)):
                    left = _changed(left, place + start, data[start : start + PAGE_NBYTES])
        return Content(left)


def _changed(content: Bytes, place: int, data: bytes | None) -> Bytes:
    """`content` after one journal entry; changed in place where its size allows."""
    end = place if data is None else max(content.nbytes, place + len(data))
    if end != content.nbytes:
        resized: Bytes = np.zeros(end, dtype=np.uint8)
        kept = min(end, content.nbytes)
        resized[:kept] = content[:kept]
        content = resized
    if data is not None:
        content[place : place + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return content


class FakeFile:
    """An open file of a fake drive."""

    direct = True

    def __init__(self, path: Path, content: Content, *, writable: bool) -> None:
        self.path = path
        self.content: Content | None = content  # None: closed
        self._writable = writable
        content.handles += 1

    def to_read(self) -> Content:
        """Raises OSError (EBADF) after closing."""
        if self.content is None:
            raise os_error(errno.EBADF, self.path)
        return self.content

    def to_write(self) -> Content:
        """Raises OSError (EBADF) after closing, or if opened for reading only."""
        if not self._writable:
            raise os_error(errno.EBADF, self.path)
        return self.to_read()

    def close(self) -> None:
        """Closing twice does nothing."""
        if self.content is not None:
            self.content.handles -= 1
            self.content = None


class Medium:
    """Names and contents on a drive of `capacity_nbytes`. Folders exist by themselves."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.names: dict[Path, Content] = {}
        self._durable_names: dict[Path, Content] = {}
        self._contents: set[Content] = set()  # named or open

    @property
    def free_nbytes(self) -> int:
        return max(0, self.capacity_nbytes - sum(content.allocated_nbytes for content in self._contents))

    def create(self, path: Path, nbytes: int) -> FakeFile:
        """A new file of zeros. Raises OSError (EEXIST, ENOSPC)."""
        if path in self.names:
            raise os_error(errno.EEXIST, path)
        if pages_nbytes(nbytes) > self.free_nbytes:
            raise os_error(errno.ENOSPC, path)
        content = Content(np.zeros(nbytes, dtype=np.uint8))
        self.names[path] = content
        self._contents.add(content)
        return FakeFile(path, content, writable=True)

    def open(self, path: Path, *, writable: bool) -> FakeFile:
        """Raises OSError (ENOENT)."""
        if path not in self.names:
            raise os_error(errno.ENOENT, path)
        return FakeFile(path, self.names[path], writable=writable)

    def resize(self, file: FakeFile, nbytes: int) -> None:
        """Raises OSError (ENOSPC, EBADF)."""
        content = file.to_write()
        if pages_nbytes(nbytes) - content.allocated_nbytes > self.free_nbytes:
            raise os_error(errno.ENOSPC, file.path)
        content.resize(nbytes)

    def close(self, file: FakeFile) -> None:
        """A file without a name gives its space back with its last handle."""
        file.close()
        self._forget_unused()

    def unlink(self, path: Path) -> None:
        """Raises OSError (ENOENT)."""
        if self.names.pop(path, None) is None:
            raise os_error(errno.ENOENT, path)
        self._forget_unused()

    def entries(self, folder: Path) -> list[FileInfo]:
        """Files in `folder`, sorted by name."""
        return [
            FileInfo(
                path.name, content.current.nbytes, content.allocated_nbytes, content.serial << 32 | content.changes
            )
            for path, content in sorted(self.names.items())
            if path.parent == folder
        ]

    def sync_folder(self, folder: Path) -> None:
        """Names in `folder`, as they are now, survive a power cut."""
        elsewhere = {path: content for path, content in self._durable_names.items() if path.parent != folder}
        here = {path: content for path, content in self.names.items() if path.parent == folder}
        self._durable_names = elsewhere | here

    def after_crash(
        self, in_flight: Callable[[Content], Iterable[tuple[int, bytes]]], keep: Callable[[Unsynced], bool]
    ) -> Medium:
        """What a power cut leaves; asks `keep` by path, then in the order of the changes. This one is not changed."""
        left = Medium(self.capacity_nbytes)
        for path in sorted(self.names.keys() | self._durable_names.keys()):
            now, before = self.names.get(path), self._durable_names.get(path)
            content = now if now is before or keep(Unsynced(path, "name")) else before
            if content is not None:
                left.names[path] = content.after_crash(path, in_flight(content), keep)
        left._durable_names = dict(left.names)
        left._contents = set(left.names.values())
        return left

    def _forget_unused(self) -> None:
        named = set(self.names.values())
        self._contents = {content for content in self._contents if content in named or content.handles}
