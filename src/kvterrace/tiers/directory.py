"""A store's folder: what it is, which format, who writes it.

DIR/store.json                      format version, uuid, when created; written last, so that a half-made store is none
DIR/namespaces/<digest>.json        what a namespace stands for, for people and tools
DIR/partitions/<name>/lock          flock'ed by the one process that writes the partition
DIR/partitions/<name>/<number>.seg  segments
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import weakref
from pathlib import Path

from kvterrace.errors import ConfigError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.keys import Namespace
from kvterrace.tiers.marker import DriveRecord, make_marker, may_become_store, read_marker, sync_folder, write_whole

__all__ = ["PartitionLock", "StoreDirectory", "check_name", "make_root"]

#: Most descriptions of namespaces that one opened store writes: tenants come and go without end.
_DESCRIPTIONS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StoreDirectory:
    """The folder of one partition: locked for writing (`open`), or for reading beside who writes it (`view`)."""

    def __init__(self, root: Path, partition: Path, store_uuid: bytes, lock: PartitionLock | None) -> None:
        self.root = root
        self.partition = partition
        self.store_uuid = store_uuid
        self._lock = lock  # None: for reading
        self._described: set[bytes] = set()
        _opened.add(self)

    @classmethod
    def open(cls, root: Path, partition: str, *, created_unix_s: float) -> StoreDirectory:
        """Open or make the store at `root` and lock its partition. Blocks on the file system.

        Raises:
            ConfigError: the partition's name cannot be a folder name.
            NotAStoreError, FormatVersionError, StoreLockedError, StoreUnusableError: as they say; nothing was changed.
        """
        check_name(partition)
        try:
            store_uuid = _open_root(root, created_unix_s)
            folder = root / "partitions" / partition
            for each in (root / "namespaces", root / "partitions", folder):
                if not each.is_dir():
                    each.mkdir(mode=0o700, exist_ok=True)
                    sync_folder(each.parent)  # what is made in it is only as durable as its own name
            return cls(root, folder, store_uuid, PartitionLock(folder))
        except OSError as error:
            raise StoreUnusableError(
                f"cannot use {root} as a store: {error.strerror or error}; choose a folder that you can write to"
            ) from error

    @classmethod
    def view(cls, root: Path, partition: str) -> StoreDirectory:
        """The partition for reading: not locked, nothing made, and `describe` is claimed by nobody. Blocks.

        Raises:
            ConfigError: the partition's name cannot be a folder name.
            NotAStoreError: no store is there, or no such partition in it. FormatVersionError, StoreUnusableError.
        """
        check_name(partition)
        try:
            marker = read_marker(root)
            if marker is None:
                raise NotAStoreError(f"{root} holds no store to read; open it for writing once, or give another folder")
            folder = root / "partitions" / partition
            if not folder.is_dir():
                raise NotAStoreError(f"{root} has no partition {partition!r} to read; its writer makes it at open")
            os.scandir(folder).close()
        except OSError as error:
            raise StoreUnusableError(
                f"cannot read the store {root}: {error.strerror or error}; ask its owner for permission to read it"
            ) from error
        return cls(root, folder, marker.store_uuid, None)

    def claim_description(self, namespace: Namespace) -> bool:
        """Whether the caller is to call `describe`: True once for each namespace, and for the first 1,024 only. Does
        no I/O. Not thread-safe.
        """
        if self._lock is None:
            return False  # who does not write the partition writes nothing
        if namespace.digest in self._described or len(self._described) >= _DESCRIPTIONS:
            return False
        self._described.add(namespace.digest)
        return True

    def describe(self, namespace: Namespace) -> None:
        """Write down what a namespace stands for, unless that is there. Blocks on the file system. A failure is
        ignored: nothing but tools reads it.
        """
        path = self.root / "namespaces" / f"{namespace.digest.hex()}.json"
        with contextlib.suppress(OSError):
            if not path.exists():
                write_whole(path, namespace.describe())

    def close(self) -> None:
        """Give the partition's lock back, also for descriptors that a forked process has of it. Closing twice does
        nothing.
        """
        if self._lock is not None:
            self._lock.release()

    def disown(self) -> None:
        """Close this process's descriptors of the lock, which stays held if another process has some."""
        if self._lock is not None:
            self._lock.disown()


_opened: weakref.WeakSet[StoreDirectory] = weakref.WeakSet()


def _disown_in_child() -> None:
    # A lock lives as long as any descriptor of its open file: a forked child would keep it after its parent is gone.
    for directory in list(_opened):
        directory.disown()


os.register_at_fork(after_in_child=_disown_in_child)


def check_name(partition: object) -> None:
    """Raises ConfigError: `partition` cannot be the name of a partition."""
    if not isinstance(partition, str) or not _NAME.fullmatch(partition):
        raise ConfigError(f"partition name {partition!r}: use letters, digits, '.', '_' and '-', at most 64")


def _open_root(root: Path, created_unix_s: float) -> bytes:
    if root.exists() and not root.is_dir():
        raise NotAStoreError(f"{root} is not a folder; give a folder for the store")
    marker = read_marker(root)
    if marker is None:
        make_root(root, created_unix_s)
        marker = read_marker(root)
        assert marker is not None, "made, and not there"
    return marker.store_uuid


def make_root(root: Path, created_unix_s: float, drive: DriveRecord | None = None) -> None:
    """Make the folder of a new store, or of a new drive of one. Raises NotAStoreError, OSError."""
    if root.exists() and not may_become_store(root):
        raise NotAStoreError(f"{root} holds other files and no store.json; give an empty or a new folder")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    sync_folder(root.parent)
    make_marker(root, created_unix_s, drive)


class PartitionLock:
    """The right to write a partition, held by at most one process at a time, until `release` or its end.

    Both the file `lock`, which says who holds it, and the folder itself are locked: somebody may remove the file.
    """

    def __init__(self, partition: Path) -> None:
        """Take the lock of the folder `partition`. Does not wait.

        Raises:
            StoreLockedError: another process has it, or an earlier store of this one. OSError.
        """
        self._fds: list[int] = []
        try:
            # not through a link: what it leads to, outside the store, would be overwritten
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fds.append(os.open(partition / "lock", flags, 0o600))
            self._fds.append(os.open(partition, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for fd in self._fds:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EAGAIN, errno.EACCES):
                        raise self._refusal(partition) from error
                    if fd == self._fds[0]:  # file systems over a network lock files, and may not lock folders
                        raise
            os.ftruncate(self._fds[0], 0)
            os.pwrite(self._fds[0], f"pid {os.getpid()}\n".encode(), 0)
        except BaseException:
            self.disown()
            raise

    def _refusal(self, partition: Path) -> StoreLockedError:
        holder = os.pread(self._fds[0], 64, 0).decode(errors="replace").strip()
        if holder == f"pid {os.getpid()}":
            return StoreLockedError(
                f"{partition} is held by a store of this process ({holder}): close it; if that has timed out, its drive"
                " had not answered: closing it once more, when the drive answers again, gives the partition back"
            )
        return StoreLockedError(
            f"{partition} is being written by another process ({holder or 'unknown'}); close it, or give this one "
            "its own partition or folder"
        )

    def release(self) -> None:
        """Give the lock back, also for descriptors that a forked process has of it. Doing so twice does nothing."""
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.disown()

    def disown(self) -> None:
        """Close this process's descriptors of the lock, which stays held if another process has some."""
        while self._fds:
            os.close(self._fds.pop())
