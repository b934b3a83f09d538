"""Read every byte that a store's folder vouches for and compare it with its checksums. Changes nothing, takes no lock.

Two kinds of findings. A fault: something that was promised is not there or is not right. A note: a trace that a crash
or a running writer may leave, which costs no block that was ever promised. What tells them apart, segment by segment:

* Sealed: the footer vouches for every record that it names. Any disagreement is a fault.
* Unsealed: nothing is vouched for yet. A record that is not right behind the last good one is a torn tail, a note. In
  front of a good one it is a fault, unless a writer has the partition open and it turns right when read again.

A record in a place that the store has in quarantine is a note: it is known, and not read any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.errors import FormatVersionError
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import PAGE_NBYTES, RecordHeader, RecordKind
from kvterrace.format.segment import MAX_SEGMENT_NBYTES, RECORDS_AT, BadSegment, NewerFormat, SegmentHeader
from kvterrace.keys import Namespace
from kvterrace.observe.folder import SegmentFile, StoreFolder, writer_pid
from kvterrace.observe.inspection import sealing_traces
from kvterrace.observe.medium import MediumFile
from kvterrace.observe.quarantined import read_quarantine
from kvterrace.observe.records import BadPlace, SealedFooter, SegmentReader, SoundRecord

__all__ = ["Fault", "Verification", "verify_store"]

_KEPT = 1000
_AGAIN_S = 0.2
_TRIES = 3
_PACKED = 4096
#: What is remembered of every block, to compare copies of one key: 64 B.
_SEEN = np.dtype(
    [("key", "V32"), ("put_seq", "<u8"), ("place", "<u4"), ("content", "<u4"), ("segment", "<u8"), ("offset", "<u8")]
)
assert _SEEN.itemsize == 64


@dataclass(frozen=True, slots=True)
class Fault:
    """`where` is `file@offset`, or a file; `key` is that of the block, where it is known."""

    where: str
    what: str
    key: bytes | None = None


@dataclass(slots=True)
class Verification:
    """What was read and found. Of faults and notes the first thousand each are kept, the rest counted.

    Attributes:
        read_nbytes: bytes read from segment files, those read twice counted twice.
        direct: whether all of them came past the page cache by O_DIRECT.
        bad_places: places in quarantine, in segments that are there or not. failed_blocks: blocks that went wrong.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    faults_left_out: int = 0
    notes_left_out: int = 0
    partitions: int = 0
    segments: int = 0
    blocks: int = 0
    tombstones: int = 0
    parts: int = 0
    bad_places: int = 0
    failed_blocks: int = 0
    read_nbytes: int = 0
    direct: bool = True

    @property
    def clean(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    def fault(self, where: str, what: str, key: bytes | None = None) -> None:
        """Something promised is not right."""
        if len(self.faults) < _KEPT:
            self.faults.append(Fault(where, what, key))
        else:
            self.faults_left_out += 1

    def note(self, where: str, what: str, key: bytes | None = None) -> None:
        """Worth saying, and no fault."""
        if len(self.notes) < _KEPT:
            self.notes.append(Fault(where, what, key))
        else:
            self.notes_left_out += 1


def verify_store(root: Path, on_progress: Callable[[int, int], object] = lambda _done, _total: None) -> Verification:
    """Verify the store at `root`. Blocks. Memory: a window of 4 MiB, one footer, 64 B for each block of a partition.

    `on_progress(done, total)` hears of bytes read.

    Raises:
        StoreUnusableError: or one of its kinds: no store, no access, or a store or segment of a newer format.
    """
    folder = StoreFolder(root)
    found = Verification()
    if folder.marker.problem:
        found.fault("store.json", folder.marker.problem)
    namespaces = folder.namespaces()
    for digest, described in namespaces.items():
        if isinstance(described, str):
            found.fault(f"namespaces/{digest.hex()}.json", described)
    for path in folder.strangers():
        found.note(str(path.relative_to(root)), "not a file of the store; it is left alone")
    for path in folder.unfinished_purges():
        found.note(str(path.relative_to(root)), "left by a purge that was interrupted: run the purge again")
    listed: list[tuple[Path, list[SegmentFile]]] = []
    for path in folder.partitions():
        try:
            listed.append((path, folder.segments(path)))
        except OSError as error:
            found.fault(str(path.relative_to(root)), f"cannot be read: {error.strerror or error}")
    total = sum(file.nbytes for _, files in listed for file in files)

    def on_read(nbytes: int) -> None:
        found.read_nbytes += nbytes
        on_progress(min(found.read_nbytes, total), total)

    for path, files in listed:
        found.partitions += 1
        _Partition(folder, path, found, namespaces, on_read).verify(files)
    on_progress(total, total)
    return found


class _Partition:
    """One partition's segments, one after the other."""

    def __init__(
        self,
        folder: StoreFolder,
        path: Path,
        found: Verification,
        namespaces: dict[bytes, Namespace | str],
        on_read: Callable[[int], object],
    ) -> None:
        self._root = folder.root
        self._store_uuid = folder.marker.store_uuid
        self._quarantined = read_quarantine(path, self._store_uuid)
        self._path = path
        self._found = found
        self._namespaces = namespaces
        self._undescribed: set[bytes] = set()
        self._on_read = on_read
        self._seen: list[np.ndarray] = []
        self._fresh: list[tuple[object, ...]] = []

    def verify(self, files: list[SegmentFile]) -> None:
        """Verify `files`, then what several of them say of one key."""
        self._found.bad_places += self._quarantined.place_count
        self._found.failed_blocks += len(self._quarantined.strikes)
        for problem in self._quarantined.problems:
            self._found.note(str(self._path.relative_to(self._root)), problem)
        for file in files:
            where = str(file.path.relative_to(self._root))
            try:
                with MediumFile(file.path, on_read=self._on_read) as medium:
                    self._found.segments += 1
                    self._found.direct &= medium.direct
                    self._segment(SegmentReader(medium, where, file.number))
            except FileNotFoundError:
                self._found.note(where, "was removed while the store was verified")
            except OSError as error:
                self._found.fault(where, f"cannot be read: {error.strerror or error}")
        self._compare_copies()

    def _segment(self, segment: SegmentReader) -> None:
        found, where = self._found, segment.where
        header = segment.header()
        match header:
            case NewerFormat(version):
                path = segment.medium.path
                raise FormatVersionError(
                    f"{path} was written in segment format {version}; upgrade kvterrace to read it"
                )
            case _ if segment.medium.nbytes > MAX_SEGMENT_NBYTES:
                found.fault(where, f"is larger than any segment may be ({MAX_SEGMENT_NBYTES} B); not read further")
                return
            case BadSegment(reason):
                self._headless(segment, reason)
                return
            case _:
                pass
        if self._store_uuid is not None and header.store_uuid != self._store_uuid:
            found.fault(f"{where}@0", f"belongs to another store, {header.store_uuid.hex()}")
        if header.segment_id != segment.number:
            found.fault(f"{where}@0", f"is segment {header.segment_id:08x} under another name")
        for left in reversed(range(_TRIES)):
            nbytes = segment.medium.nbytes
            footer = segment.footer(header, nbytes)
            if isinstance(footer, SealedFooter):
                self._sealed(segment, header, footer)
                return
            outcome = _Unsealed(segment, header, nbytes)
            writing = writer_pid(self._path) is not None
            changed = segment.medium.nbytes != nbytes  # sealed, and so cut, meanwhile
            if left and (changed or (writing and outcome.bad)):
                time.sleep(_AGAIN_S)
                segment.medium.forget()
                continue
            self._unsealed(segment, header, footer, outcome, nbytes, writing=writing)
            return

    def _headless(self, segment: SegmentReader, reason: str) -> None:
        """A file without a header: a half-made one, or damage that took everything in it along."""
        nbytes = segment.medium.nbytes
        lost = sum(isinstance(record, SoundRecord) for _, record in segment.walk(None, RECORDS_AT, nbytes))
        if lost:
            self._found.fault(f"{segment.where}@0", f"{reason}; {lost} sound records behind it cannot be believed")
        elif any(segment.medium.whole(0, min(nbytes, PAGE_NBYTES))):
            self._found.fault(f"{segment.where}@0", reason)
        elif segment.medium.fault[0]:
            self._found.fault(f"{segment.where}@0", f"cannot be read: {segment.medium.fault[0]}")
        else:
            self._found.note(
                segment.where, f"made and never used ({nbytes} B, no header): left by a crash, or just made"
            )

    def _sealed(self, segment: SegmentReader, header: SegmentHeader, sealed: SealedFooter) -> None:
        found, where, footer = self._found, segment.where, sealed.footer
        keys: set[tuple[bytes, int]] = set()
        end = RECORDS_AT
        for entry in footer.entries:
            offset = int(entry["offset"])
            for at, record in segment.walk(header.nonce, end, offset):
                if isinstance(record, SoundRecord):
                    found.note(
                        f"{where}@{at}", "a sound record that the footer leaves out: its write was reported failed"
                    )
            end = offset + int(entry["record_nbytes"])
            result = segment.record(header.nonce, offset, sealed.trailer.data_end)
            key = entry["key"].tobytes() if int(entry["kind"]) == RecordKind.BLOCK else None
            if isinstance(result, SoundRecord):
                differs = _differences(entry, footer.namespaces, result.header)
                if differs:
                    found.fault(f"{where}@{offset}", f"footer and record disagree on {', '.join(differs)}", key)
                keys.update((result.keys[i : i + 32], result.header.put_seq) for i in range(0, len(result.keys), 32))
                self._count(segment, result.header)
                continue
            reason = "a record of another segment lies where the footer names one"
            if isinstance(result, BadPlace):
                reason = result.reason
            if self._quarantined.touches(header.nonce, offset, int(entry["record_nbytes"])):
                found.note(f"{where}@{offset}", f"in quarantine: {reason}", key)
            else:
                found.fault(f"{where}@{offset}", reason, key)
        named = {(row["key"].tobytes(), int(row["put_seq"])) for row in footer.tombstones}
        if named != keys:
            found.fault(
                f"{where}@{sealed.trailer.footer_offset}",
                f"the footer names {len(named)} dropped keys, its tombstone records hold {len(keys)}; "
                f"{len(named ^ keys)} are only in one of them",
            )

    def _unsealed(
        self,
        segment: SegmentReader,
        header: SegmentHeader,
        reason: str,
        outcome: _Unsealed,
        nbytes: int,
        *,
        writing: bool,
    ) -> None:
        found, where = self._found, segment.where
        for record in outcome.good:
            self._count(segment, record)
        traces = None
        if outcome.data_end < nbytes and not writing:
            last = segment.medium.whole((nbytes - 1) // PAGE_NBYTES * PAGE_NBYTES, PAGE_NBYTES).tobytes()
            traces = sealing_traces(header, last, nbytes)
        if traces is not None:
            found.fault(where, f"{traces} ({reason}); {len(outcome.good)} records in it are sound")
        for at, bad in outcome.bad:
            if self._quarantined.touches(header.nonce, at, PAGE_NBYTES):
                found.note(f"{where}@{at}", f"in quarantine: {bad.reason}", bad.key)
            elif traces is not None or at < outcome.data_end or bad.unreadable:
                found.fault(f"{where}@{at}", bad.reason, bad.key)
            elif writing:
                found.note(f"{where}@{at}", f"being written: {bad.reason}", bad.key)
            else:
                found.note(f"{where}@{at}", f"torn tail, left by a crash: {bad.reason}", bad.key)
        if traces is None:
            state = "being written" if writing else "not sealed: the next opening goes on there, or seals it"
            found.note(where, f"{state}; {len(outcome.good)} sound records up to {outcome.data_end}")

    def _count(self, segment: SegmentReader, header: RecordHeader) -> None:
        """A sound record: count it, remember its block, compare its namespace."""
        found = self._found
        found.parts += len(header.parts)
        where = f"{segment.where}@{header.offset}"
        described = self._namespaces.get(header.namespace)
        if described is None and header.namespace not in self._undescribed:
            self._undescribed.add(header.namespace)
            found.note(f"namespaces/{header.namespace.hex()}.json", f"is missing; {where} is of that namespace")
        if header.kind is RecordKind.TOMBSTONE:
            found.tombstones += 1
            return
        found.blocks += 1
        if isinstance(described, Namespace):
            if header.epoch != described.epoch:
                found.fault(where, f"epoch {header.epoch}, its namespace has {described.epoch}", header.key)
            if tuple(header.parts["raw_nbytes"].tolist()) != described.layout.part_nbytes:
                found.fault(where, "parts are not those of its namespace's layout", header.key)
        place = crc32c(header.depth.to_bytes(4, "little"), crc32c(header.namespace + header.parent))
        content = crc32c(header.parts.tobytes())
        self._fresh.append((header.key, header.put_seq, place, content, segment.number, header.offset))
        if len(self._fresh) == _PACKED:
            self._pack()

    def _pack(self) -> None:
        self._seen.append(np.array(self._fresh, dtype=_SEEN))
        self._fresh.clear()

    def _compare_copies(self) -> None:
        self._pack()
        seen = np.concatenate(self._seen)
        self._seen.clear()
        if len(seen) < 2:
            return
        words = np.ascontiguousarray(seen["key"]).view("<u8").reshape(-1, 4)
        order = np.lexsort((seen["put_seq"], *words.T))
        seen, words = seen[order], words[order]
        differing = 0
        for at in np.flatnonzero((words[1:] == words[:-1]).all(axis=1)).tolist():
            first, second = seen[at], seen[at + 1]
            key, where = second["key"].tobytes(), self._where(second)
            if first["place"] != second["place"]:
                self._found.fault(where, f"namespace, parent or depth differ from {self._where(first)}", key)
            elif first["content"] != second["content"] and first["put_seq"] == second["put_seq"]:
                self._found.fault(where, f"bytes differ from its other copy, {self._where(first)}", key)
            elif first["content"] != second["content"]:
                differing += 1
        if differing:
            self._found.note(
                str(self._path.relative_to(self._root)),
                f"{differing} blocks were put again with other bytes; each is sound, and the newer one counts",
            )

    def _where(self, row: Any) -> str:
        path = self._path / f"{int(row['segment']):08x}.seg"
        return f"{path.relative_to(self._root)}@{int(row['offset'])}"


class _Unsealed:
    """The records of a segment without a footer. `data_end`: first byte behind the last sound one."""

    def __init__(self, segment: SegmentReader, header: SegmentHeader, nbytes: int) -> None:
        self.good: list[RecordHeader] = []
        self.bad: list[tuple[int, BadPlace]] = []
        self.data_end = RECORDS_AT
        for at, record in segment.walk(header.nonce, RECORDS_AT, nbytes):
            if isinstance(record, SoundRecord):
                self.good.append(record.header)
                self.data_end = at + record.header.record_nbytes
            else:
                self.bad.append((at, record))


def _differences(entry: Any, namespaces: tuple[bytes, ...], header: RecordHeader) -> list[str]:
    """Fields that a footer's entry and its record tell differently."""
    said = {name: entry[name].tobytes() for name in ("key", "parent", "sequence")}
    said |= {name: int(entry[name]) for name in entry.dtype.names if name not in said}
    said["namespace"] = namespaces[int(entry["namespace"])]
    return [
        name
        for name, value in said.items()
        if value != (len(header.parts) if name == "parts" else getattr(header, name))
    ]
