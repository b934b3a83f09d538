"""`store.json`: what a folder is, in which format, and, if its store has several drives, which of them it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from kvterrace.errors import FormatVersionError, NotAStoreError
from kvterrace.format.record import FORMAT_VERSION

__all__ = [
    "DriveRecord",
    "Marker",
    "make_marker",
    "may_become_store",
    "parse_drive",
    "propose_drives",
    "read_marker",
    "sync_folder",
    "write_drives",
    "write_whole",
]

_NAME = "store.json"
_MOST_NBYTES = 64 << 10
#: As many as a store is opened with, or more.
_MOST_DRIVES = 127
#: What may lie in a folder that becomes a store: half-made files of one that was being made.
_HALF_MADE = re.compile(r"lost\+found|\.store\.json\.\d+")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """Which drive of a store this is.

    Attributes:
        set_id: of the store; all its drives have it.
        generation: how often the drives of the store have changed.
        change_id: random, new with each generation: two that were made apart differ in it.
        index: place among the drives of this generation; count: how many there are.
    """

    set_id: str
    generation: int
    change_id: str
    index: int
    count: int

    @property
    def change(self) -> tuple[str, int, str]:
        """The change of the drives that it was written for; the same on all drives that took part in it."""
        return self.set_id, self.generation, self.change_id

    def to_json(self) -> dict[str, object]:
        """As it stands in `store.json`."""
        return {
            "set": self.set_id,
            "generation": self.generation,
            "change": self.change_id,
            "index": self.index,
            "count": self.count,
        }


@dataclass(frozen=True, slots=True)
class Marker:
    """What `store.json` says. `drive` is None where the store has one drive, and never had more. `proposed`: what it is
    to say next, if that came to be on any drive.
    """

    store_uuid: bytes
    drive: DriveRecord | None
    proposed: DriveRecord | None = None


def read_marker(root: Path) -> Marker | None:
    """What `store.json` of `root` says; None if there is none. Blocks.

    Raises:
        NotAStoreError: it is damaged. FormatVersionError: a newer version wrote it. OSError.
    """
    found = _read(root)
    if found is None:
        return None
    try:
        drives = found.get("drives")
        store_uuid = uuid.UUID(hex=str(found["uuid"])).bytes
        if drives is None:
            return Marker(store_uuid, None)
        return Marker(store_uuid, parse_drive(drives), _parse_proposed(drives))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(root, error) from error


def may_become_store(root: Path) -> bool:
    """Whether nothing lies in the folder `root` that stands in the way of a new store. Raises OSError."""
    return all(_HALF_MADE.fullmatch(entry.name) for entry in root.iterdir())


def make_marker(root: Path, created_unix_s: float, drive: DriveRecord | None = None) -> None:
    """Write `store.json` of a new store; the first of two writers wins. Raises OSError."""
    made: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "uuid": uuid.uuid4().hex,
        "created_unix_s": round(created_unix_s, 3),
    }
    if drive is not None:
        made["drives"] = drive.to_json()
    write_whole(root / _NAME, made)


def write_drives(root: Path, drive: DriveRecord) -> None:
    """Put `drive` into `store.json` of `root`, in the place of what it said of drives before. Raises OSError."""
    found = _read(root)
    assert found is not None, "a drive without a store"
    write_whole(root / _NAME, {**found, "drives": drive.to_json()}, replace=True)


def propose_drives(root: Path, drive: DriveRecord) -> None:
    """Write `drive` beside what `store.json` of `root` says of drives, to be put in its place once all drives have
    theirs. Raises OSError.
    """
    found = _read(root)
    assert found is not None, "a drive without a store"
    now = found["drives"]
    assert isinstance(now, dict), "no drive of a set"
    # within `drives`: a version that does not know of it drops it when it writes its own
    write_whole(root / _NAME, {**found, "drives": {**now, "next": drive.to_json()}}, replace=True)


def write_whole(path: Path, content: dict[str, object], *, replace: bool = False) -> None:
    """Write a small file so that it is there whole or not at all. The first of two writers wins, unless it is to
    `replace` what is there.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write((json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(fd)
        if replace:
            temporary.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make creations, removals and renames in a folder durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(root: Path) -> dict[str, object] | None:
    marker = root / _NAME
    try:
        fd = os.open(marker, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting for a pipe's other end
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        text = file.read(_MOST_NBYTES + 1) if regular else b""
    try:
        if not regular or len(text) > _MOST_NBYTES:
            raise ValueError("longer than 64 KiB" if regular else "not a regular file")
        found = json.loads(text)
        version = found["format_version"]
        if not isinstance(found, dict) or type(version) is not int or version < 1:
            raise ValueError(f"format version {version!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(root, error) from error
    if version > FORMAT_VERSION:  # it may say the rest in another way
        raise FormatVersionError(
            f"{root} was written in store format {version}; this kvterrace reads up to {FORMAT_VERSION}: upgrade it, "
            "or give another folder"
        )
    return found


def parse_drive(found: object) -> DriveRecord:
    """A drive from JSON, as `to_json` makes it. Raises ValueError, KeyError, TypeError."""
    if not isinstance(found, dict):
        raise TypeError(f"drives: {found!r}")
    record = DriveRecord(found["set"], found["generation"], found["change"], found["index"], found["count"])
    numbers = (record.generation, record.index, record.count)
    if not all(_ID.fullmatch(one) for one in (record.set_id, record.change_id)):
        raise ValueError(f"drives: {found!r}")
    if not all(type(one) is int for one in numbers) or not 0 <= record.index < record.count or record.generation < 1:
        raise ValueError(f"drives: {found!r}")
    if record.count > _MOST_DRIVES:
        raise ValueError(f"drives: {found!r}")
    return record


def _parse_proposed(drives: object) -> DriveRecord | None:
    assert isinstance(drives, dict), "parsed before"
    try:
        return parse_drive(drives["next"])
    except (ValueError, KeyError, TypeError):
        return None  # nothing that can be believed, and never agreed on


def _damaged(root: Path, error: Exception) -> NotAStoreError:
    reason = " ".join(str(error).split())
    return NotAStoreError(f"{root / _NAME} is damaged ({reason}); restore it, or remove the folder to start anew")
