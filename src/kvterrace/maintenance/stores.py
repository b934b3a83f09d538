"""The folders of a store at rest, all its drives together, with its partitions locked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvterrace.errors import ConfigError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.observe.folder import StoreFolder, writer_pid
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.drives import Candidate, check_apart, drives_locked, plan_drives, settled
from kvterrace.tiers.marker import read_marker

__all__ = ["LockedStore", "Place", "locked_store"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a partition on one drive. `label`: what it is called in a report."""

    folder: StoreFolder
    path: Path
    label: str

    @property
    def store_uuid(self) -> bytes:
        """That of the drive's folder."""
        assert self.folder.marker.store_uuid is not None, "not a usable store"
        return self.folder.marker.store_uuid


@dataclass(frozen=True, slots=True)
class LockedStore:
    """`folders`: its drives, in order. `partitions`: those that are locked, by name, each on the drives that have it.
    `whole`: whether these are all partitions.
    """

    folders: tuple[StoreFolder, ...]
    partitions: dict[str, list[Place]]
    whole: bool

    def label(self, path: Path) -> str:
        """What a file of the store is called in a report: its path in the store's folder, or, of several drives, all of
        it.
        """
        return str(path.relative_to(self.folders[0].root) if len(self.folders) == 1 else path)


@contextlib.contextmanager
def locked_store(roots: Sequence[Path], partition: str | None) -> Iterator[LockedStore]:
    """The store with the drives `roots`, in any order, while no process can write `partition` (None: any of them).

    Raises:
        ConfigError: no folder, one twice, no such partition. StoreUnusableError: or one of its kinds: no store, not all
            of one, one that is being written.
    """
    if not roots:
        raise ConfigError("give the folder of a store; of a store over several drives, the folder on each")
    check_apart(roots)
    for root in roots:  # nothing is locked that is no store
        StoreFolder(root)
    with contextlib.ExitStack() as held:
        with drives_locked(roots):
            store = _store(_in_order([StoreFolder(root) for root in roots]), partition)
            for places in store.partitions.values():
                for place in places:
                    held.enter_context(_locked(place))
        yield store


def _in_order(folders: Sequence[StoreFolder]) -> tuple[StoreFolder, ...]:
    """The drives of one store, all of them, in their order."""
    given: list[Candidate] = []
    for folder in folders:
        if folder.marker.problem or folder.marker.store_uuid is None:
            raise NotAStoreError(
                f"{folder.root} is not a usable store: {folder.marker.problem}; restore store.json first"
            )
        given.append(Candidate(folder.root, read_marker(folder.root), there=True))
    given = settled(given)
    plan = plan_drives(given)
    if plan.stale:
        raise StoreUnusableError(
            f"{plan.stale[0].root} was away when the store was last used: no block on it is used any more, and its "
            "segments are removed, not overwritten, when the store is opened with it; leave it out, and overwrite that "
            "drive as a whole; nothing was changed"
        )
    if plan.missing:
        drives = [one.drive for one in plan.order if one.drive is not None]
        there = {one.index for one in drives}
        missing = [str(index) for index in range(drives[0].count) if index not in there]
        names = f"drive {missing[0]} is" if len(missing) == 1 else f"drives {', '.join(missing)} are"
        raise StoreUnusableError(
            f"{plan.order[0].root} is drive {drives[0].index} of a store over {drives[0].count} drives, and {names} "
            "missing: a chain may lie on several, so give the folders of all (store.json says which is which); one "
            "that is lost for good is given up by opening the store without it; nothing was changed"
        )
    return tuple(folders[given.index(one)] for one in plan.order)


def _store(folders: tuple[StoreFolder, ...], name: str | None) -> LockedStore:
    found: dict[str, list[Place]] = {}
    for folder in folders:
        for path in folder.partitions():
            if _NAME.fullmatch(path.name):
                label = path.name if len(folders) == 1 else str(path)
                found.setdefault(path.name, []).append(Place(folder, path, label))
    there = dict(sorted(found.items()))
    if name is None:
        return LockedStore(folders, there, whole=True)
    if name not in there:
        known = ", ".join(there) or "none"
        raise ConfigError(f"partition {name!r} is not in {folders[0].root}; there are: {known}")
    return LockedStore(folders, {name: there[name]}, whole=len(there) == 1)


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    try:
        directory = StoreDirectory.open(place.folder.root, place.path.name, created_unix_s=0.0)
    except StoreLockedError as error:
        pid = writer_pid(place.path)
        who = f"process {pid}" if pid is not None else "another process"
        raise StoreLockedError(
            f"{place.path} is being written by {who}: close the store there, or end that process, then purge again; "
            "nothing was changed"
        ) from error
    try:
        yield
    finally:
        directory.close()
