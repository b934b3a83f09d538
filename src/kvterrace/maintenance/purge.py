"""`purge_store`: blocks of a namespace, a tenant or a sequence leave a store at rest, and their bytes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvterrace.errors import StoreUnusableError
from kvterrace.format.record import PAGE_NBYTES, RecordKind
from kvterrace.keys import Namespace
from kvterrace.maintenance.census import FoundSegment, take_census
from kvterrace.maintenance.drive import Drive
from kvterrace.maintenance.logs import read_logs, zero_lines
from kvterrace.maintenance.partition import Partition
from kvterrace.maintenance.pending import read_pending, remove_pending, write_pending
from kvterrace.maintenance.report import Failure, PartitionPurge, PurgeReport
from kvterrace.maintenance.rewriting import Pass
from kvterrace.maintenance.selection import ByTenant, Selection, Target, select
from kvterrace.maintenance.stores import LockedStore, Place, locked_store
from kvterrace.observe.folder import ERASED_SUFFIX

__all__ = ["purge_store"]

#: Told (what is being done, bytes done, bytes in all).
Listener = Callable[[str, int, int], object]

#: A pass may leave a tombstone that nothing needs once the pass is over; a third finds nothing. More is a bug.
_PASSES = 5

#: Segments of one partition, by drive.
_Found = dict[Place, list[FoundSegment]]


def purge_store(
    path: Path | Sequence[Path],
    target: Target,
    *,
    partition: str | None = None,
    dry_run: bool = False,
    on_progress: Listener = lambda _what, _done, _total: None,
) -> PurgeReport:
    """Remove `target` from the store at `path`. Blocks; no process may write the store. Memory grows with the index,
    not with the data.

    May be interrupted at any point, by a crash too: no block that stays is lost, and the next purge, of whatever
    target, completes what was begun.

    Args:
        path: folder of the store; of a store over several drives, the folder on each, in any order.
        partition: only this one; None: all of them.
        dry_run: change nothing, and report what would go.

    Raises:
        ConfigError: no such partition, or the target fits nothing or too much.
        StoreUnusableError: or one of its kinds: no store, not all its drives, no access, another process writes a
            partition. Nothing was changed then. OSError: a folder cannot be read.
    """
    report = PurgeReport()
    with locked_store([path] if isinstance(path, Path) else list(path), partition) as store, Drive() as drive:
        _Purge(store, target, report, drive, on_progress).run(dry_run=dry_run)
    return report


class _Purge:
    """One purge, with the partitions locked."""

    def __init__(
        self, store: LockedStore, target: Target, report: PurgeReport, drive: Drive, on_progress: Listener
    ) -> None:
        self._store, self._target = store, target
        self._roots = [folder.root for folder in store.folders]
        self._paths = {place.path for places in store.partitions.values() for place in places}
        self._report, self._drive, self._on_progress = report, drive, on_progress

    def run(self, *, dry_run: bool) -> None:
        """Look, and unless this is a dry run, change."""
        report = self._report
        described = self._described()
        pending = {root: read_pending(root) for root in self._roots}
        unfinished = set().union(*pending.values())
        blocked = set() if dry_run else self._finish_earlier()
        found = {name: self._census(places) for name, places in self._store.partitions.items()}
        everything = [one for each in found.values() for some in each.values() for one in some]
        selection = select(self._target, everything, described, unfinished)
        report.digests = sorted(selection.digests)
        report.notes += [
            f"{self._store.label(path)} is not a file of the store: left alone; it may hold KV"
            for folder in self._store.folders
            for path in folder.strangers()
            if folder.root / "partitions" in path.parents
        ]
        if isinstance(self._target, ByTenant):
            report.undescribed = _undescribed(everything, described)
        keys = _keys(everything, selection)
        if dry_run:
            self._count(found, selection, keys)
            return
        self._write_down(selection.pending, pending)
        for name, segments in found.items():
            self._purge(name, segments, selection, keys, blocked)
        if report.failures:
            return
        try:
            self._forget_namespaces(selection)
            if not unfinished or self._store.whole:
                for root in self._roots:
                    remove_pending(root, self._drive)
        except OSError as error:
            where = Path(error.filename).name if error.filename else str(self._roots[0])
            report.failures.append(Failure(where, f"{error.strerror or error}: purge again when that is mended"))

    def _described(self) -> dict[bytes, Namespace | str]:
        """Descriptions from all drives; of several, one that can be believed."""
        found: dict[bytes, Namespace | str] = {}
        for folder in self._store.folders:
            for digest, one in folder.namespaces().items():
                if not isinstance(found.get(digest), Namespace):
                    found[digest] = one
        return found

    def _count(self, found: Mapping[str, _Found], selection: Selection, keys: set[bytes]) -> None:
        """Report what would go."""
        report = self._report
        for name, segments in found.items():
            done = PartitionPurge(name)
            report.partitions.append(done)
            for one in self._passes(segments, selection, done).values():
                report.failures += one.failures()
                one.count()
            for place in segments:
                self._forget_failed(place, keys, done, dry_run=True)
        report.notes += [
            f"{path}: left by an interrupted purge"
            for folder in self._store.folders
            for path in folder.unfinished_purges()
        ]

    def _write_down(self, blocks: set[bytes], before: Mapping[Path, set[bytes]]) -> None:
        """Have `purge.pending` name `blocks`, on every drive or on none: a drive may be the only one left."""
        written: list[Path] = []
        for root, there in before.items():
            if not blocks - there:
                continue
            try:
                write_pending(root, self._drive, blocks)
            except OSError as error:
                for earlier in (*written, root):
                    with contextlib.suppress(OSError):
                        if before[earlier]:
                            write_pending(earlier, self._drive, before[earlier])
                        else:
                            remove_pending(earlier, self._drive)
                raise StoreUnusableError(
                    f"{root}: cannot write down what has to go: {error.strerror or error}; free about "
                    f"{130 * len(blocks) + PAGE_NBYTES} B there; nothing was changed"
                ) from error
            written.append(root)

    def _finish_earlier(self) -> set[Path]:
        """Overwrite what an interrupted purge has taken out of use; returns the partitions where that failed."""
        blocked = set()
        for folder in self._store.folders:
            for path in folder.unfinished_purges():
                unlocked = path.is_relative_to(folder.root / "partitions") and path.parent not in self._paths
                if path.suffix != ERASED_SUFFIX or unlocked:
                    continue
                where = self._store.label(path)
                try:
                    self._drive.erase(path)
                    self._report.finished.append(where)
                except OSError as error:
                    blocked.add(path.parent)
                    what = f"cannot be overwritten: {error.strerror or error}: purge again when that is mended"
                    self._report.failures.append(Failure(where, what))
        return blocked

    def _census(self, places: Iterable[Place]) -> _Found:
        return {place: self._look(place) for place in places}

    def _look(self, place: Place) -> list[FoundSegment]:
        total = sum(one.nbytes for one in place.folder.segments(place.path))
        read = 0

        def on_read(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            self._on_progress(f"looking at {place.label}", min(read, total), total)

        return take_census(place.folder, place.path, on_read)

    def _passes(self, found: _Found, selection: Selection, done: PartitionPurge) -> dict[Place, Pass]:
        """A pass for each drive, over what is known of all of them."""
        partition = Partition([one for some in found.values() for one in some], selection)
        return {place: self._pass(place, some, partition, selection, done) for place, some in found.items()}

    def _pass(
        self, place: Place, found: list[FoundSegment], partition: Partition, selection: Selection, done: PartitionPurge
    ) -> Pass:
        total = written = 0

        def on_done(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self._on_progress(f"purging {place.label}", written, total)

        one = Pass(place, found, partition, selection, report=self._report, done=done, on_done=on_done)
        total = one.touched_nbytes
        return one

    def _purge(self, name: str, found: _Found, selection: Selection, keys: set[bytes], blocked: set[Path]) -> None:
        """Pass after pass, each over what is really there, until one finds nothing to do."""
        done = PartitionPurge(name)
        self._report.partitions.append(done)
        for place in found:
            self._forget_failed(place, keys, done)
        earlier = list(self._report.failures)
        for _ in range(_PASSES):
            self._report.failures = list(earlier)
            passes = self._passes(found, selection, done)
            for one in passes.values():
                self._report.failures += one.failures()
            if not self._sync_scanned(found):
                return
            if not sum(one.run(self._drive) for place, one in passes.items() if place.path not in blocked):
                return
            found = self._census(found)
        self._report.failures.append(Failure(name, "something is left after all passes: a bug; purge again"))

    def _sync_scanned(self, found: _Found) -> bool:
        """Make unsealed segments durable, on all drives: a copy in them, or what was put later than it, may be in the
        drive's cache only, while an original is about to go. Where one cannot be, none of the originals goes.
        """
        for place, segments in found.items():
            for one in segments:
                if one.unsealed:
                    try:
                        self._drive.sync_file(one.file.path)
                    except OSError as error:
                        what = f"{error.strerror or error}: purge again when that is mended"
                        self._report.failures.append(Failure(f"{place.label}/{one.file.path.name}", what))
                        return False
        return True

    def _forget_failed(self, place: Place, keys: set[bytes], done: PartitionPurge, *, dry_run: bool = False) -> None:
        """Zero the lines of the quarantine logs that name one of `keys`."""
        try:
            for log in read_logs(place.path, place.store_uuid, keys):
                if log.newer:
                    what = f"{log.newer} lines are a newer version's and may name purged blocks: upgrade kvterrace"
                    self._report.failures.append(Failure(f"{place.label}/{log.path.name}", what))
                if log.lines and not dry_run:
                    zero_lines(log, self._drive)
                done.quarantine_entries += len(log.lines)
        except OSError as error:
            self._report.failures.append(Failure(place.label, f"quarantine log: {error.strerror or error}"))

    def _forget_namespaces(self, selection: Selection) -> None:
        """Remove the descriptions of purged namespaces of which no record is left in the whole store."""
        left: set[bytes] = set()
        for folder in self._store.folders:
            for path in folder.partitions():
                if path in self._paths:
                    continue  # a pass has just found none in it
                segments = take_census(folder, path)
                if any(one.unknown_why for one in segments):
                    return
                left |= {digest for one in segments if one.contents for digest in one.contents.namespaces}
                left |= {stray.header.namespace for one in segments for stray in one.strays}
        for digest in sorted(selection.digests - left):
            name = f"{digest.hex()}.json"
            removed = False
            for root in self._roots:
                for path in sorted((root / "namespaces").glob(f".{name}.*")):  # half-written
                    self._drive.erase(path)
                if (root / "namespaces" / name).is_file():
                    self._drive.erase(self._drive.retire(root / "namespaces" / name))
                    removed = True
            if removed:
                self._report.descriptions.append(digest)


def _keys(found: list[FoundSegment], selection: Selection) -> set[bytes]:
    """Keys of all blocks that have to go."""
    keys = {name[32:] for name in selection.keys}
    for one in found:
        keys |= {stray.header.key for stray in one.strays if selection.holds(stray.header)}
        keys |= {dropped.key for dropped in one.dropped if selection.names(dropped.namespace, dropped.key)}
        if one.contents is not None:
            rows = selection.rows(one.contents.entries, one.contents.namespaces)
            keys |= {row["key"].tobytes() for row in one.contents.entries[rows]}
    return keys


def _undescribed(
    found: Iterable[FoundSegment], described: Mapping[bytes, Namespace | str]
) -> dict[bytes, tuple[int, int]]:
    """Block records and their bytes by namespace, of those without a description to believe."""
    counts: dict[bytes, tuple[int, int]] = {}

    def add(digest: bytes, records: int, nbytes: int) -> None:
        if records and not isinstance(described.get(digest), Namespace):
            before = counts.get(digest, (0, 0))
            counts[digest] = (before[0] + records, before[1] + nbytes)

    for one in found:
        for stray in one.strays:
            if stray.header.kind is RecordKind.BLOCK:
                add(stray.header.namespace, 1, stray.header.record_nbytes)
        if one.contents is not None:
            entries = one.contents.entries[one.contents.entries["kind"] == RecordKind.BLOCK]
            for number, digest in enumerate(one.contents.namespaces):
                rows = entries[entries["namespace"] == number]
                add(digest, len(rows), int(rows["record_nbytes"].sum()))
    return counts
