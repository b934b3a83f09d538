"""A store's folder as a tool sees it: read-only, without the lock, whatever its state. Nothing read is trusted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from kvterrace.errors import FormatVersionError, KVTerraceError, NotAStoreError, StoreUnusableError
from kvterrace.format.record import FORMAT_VERSION
from kvterrace.keys import Namespace
from kvterrace.layout import KVLayout
from kvterrace.tiers.marker import DriveRecord, parse_drive

__all__ = ["ERASED_SUFFIX", "PENDING_NAME", "Marker", "SegmentFile", "StoreFolder", "writer_pid"]

#: What `kvterrace purge` leaves where it is interrupted: files taken out of use by another name and not overwritten
#: yet; beside `store.json`, which blocks still have to go.
ERASED_SUFFIX = ".gone"
PENDING_NAME = "purge.pending"

_SEGMENT = re.compile(r"([0-9a-f]{8})\.seg")
_ERASED = re.compile(r"([0-9a-f]{8}\.seg|[0-9a-f]{64}\.json|purge\.pending)\.gone")
_DESCRIPTION = re.compile(r"([0-9a-f]{64})\.json")
#: What else a partition has, by docs/design.md: its lock, its write budget, and its log of failed places.
_BESIDE = re.compile(r"lock|budget|quarantine\.[0-9a-f]{8}\.log")
_MAX_JSON_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Marker:
    """What `store.json` says; `problem` is empty if all of it could be read. `drive`: which of several drives of its
    store this folder is, None if of one.
    """

    store_uuid: bytes | None = None
    format_version: int | None = None
    created_unix_s: float | None = None
    problem: str = ""
    drive: DriveRecord | None = None


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment's file as listed. `allocated_nbytes`: what it takes of the drive."""

    number: int
    path: Path
    nbytes: int
    allocated_nbytes: int


class StoreFolder:
    """The folder of a store that somebody else may be using."""

    def __init__(self, root: Path) -> None:
        """Look at `root`.

        Raises:
            NotAStoreError: there is none. FormatVersionError: a newer kvterrace wrote it. StoreUnusableError: no
                access.
        """
        self.root = root
        try:
            if not root.exists():
                raise NotAStoreError(f"{root} does not exist; give the folder of a store")
            if not root.is_dir():
                raise NotAStoreError(f"{root} is not a folder; give the folder of a store")
            self.marker = _read_marker(root / "store.json")
            if self.marker.problem and not (root / "partitions").is_dir():
                raise NotAStoreError(f"{root} is not a kvterrace store: {self.marker.problem}; give the folder of one")
            _entries(root)
        except OSError as error:
            raise StoreUnusableError(f"{root} cannot be read: {error.strerror or error}; check its rights") from error
        version = self.marker.format_version
        if version is not None and version > FORMAT_VERSION:
            raise FormatVersionError(
                f"{root} was written in store format {version}; this kvterrace reads up to {FORMAT_VERSION}: upgrade it"
            )

    def namespaces(self) -> dict[bytes, Namespace | str]:
        """Described namespaces by digest; a text where the description cannot be believed."""
        found: dict[bytes, Namespace | str] = {}
        for entry in _entries(self.root / "namespaces"):
            match = _DESCRIPTION.fullmatch(entry.name)
            if match is not None:
                digest = bytes.fromhex(match[1])
                found[digest] = _read_namespace(Path(entry.path), digest)
        return found

    def partitions(self) -> list[Path]:
        """Folders of the partitions, by name."""
        return [Path(entry.path) for entry in _entries(self.root / "partitions") if entry.is_dir(follow_symlinks=False)]

    def segments(self, partition: Path) -> list[SegmentFile]:
        """Segment files of a partition, by number. Raises OSError where the folder cannot be read."""
        found = []
        with os.scandir(partition) as entries:
            for entry in entries:
                match = _SEGMENT.fullmatch(entry.name)
                if match is None:
                    continue
                with contextlib.suppress(FileNotFoundError):  # unlinked since: a writer reclaims
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(
                            SegmentFile(int(match[1], 16), Path(entry.path), info.st_size, info.st_blocks * 512)
                        )
        return sorted(found, key=lambda one: one.number)

    def unfinished_purges(self) -> list[Path]:
        """What an interrupted purge has left. `kvterrace purge` finishes it."""
        found = [self.root / PENDING_NAME] if (self.root / PENDING_NAME).is_file() else []
        for folder in (self.root, self.root / "namespaces", *self.partitions()):
            with contextlib.suppress(OSError):
                found += [Path(one.path) for one in _entries(folder) if _is_file(one, _ERASED)]
        return found

    def strangers(self) -> list[Path]:
        """What lies in the folder and is none of a store's files: half-written ones, other people's."""
        found = [entry for entry in _entries(self.root) if not (entry.name in _KNOWN or _is_file(entry, _ERASED))]
        found += [
            entry
            for entry in _entries(self.root / "namespaces")
            if not (_is_file(entry, _DESCRIPTION) or _is_file(entry, _ERASED))
        ]
        for entry in _entries(self.root / "partitions"):
            if not entry.is_dir(follow_symlinks=False):
                found.append(entry)
                continue
            with contextlib.suppress(OSError):  # `segments` says so
                inside = _entries(Path(entry.path))
                found += [one for one in inside if not any(_is_file(one, name) for name in _OURS)]
        return [Path(entry.path) for entry in found]


_KNOWN = ("store.json", "namespaces", "partitions", "lost+found", PENDING_NAME)
_OURS = (_SEGMENT, _BESIDE, _ERASED)


def writer_pid(partition: Path) -> int | None:
    """Process that holds the lock of `partition`, by /proc; None if none does, or none that this process can see.

    Takes no lock itself: a tool that did, even for a moment, could make a store's opening fail.
    """
    lock = partition / "lock"
    try:
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            # "1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> ..."; device numbers differ on btrfs and overlays
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return int(words[4])
        pid = int(_read_small(lock).split()[-1])
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if each.stat().st_ino == inode and each.samefile(lock):
                    return pid
    except (OSError, ValueError, IndexError):
        return None
    return None


def _is_file(entry: os.DirEntry[str], name: re.Pattern[str]) -> bool:
    return name.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_small(path: Path) -> str:
    """Text of a small regular file. Raises OSError; ValueError if it is no text, or too long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:  # noqa: PTH123 - by descriptor: opened without waiting for a pipe's other end
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        data = file.read(_MAX_JSON_NBYTES + 1)
    if len(data) > _MAX_JSON_NBYTES:
        raise ValueError(f"longer than {_MAX_JSON_NBYTES} B")
    return data.decode()


def _read_marker(path: Path) -> Marker:
    try:
        found = json.loads(_read_small(path))
    except FileNotFoundError:
        return Marker(problem="store.json is missing")
    except (ValueError, RecursionError) as error:
        return Marker(problem=f"store.json is damaged: {error}")
    try:
        version = found["format_version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"format version {version!r}")
        if version > FORMAT_VERSION:  # it may say the rest in another way
            return Marker(format_version=version)
        created = found.get("created_unix_s")
        created_unix_s = float(created) if isinstance(created, int | float) and abs(created) < 1e12 else None
        drives = found.get("drives")
        drive = None if drives is None else parse_drive(drives)
        return Marker(uuid.UUID(hex=found["uuid"]).bytes, version, created_unix_s, drive=drive)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return Marker(problem=f"store.json is damaged: {type(error).__name__}: {error}")


def _read_namespace(path: Path, digest: bytes) -> Namespace | str:
    try:
        found = json.loads(_read_small(path))
        namespace = Namespace(**{**found, "layout": KVLayout(**found["layout"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, KVTerraceError) as error:
        return f"cannot be read: {error}"
    if namespace.digest != digest:
        return f"describes another namespace, {namespace.digest.hex()}"
    return namespace
