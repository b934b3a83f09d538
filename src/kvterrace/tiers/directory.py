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
import json
import os
import re
import uuid
from pathlib import Path

from kvterrace.errors import ConfigError, FormatVersionError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.format.record import FORMAT_VERSION
from kvterrace.keys import Namespace

__all__ = ["StoreDirectory"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StoreDirectory:
    """The folder of one partition, locked for writing. Make it with `open`."""

    def __init__(self, root: Path, partition: Path, store_uuid: bytes, lock_fd: int) -> None:
        self.root = root
        self.partition = partition
        self.store_uuid = store_uuid
        self._lock_fd = lock_fd
        self._described: set[bytes] = set()

    @classmethod
    def open(cls, root: Path, partition: str, *, created_unix_s: float) -> StoreDirectory:
        """Open or make the store at `root` and lock its partition. Blocks on the file system.

        Raises:
            ConfigError: the partition's name cannot be a folder name.
            NotAStoreError, FormatVersionError, StoreLockedError, StoreUnusableError: as they say; nothing was changed.
        """
        if not _NAME.fullmatch(partition):
            raise ConfigError(f"partition name {partition!r}: use letters, digits, '.', '_' and '-', at most 64")
        try:
            store_uuid = _open_root(root, created_unix_s)
            folder = root / "partitions" / partition
            for each in (root / "namespaces", root / "partitions", folder):
                each.mkdir(mode=0o700, exist_ok=True)
            return cls(root, folder, store_uuid, _lock(folder / "lock"))
        except OSError as error:
            raise StoreUnusableError(
                f"cannot use {root} as a store: {error.strerror or error}; choose a folder that you can write to"
            ) from error

    def describe(self, namespace: Namespace) -> None:
        """Write down what a namespace stands for, once. A failure is ignored: nothing but tools reads it."""
        if namespace.digest in self._described:
            return
        self._described.add(namespace.digest)
        path = self.root / "namespaces" / f"{namespace.digest.hex()}.json"
        with contextlib.suppress(OSError):
            if not path.exists():
                _write_whole(path, namespace.describe())

    def close(self) -> None:
        """Give the partition's lock back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _open_root(root: Path, created_unix_s: float) -> bytes:
    if root.exists() and not root.is_dir():
        raise NotAStoreError(f"{root} is not a folder; give a folder for the store")
    marker = root / "store.json"
    if not marker.exists():
        if root.exists() and any(
            entry.name not in ("namespaces", "partitions", "lost+found") for entry in root.iterdir()
        ):
            raise NotAStoreError(f"{root} holds other files and no store.json; give an empty or a new folder")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = {"format_version": FORMAT_VERSION, "uuid": uuid.uuid4().hex, "created_unix_s": round(created_unix_s, 3)}
        _write_whole(marker, made)
    try:
        found = json.loads(marker.read_text())
        version, store_uuid = int(found["format_version"]), uuid.UUID(hex=found["uuid"]).bytes
    except (ValueError, KeyError, TypeError) as error:
        raise NotAStoreError(
            f"{marker} is damaged ({error}); restore it, or remove the folder to start anew"
        ) from error
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{root} was written in store format {version}; this kvterrace reads up to {FORMAT_VERSION}: upgrade it, "
            "or give another folder"
        )
    return store_uuid


def _write_whole(path: Path, content: dict[str, object]) -> None:
    """Write a small file so that it is there whole or not at all; the first of two writers wins."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise StoreLockedError(
            f"{path.parent} is being written by another process ({holder or 'unknown'}); close it, or give this one "
            "its own partition or folder"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)
    return fd
