"""The drives of one store: which of the paths given are which, and what of them may be believed.

Each drive has a folder of its own with a `store.json` that says which drive of which set it is. Whenever the drives
given are not exactly those of last time, the generation is raised on all that are present. A drive that has another
generation than they was away: what was invalidated meanwhile may still lie on it as valid, and its put-sequence numbers
may have been given again. So its segments are removed before it is used.

An open may end at any write. So the new record is first written beside the present one on all drives, and takes its
place only then: a drive that still has it beside the present one, where another has it in place, was not away.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvterrace.errors import ConfigError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.tiers.directory import PartitionLock, StoreDirectory, make_root
from kvterrace.tiers.marker import (
    DriveRecord,
    Marker,
    may_become_store,
    propose_drives,
    read_marker,
    sync_folder,
    write_drives,
)

__all__ = ["Candidate", "Plan", "check_apart", "drives_locked", "open_drives", "plan_drives", "settled"]

_log = logging.getLogger(__name__)

_SEGMENT = re.compile(r"[0-9a-f]{8}\.seg")
#: How long another process is waited for that opens drives of the same store.
_LOCK_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path given: `marker` is None where no store is. `there`: whether its folder exists."""

    root: Path
    marker: Marker | None
    there: bool

    @property
    def drive(self) -> DriveRecord | None:
        return None if self.marker is None else self.marker.drive

    @property
    def proposed(self) -> DriveRecord | None:
        return None if self.marker is None else self.marker.proposed


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the paths given.

    Attributes:
        order: all of them, in the order in which they are the drives from now on.
        stale: those of which no segment may be believed.
        new: those that become drives of the store now.
        missing: drives of the store that are not among them.
        records: what each has to say from now on, in order; empty if they say so already.
    """

    order: tuple[Candidate, ...]
    stale: tuple[Candidate, ...]
    new: tuple[Candidate, ...]
    missing: int
    records: tuple[DriveRecord, ...]


def open_drives(roots: Sequence[Path], partition: str, *, created_unix_s: float) -> list[StoreDirectory]:
    """Open or make a store over the drives with the folders `roots`, and lock its partition on each. Blocks on the file
    systems. In the order of the drives.

    Raises:
        ConfigError: a path is given twice, or lies in another; or as `StoreDirectory.open`.
        StoreUnusableError: or one of its kinds. Nothing was changed but folders made.
    """
    check_apart(roots)
    if len(roots) == 1 and _look(roots[0]).drive is None:
        return [StoreDirectory.open(roots[0], partition, created_unix_s=created_unix_s)]
    if not any(_look(root).there for root in roots):
        for root in roots:
            with _named(root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with drives_locked(roots):
        plan = plan_drives(_completed([_look(root) for root in roots]))
        directories: dict[Candidate, StoreDirectory] = {}
        try:
            for one in plan.order:
                if one.marker is not None:
                    directories[one] = _open(one.root, partition, created_unix_s)
            for one in plan.new:
                with _named(one.root):
                    _probe(one.root)
            with contextlib.ExitStack() as held:
                for one in plan.stale:
                    held.enter_context(_other_partitions_locked(one.root, partition))
                _warn(plan)
                _propose(plan, plan.stale, wanted=False)
                for one in plan.stale:
                    with _named(one.root):
                        _remove_segments(one.root)
                _propose(plan, plan.stale, wanted=True)  # now that there is room on them
                _record(plan, created_unix_s)
            for one in plan.new:
                directories[one] = _open(one.root, partition, created_unix_s)
        except BaseException:
            for directory in directories.values():
                directory.close()
            raise
        return [directories[one] for one in plan.order]


def settled(given: Sequence[Candidate]) -> list[Candidate]:
    """Those given, each with the record that it was to get in place if another drive has that in place. Pure."""
    present = {_change(one.drive) for one in given if one.drive is not None}
    return [
        replace(one, marker=replace(one.marker, drive=one.proposed, proposed=None))
        if one.marker is not None
        and one.proposed is not None
        and _change(one.proposed) in present - {_change(one.drive)}
        else one
        for one in given
    ]


def _change(drive: DriveRecord | None) -> tuple[str, int, str] | None:
    return None if drive is None else drive.change


def _completed(given: Sequence[Candidate]) -> list[Candidate]:
    """`settled`, on the drives as well: an earlier open ended between two of them."""
    done = settled(given)
    for was, one in zip(given, done, strict=True):
        if was is not one and one.drive is not None:
            with _named(one.root):
                write_drives(one.root, one.drive)
    return done


def plan_drives(given: Sequence[Candidate]) -> Plan:
    """What to make of the paths given. Pure.

    Raises:
        StoreUnusableError: they do not go together.
    """
    members = [one for one in given if one.drive is not None]
    alone = [one for one in given if one.marker is not None and one.drive is None]
    new = tuple(one for one in given if one.marker is None)
    _check_one_store(members, alone)
    current = _current(members)
    stale = tuple(one for one in members if one not in current)
    missing = _drive_of(current[0]).count - len(current) if current else 0
    gone = [one for one in new if not one.there]
    if missing and gone:
        raise StoreUnusableError(
            f"{gone[0].root} does not exist, and a drive of this store is missing: if it should be mounted there, it is"
            " not; leave it out of the list to go on without it, or make the folder to use it as a new drive"
        )
    order = (*current, *stale, *alone, *new)
    if current and not (missing or stale or new):
        return Plan(order, stale, new, missing, ())
    first = _drive_of(current[0]) if current else None
    set_id = first.set_id if first is not None else uuid.uuid4().hex
    generation = first.generation + 1 if first is not None else 1
    change_id = uuid.uuid4().hex
    records = tuple(DriveRecord(set_id, generation, change_id, at, len(order)) for at in range(len(order)))
    return Plan(order, stale, new, missing, records)


def _check_one_store(members: Sequence[Candidate], alone: Sequence[Candidate]) -> None:
    sets = [_drive_of(one).set_id for one in members]
    for one, set_id in zip(members, sets, strict=True):
        if set_id != sets[0]:
            raise StoreUnusableError(
                f"{one.root} is a drive of another store than {members[0].root}; leave one of them out, or remove the "
                "folder of the one that is to be used anew"
            )
    stores = [*members[:1], *alone]
    if len(stores) > 1:
        raise StoreUnusableError(
            f"{stores[1].root} is a store of its own, not a drive of that of {stores[0].root}; leave it out, or remove "
            "the folder to use it anew"
        )


def _current(members: Sequence[Candidate]) -> list[Candidate]:
    """The drives that know of each other's last changes: the newest generation; of several that were made apart, the
    one with most drives, then the one given first. In order.
    """
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for one in members:
        drive = _drive_of(one)
        groups.setdefault((drive.generation, drive.change_id), []).append(one)
    if not groups:
        return []
    newest = max(generation for generation, _ in groups)
    _, best = max(groups.items(), key=lambda item: (item[0][0] == newest, len(item[1])))
    best.sort(key=lambda one: _drive_of(one).index)
    for one, other in itertools.pairwise(best):
        if _drive_of(one).index == _drive_of(other).index:
            raise StoreUnusableError(
                f"{other.root} is a copy of {one.root}, or the reverse; leave one of them out of the list, or remove "
                "the folder of the one that is to be used anew"
            )
    return best


def _drive_of(one: Candidate) -> DriveRecord:
    assert one.drive is not None, "no drive of a set"
    return one.drive


def _warn(plan: Plan) -> None:
    """Say once what is not as it was."""
    said = []
    if plan.missing:
        said.append(f"{plan.missing} of its drives missing, whose blocks are lost to it even if they come back")
    if plan.stale:
        said.append(f"{_names(plan.stale)} was away while the store was used without it: its segments are removed")
    if plan.new and len(plan.new) < len(plan.order):
        said.append(f"{_names(plan.new)} is a new drive (if one should be mounted there that is not new, it is not)")
    if said:
        _log.warning("store with the drives %s: %s", _names(plan.order), "; ".join(said))


def _names(some: Sequence[Candidate]) -> str:
    return ", ".join(str(one.root) for one in some)


def _propose(plan: Plan, stale: Sequence[Candidate], *, wanted: bool) -> None:
    """Write the records beside those that the drives have, on the `stale` ones if `wanted`, else on the others. One
    drive by itself needs no agreement.
    """
    if sum(one.drive is not None for one in plan.order) < 2:
        return
    for one, record in zip(plan.order, plan.records, strict=False):
        if one.drive is not None and (one in stale) == wanted:
            with _named(one.root):
                propose_drives(one.root, record)


def _record(plan: Plan, created_unix_s: float) -> None:
    """Write the records. New drives are last in order: what they belong to names them first."""
    for one, record in zip(plan.order, plan.records, strict=False):
        with _named(one.root):
            if one.marker is None:
                make_root(one.root, created_unix_s, record)
            else:
                write_drives(one.root, record)


def _look(root: Path) -> Candidate:
    with _named(root):
        if root.exists() and not root.is_dir():
            raise NotAStoreError(f"{root} is not a folder; give a folder for the store")
        return Candidate(root, read_marker(root), root.exists())


def _probe(root: Path) -> None:
    """Make sure, as far as can be, that a drive can be made in `root`. Raises NotAStoreError, OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not may_become_store(root):
        raise NotAStoreError(f"{root} holds other files and no store.json; give an empty or a new folder")
    trial = root / ".store.json.0"
    trial.touch(mode=0o600)
    trial.unlink()


def _remove_segments(root: Path) -> None:
    for partition in _partitions(root):
        for entry in list(partition.iterdir()):
            if _SEGMENT.fullmatch(entry.name):
                entry.unlink()
        sync_folder(partition)


def _partitions(root: Path) -> list[Path]:
    folder = root / "partitions"
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _open(root: Path, partition: str, created_unix_s: float) -> StoreDirectory:
    try:
        return StoreDirectory.open(root, partition, created_unix_s=created_unix_s)
    except StoreUnusableError as error:
        if type(error) is not StoreUnusableError:  # its kinds say what to do
            raise
        raise StoreUnusableError(f"{error}, or leave the drive out of the list to go on without it") from error


@contextlib.contextmanager
def _other_partitions_locked(root: Path, partition: str) -> Iterator[None]:
    """Hold all partitions of `root` but the one that is held already."""
    with contextlib.ExitStack() as held, _named(root):
        for folder in _partitions(root):
            if folder.name != partition:
                held.callback(PartitionLock(folder).release)
        yield


@contextlib.contextmanager
def drives_locked(roots: Sequence[Path]) -> Iterator[None]:
    """Keep other processes from opening, and changing, the same drives at this moment. Blocks, up to half a minute.

    Raises:
        StoreLockedError: another process is still at it. StoreUnusableError: a folder cannot be read.
    """
    with contextlib.ExitStack() as held:
        for root in sorted({root.resolve() for root in roots}):
            if root.is_dir():
                with _named(root):
                    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, fd)
                _wait_for(root, fd)
        yield


def _wait_for(root: Path, fd: int) -> None:
    limit_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= limit_s:
                raise StoreLockedError(f"{root} is being opened by another process; try again") from error
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def _named(root: Path) -> Iterator[None]:
    """A drive that cannot be used is named."""
    try:
        yield
    except OSError as error:
        raise StoreUnusableError(
            f"cannot use the drive {root}: {error.strerror or error}; leave it out of the list to go on without it"
        ) from error


def check_apart(roots: Sequence[Path]) -> None:
    """Raises ConfigError where a folder is given twice, or lies in another."""
    real = [Path(os.path.realpath(root)) for root in roots]
    for at, one in enumerate(real):
        for earlier, other in enumerate(real[:at]):
            if one == other or (one.exists() and other.exists() and one.samefile(other)):
                raise ConfigError(f"path: {roots[at]} and {roots[earlier]} are one folder; give each drive once")
            if one in other.parents or other in one.parents:
                raise ConfigError(
                    f"path: one of {roots[at]} and {roots[earlier]} lies in the other; give each drive a folder of "
                    "its own"
                )
