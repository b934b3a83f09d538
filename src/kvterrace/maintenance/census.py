"""What lies in a partition, down to the bytes that belong to no record. Reads only; nothing read is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvterrace.format.record import PAGE_NBYTES, RecordHeader, RecordKind
from kvterrace.format.recovery import SegmentContents, SegmentState
from kvterrace.format.segment import (
    MAX_SEGMENT_NBYTES,
    RECORDS_AT,
    BadSegment,
    Footer,
    FooterBuilder,
    NewerFormat,
    SegmentHeader,
)
from kvterrace.observe.folder import SegmentFile, StoreFolder
from kvterrace.observe.medium import MediumFile
from kvterrace.observe.quarantined import read_quarantine
from kvterrace.observe.records import SealedFooter, SegmentReader, SoundRecord

__all__ = ["Dropped", "FoundSegment", "Stray", "take_census"]

_Extent = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stray:
    """A record that the store does not use, with a right header: damaged, or left out by a sealed segment's footer."""

    header: RecordHeader
    offset: int
    sound: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key that a tombstone names, and what the tombstone's header says. No namespace (zeros): its record is not
    known.
    """

    namespace: bytes
    key: bytes
    put_seq: int
    epoch: int
    created_unix_ns: int


@dataclass(slots=True, eq=False)
class FoundSegment:
    """One segment's file.

    Attributes:
        contents: what the store would use of it; None: nothing.
        strays: other records in it.
        unknown_nbytes: bytes that are not zero and belong to no record: torn writes, damage, old contents of the drive.
        unknown_why: why nothing can be said about it, and what to do; empty if something can.
        bad: extents of it (offset, bytes) that the quarantine names.
        foreign: why the store does not use it though it is a sound segment; empty if it does.
    """

    file: SegmentFile
    header: SegmentHeader | None = None
    contents: SegmentContents | None = None
    dropped: list[Dropped] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    unknown_nbytes: int = 0
    unknown_why: str = ""
    bad: list[_Extent] = field(default_factory=list)
    foreign: str = ""

    @property
    def unsealed(self) -> bool:
        """Whether the store uses it, and it has no footer."""
        known = self.contents is not None and self.contents.state is SegmentState.SCANNED
        return known and not (self.foreign or self.unknown_why)

    @property
    def number(self) -> int:
        """The segment's number, from its file's name."""
        return self.file.number


def take_census(
    folder: StoreFolder, partition: Path, on_read: Callable[[int], object] = lambda _: None
) -> list[FoundSegment]:
    """Every segment of a partition, by number. Blocks; unsealed segments are read in full, of sealed ones the footer
    and what it says nothing about. Raises OSError where the folder cannot be read.
    """
    found = []
    quarantined = read_quarantine(partition, folder.marker.store_uuid)
    for file in folder.segments(partition):
        one = FoundSegment(file)
        try:
            with MediumFile(file.path, on_read=on_read) as medium:
                _look(one, SegmentReader(medium, str(file.path), file.number), folder.marker.store_uuid)
        except OSError as error:
            one.unknown_why = f"cannot be read: {error.strerror or error}"
        if one.header is not None:
            one.bad = [(place.offset, place.nbytes) for place in quarantined.places.get(one.header.nonce, ())]
        found.append(one)
    return found


def _look(one: FoundSegment, reader: SegmentReader, store_uuid: bytes | None) -> None:
    nbytes = reader.medium.nbytes
    header = reader.header()
    match header:
        case NewerFormat(version):
            one.unknown_why = f"written in segment format {version}: upgrade kvterrace to purge it"
            return
        case _ if nbytes > MAX_SEGMENT_NBYTES:
            one.unknown_why = f"larger than any segment ({MAX_SEGMENT_NBYTES} B), so that it is none: remove it"
            return
        case BadSegment(reason):
            if reader.medium.fault[0]:
                one.unknown_why = f"{reason}: {reader.medium.fault[0]}"
            one.unknown_nbytes = _not_zero(reader.medium, [(0, nbytes)])
            return
        case _:
            one.header = header
    sealed = reader.footer(header, nbytes)
    if isinstance(sealed, SealedFooter):
        footer, data_end = sealed.footer, sealed.trailer.data_end
        end = sealed.trailer.footer_offset
        taken = _extents(footer)
        for start, stop in _between(taken, RECORDS_AT, end):
            for offset, record, sound in _walk(reader, header, start, stop):
                one.strays.append(Stray(record, offset, sound is not None))
    else:
        builder, end = FooterBuilder(), nbytes
        for offset, record, sound in _walk(reader, header, RECORDS_AT, nbytes):
            if sound is None:
                one.strays.append(Stray(record, offset, sound=False))
            else:
                builder.add(record, tombstone_keys=sound.keys)
        footer = builder.build()
        taken = _extents(footer)
        data_end = taken[-1][1] if taken else RECORDS_AT
    state = SegmentState.SEALED if isinstance(sealed, SealedFooter) else SegmentState.SCANNED
    contents = SegmentContents(header, state, footer.entries, footer.namespaces, footer.tombstones, data_end, nbytes)
    if store_uuid is not None and header.store_uuid != store_uuid:
        one.foreign = f"it belongs to another store, {header.store_uuid.hex()}"
    elif header.segment_id != one.number:
        one.foreign = f"it is segment {header.segment_id:08x} under another name"
    one.contents = contents
    one.dropped = _dropped(contents)
    known = taken + [(stray.offset, min(stray.offset + stray.header.record_nbytes, end)) for stray in one.strays]
    one.unknown_nbytes = _not_zero(reader.medium, _between(known, RECORDS_AT, end))


def _walk(
    reader: SegmentReader, header: SegmentHeader, start: int, stop: int
) -> Iterator[tuple[int, RecordHeader, SoundRecord | None]]:
    """What of this segment begins between `start` and `stop` with a right header; None where the rest is not right."""
    for offset, record in reader.walk(header.nonce, start, stop):
        if isinstance(record, SoundRecord):
            yield offset, record.header, record
        elif record.header is not None:
            yield offset, record.header, None


def _dropped(contents: SegmentContents) -> list[Dropped]:
    records = contents.entries[contents.entries["kind"] == RecordKind.TOMBSTONE]
    names = contents.namespaces
    said = {
        int(row["put_seq"]): (names[int(row["namespace"])], int(row["epoch"]), int(row["created_unix_ns"]))
        for row in records
    }
    dropped = []
    for row in contents.tombstones:
        put_seq = int(row["put_seq"])
        namespace, epoch, created_unix_ns = said.get(put_seq, (bytes(32), 0, 0))
        dropped.append(Dropped(namespace, row["key"].tobytes(), put_seq, epoch, created_unix_ns))
    return dropped


def _extents(footer: Footer) -> list[_Extent]:
    starts = footer.entries["offset"].astype(np.int64)
    stops = starts + footer.entries["record_nbytes"].astype(np.int64)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _between(taken: Iterable[_Extent], start: int, stop: int) -> Iterator[_Extent]:
    """What of `start..stop` is in none of `taken`."""
    for begin, end in sorted(taken):
        if begin > start:
            yield start, min(begin, stop)
        start = max(start, end)
    if start < stop:
        yield start, stop


def _not_zero(medium: MediumFile, extents: Iterable[_Extent]) -> int:
    """Bytes of pages that are not all zeros, and of those that cannot be read."""
    total = 0
    for start, stop in extents:
        read = 0
        medium.fault = ("", 0)
        for view in medium.stream(start, stop - start):
            read += view.nbytes
            if view.any():
                whole = np.zeros(-(-view.nbytes // PAGE_NBYTES) * PAGE_NBYTES, np.uint8)
                whole[: view.nbytes] = view
                total += int(whole.reshape(-1, PAGE_NBYTES).any(axis=1).sum()) * PAGE_NBYTES
        if medium.fault[0]:
            total += stop - start - read
    return total
