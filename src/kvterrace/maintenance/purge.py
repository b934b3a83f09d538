"""`purge_store`: blocks of a namespace, a tenant or a sequence leave a store at rest, and their bytes with them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvterrace.errors import ConfigError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.format.record import PAGE_NBYTES, RecordKind, pad_to_page
from kvterrace.health.quarantine import ENTRY_NBYTES, BadBlock, decode, log_generation
from kvterrace.keys import Namespace
from kvterrace.maintenance.census import FoundSegment, take_census
from kvterrace.maintenance.drive import Drive, aligned
from kvterrace.maintenance.pending import read_pending, remove_pending, write_pending
from kvterrace.maintenance.report import Failure, PartitionPurge, PurgeReport
from kvterrace.maintenance.rewriting import Pass
from kvterrace.maintenance.selection import ByTenant, Selection, Target, select
from kvterrace.observe.folder import ERASED_SUFFIX, StoreFolder, writer_pid
from kvterrace.tiers.directory import StoreDirectory

__all__ = ["purge_store"]

#: Told (what is being done, bytes done, bytes in all).
Listener = Callable[[str, int, int], object]

#: A pass may leave a tombstone that nothing needs once the pass is over; a third finds nothing. More is a bug.
_PASSES = 5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def purge_store(
    root: Path,
    target: Target,
    *,
    partition: str | None = None,
    dry_run: bool = False,
    on_progress: Listener = lambda _what, _done, _total: None,
) -> PurgeReport:
    """Remove `target` from the store at `root`. Blocks; no process may write the store. Memory grows with the index,
    not with the data.

    May be interrupted at any point, by a crash too: no block that stays is lost, and the next purge, of whatever
    target, completes what was begun.

    Args:
        partition: only this one; None: all of them.
        dry_run: change nothing, and report what would go.

    Raises:
        ConfigError: no such partition, or the target fits nothing or too much.
        StoreUnusableError: or one of its kinds: no store, no access, another process writes a partition. Nothing was
            changed then. OSError: a folder cannot be read.
    """
    folder = StoreFolder(root)
    if folder.marker.problem or folder.marker.store_uuid is None:
        raise NotAStoreError(f"{root} is not a usable store: {folder.marker.problem}; restore store.json first")
    paths = _partitions(folder, partition)
    report = PurgeReport()
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(_locked(folder, path))
        drive = stack.enter_context(Drive())
        _Purge(folder, paths, target, report, drive, on_progress).run(dry_run=dry_run)
    return report


def _partitions(folder: StoreFolder, name: str | None) -> list[Path]:
    there = [path for path in folder.partitions() if _NAME.fullmatch(path.name)]
    if name is None:
        return there
    chosen = [path for path in there if path.name == name]
    if not chosen:
        known = ", ".join(path.name for path in there) or "none"
        raise ConfigError(f"partition {name!r} is not in {folder.root}; there are: {known}")
    return chosen


@contextlib.contextmanager
def _locked(folder: StoreFolder, path: Path) -> Iterator[None]:
    try:
        directory = StoreDirectory.open(folder.root, path.name, created_unix_s=0.0)
    except StoreLockedError as error:
        pid = writer_pid(path)
        who = f"process {pid}" if pid is not None else "another process"
        raise StoreLockedError(
            f"{path} is being written by {who}: close the store there, or end that process, then purge again; nothing "
            "was changed"
        ) from error
    try:
        yield
    finally:
        directory.close()


class _Purge:
    """One purge, with the partitions locked."""

    def __init__(
        self,
        folder: StoreFolder,
        paths: list[Path],
        target: Target,
        report: PurgeReport,
        drive: Drive,
        on_progress: Listener,
    ) -> None:
        assert folder.marker.store_uuid is not None
        self._folder, self._paths, self._target = folder, paths, target
        self._store_uuid = folder.marker.store_uuid
        self._report, self._drive, self._on_progress = report, drive, on_progress

    def run(self, *, dry_run: bool) -> None:
        """Look, and unless this is a dry run, change."""
        root, report = self._folder.root, self._report
        described = self._folder.namespaces()
        pending = read_pending(root)
        blocked = set() if dry_run else self._finish_earlier()
        found = {path: self._census(path) for path in self._paths}
        selection = select(self._target, [one for some in found.values() for one in some], described, pending)
        report.digests = sorted(selection.digests)
        report.notes += [
            f"{path.relative_to(root)} is not a file of the store: left alone; it may hold KV"
            for path in self._folder.strangers()
            if root / "partitions" in path.parents
        ]
        if isinstance(self._target, ByTenant):
            report.undescribed = _undescribed(found, described)
        if dry_run:
            for path, segments in found.items():
                done = PartitionPurge(path.name)
                one = self._pass(path, segments, selection, done)
                report.failures += one.failures()
                one.count()
                report.partitions.append(done)
            report.notes += [f"{path}: left by an interrupted purge" for path in self._folder.unfinished_purges()]
            return
        if selection.pending - pending:
            try:
                write_pending(root, self._drive, selection.pending)
            except OSError as error:
                raise StoreUnusableError(
                    f"{root}: cannot write down what has to go: {error.strerror or error}; free about "
                    f"{130 * len(selection.pending) + PAGE_NBYTES} B there; nothing was changed"
                ) from error
        for path, segments in found.items():
            if path not in blocked:
                self._partition(path, segments, selection)
        if report.failures:
            return
        try:
            self._forget_namespaces(selection)
            if not pending or len(self._paths) == len(_partitions(self._folder, None)):
                remove_pending(root, self._drive)
        except OSError as error:
            where = Path(error.filename).name if error.filename else str(root)
            report.failures.append(Failure(where, f"{error.strerror or error}: purge again when that is mended"))

    def _finish_earlier(self) -> set[Path]:
        """Overwrite what an interrupted purge has taken out of use; returns the partitions where that failed."""
        blocked = set()
        for path in self._folder.unfinished_purges():
            unlocked = path.is_relative_to(self._folder.root / "partitions") and path.parent not in self._paths
            if path.suffix != ERASED_SUFFIX or unlocked:
                continue
            where = str(path.relative_to(self._folder.root))
            try:
                self._drive.erase(path)
                self._report.finished.append(where)
            except OSError as error:
                blocked.add(path.parent)
                self._report.failures.append(
                    Failure(where, f"cannot be overwritten: {error.strerror or error}: purge again when that is mended")
                )
        return blocked

    def _census(self, path: Path) -> list[FoundSegment]:
        total = sum(one.nbytes for one in self._folder.segments(path))
        read = 0

        def on_read(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            self._on_progress(f"looking at {path.name}", min(read, total), total)

        return take_census(self._folder, path, on_read)

    def _pass(self, path: Path, found: list[FoundSegment], selection: Selection, done: PartitionPurge) -> Pass:
        total = written = 0

        def on_done(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self._on_progress(f"purging {path.name}", written, total)

        one = Pass(path, found, selection, self._store_uuid, report=self._report, done=done, on_done=on_done)
        total = one.touched_nbytes
        return one

    def _partition(self, path: Path, found: list[FoundSegment], selection: Selection) -> None:
        """Pass after pass, each over what is really there, until one finds nothing to do."""
        done = PartitionPurge(path.name)
        self._report.partitions.append(done)
        try:
            done.quarantine_entries = self._forget_failed(path, _keys(found, selection))
        except OSError as error:
            self._report.failures.append(Failure(path.name, f"quarantine log: {error.strerror or error}"))
        earlier = list(self._report.failures)
        for _ in range(_PASSES):
            self._report.failures = list(earlier)
            one = self._pass(path, found, selection, done)
            self._report.failures += one.failures()
            if not one.run(self._drive):
                return
            found = self._census(path)
        self._report.failures.append(Failure(path.name, "something is left after all passes: a bug; purge again"))

    def _forget_failed(self, path: Path, keys: set[bytes]) -> int:
        """Zero the quarantine log's entries that name one of `keys`; an entry of zeros is none. Losing one that a crash
        tears costs one more failed read.
        """
        zeroed = 0
        for log in sorted(path.iterdir()):
            if log_generation(log.name) is None or not log.is_file():
                continue
            data = bytearray(log.read_bytes())
            dirty = False
            for at in range(0, len(data) - ENTRY_NBYTES + 1, ENTRY_NBYTES):
                for entry in decode(bytes(data[at : at + ENTRY_NBYTES]), self._store_uuid).entries:
                    if isinstance(entry, BadBlock) and entry.key in keys:
                        data[at : at + ENTRY_NBYTES] = bytes(ENTRY_NBYTES)
                        zeroed += 1
                        dirty = True
            if dirty:
                self._overwrite(log, bytes(data))
        return zeroed

    def _overwrite(self, path: Path, data: bytes) -> None:
        memory = aligned(pad_to_page(len(data)))
        memory[: len(data)] = memoryview(data)
        file = self._drive.engine.reopen(path)
        try:
            self._drive.write(file, 0, memory)
            self._drive.sync(file)
        finally:
            self._drive.engine.close_file(file)

    def _forget_namespaces(self, selection: Selection) -> None:
        """Remove the descriptions of purged namespaces of which no record is left in the whole store."""
        left: set[bytes] = set()
        for path in self._folder.partitions():
            if path in self._paths:
                continue  # a pass has just found none in it
            segments = take_census(self._folder, path)
            if any(one.unknown_why for one in segments):
                return
            left |= {digest for one in segments if one.contents for digest in one.contents.namespaces}
            left |= {stray.header.namespace for one in segments for stray in one.strays}
        folder = self._folder.root / "namespaces"
        for digest in sorted(selection.digests - left):
            name = f"{digest.hex()}.json"
            for path in sorted(folder.glob(f".{name}.*")):  # half-written
                self._drive.erase(path)
            if (folder / name).is_file():
                self._drive.erase(self._drive.retire(folder / name))
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
    found: Mapping[Path, list[FoundSegment]], described: Mapping[bytes, Namespace | str]
) -> dict[bytes, tuple[int, int]]:
    """Block records and their bytes by namespace, of those without a description to believe."""
    counts: dict[bytes, tuple[int, int]] = {}

    def add(digest: bytes, records: int, nbytes: int) -> None:
        if records and not isinstance(described.get(digest), Namespace):
            before = counts.get(digest, (0, 0))
            counts[digest] = (before[0] + records, before[1] + nbytes)

    for one in (one for some in found.values() for one in some):
        for stray in one.strays:
            if stray.header.kind is RecordKind.BLOCK:
                add(stray.header.namespace, 1, stray.header.record_nbytes)
        if one.contents is not None:
            entries = one.contents.entries[one.contents.entries["kind"] == RecordKind.BLOCK]
            for number, digest in enumerate(one.contents.namespaces):
                rows = entries[entries["namespace"] == number]
                add(digest, len(rows), int(rows["record_nbytes"].sum()))
    return counts
