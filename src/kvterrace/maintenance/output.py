"""The segment that takes in what stays: records from other segments, verified on their way."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import (
    MAX_HEADER_NBYTES,
    PAGE_NBYTES,
    RecordHeader,
    RecordKind,
    decode_header,
    encode_tombstone,
    pad_to_page,
    place,
    tombstone_nbytes_for,
    verify_parts,
)
from kvterrace.format.segment import (
    RECORDS_AT,
    FooterBuilder,
    SegmentHeader,
    build_footer,
    encode_segment_header,
    footer_nbytes_for,
)
from kvterrace.io.base import IoFile
from kvterrace.maintenance.census import Dropped
from kvterrace.maintenance.drive import Drive, aligned
from kvterrace.observe.medium import MediumFile

__all__ = ["Need", "OutputSegment", "identity", "tombstone_groups"]

#: Written at once: as many records as go in, or a piece of a larger one.
_PIECE_NBYTES = 4 << 20
#: Keys of one tombstone record.
_TOMBSTONE_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Need:
    """What records ask of a segment: their own bytes, and their rows in its footer."""

    record_nbytes: int = 0
    records: int = 0
    namespaces: int = 0
    dropped: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(
            self.record_nbytes + other.record_nbytes,
            self.records + other.records,
            self.namespaces + other.namespaces,
            self.dropped + other.dropped,
        )

    @property
    def file_nbytes(self) -> int:
        """Size of a segment that holds just this."""
        rows = footer_nbytes_for(self.records, self.namespaces, self.dropped)
        return RECORDS_AT + self.record_nbytes + rows + PAGE_NBYTES


#: What a record's header must say, in one order for `identity` and for who reads it.
Identity = tuple[bytes | int, ...]


def identity(entry: Any, namespace: bytes, nonce: bytes) -> Identity:
    """What the header must say of the record that `entry` (a row of `ENTRY_DTYPE`) tells of."""
    names = ("put_seq", "depth", "epoch", "payload_nbytes", "header_nbytes", "codec")
    texts = (entry[name].tobytes() for name in ("key", "parent", "sequence"))
    return (nonce, int(entry["offset"]), namespace, *texts, *(int(entry[name]) for name in names))


def tombstone_groups(dropped: Sequence[Dropped]) -> list[list[Dropped]]:
    """Keys by the record that is to name them: of one namespace and put-sequence number."""
    by_record: dict[tuple[bytes, int], list[Dropped]] = {}
    for one in dropped:
        by_record.setdefault((one.namespace, one.put_seq), []).append(one)
    return [
        some[at : at + _TOMBSTONE_KEYS] for some in by_record.values() for at in range(0, len(some), _TOMBSTONE_KEYS)
    ]


class OutputSegment:
    """A new segment being filled. What was copied counts once `sync` has returned; `seal` ends it. One owner."""

    def __init__(self, drive: Drive, path: Path, number: int, nbytes: int, store_uuid: bytes) -> None:
        """Make the file, with `nbytes` reserved for it and its footer. Raises OSError; there is no file then."""
        self.path, self.number, self.capacity = path, number, nbytes
        self.need = Need()
        self._drive = drive
        self._nonce = os.urandom(16)
        self._end = RECORDS_AT
        self._footer = FooterBuilder()
        self._header = aligned(MAX_HEADER_NBYTES)
        self._piece = aligned(_PIECE_NBYTES)
        self._waiting = 0  # bytes of whole records in `_piece` that end at `_end`, not written yet
        self._file: IoFile = drive.engine.create(path, nbytes)
        page = aligned(PAGE_NBYTES)
        encode_segment_header(SegmentHeader(store_uuid, self._nonce, number, time.time_ns(), nbytes), page)
        try:
            drive.engine.sync_folder(path.parent)
            drive.write(self._file, 0, page)
        except OSError:
            self.close()
            drive.remove(path)
            raise

    def fits(self, more: Need) -> bool:
        """Whether records that need `more` still go in."""
        return (self.need + more).file_nbytes <= self.capacity

    def copy(self, source: MediumFile, expected: Identity, offset: int) -> bool:
        """Copy the record at `offset` of `source`, with a new place and nothing else changed. False if it is damaged:
        it is not the one `expected`, a part's CRC is wrong, or it cannot be read. Raises OSError if it cannot be
        written.
        """
        source.fault = ("", 0)
        header = _header_at(source, offset, expected)
        if header is None:
            return False
        small = header.record_nbytes <= _PIECE_NBYTES
        if not small or self._waiting + header.record_nbytes > _PIECE_NBYTES:
            self._write_waiting()
        image = self._piece[self._waiting : self._waiting + header.record_nbytes] if small else self._header
        image[: header.header_nbytes] = source.whole(offset, header.header_nbytes)
        place(image, self._nonce, self._end)
        if small:
            if not _read_payload(source, header, image[header.header_nbytes :]):
                return False
            self._waiting += header.record_nbytes
        else:
            if not self._move_payload(source, header):
                return False
            # The header last: without it, what was written is nothing.
            self._drive.write(self._file, self._end, image[: header.header_nbytes])
        self._added(replace(header, nonce=self._nonce, offset=self._end))
        return True

    def bury(self, group: Sequence[Dropped]) -> None:
        """Write a tombstone for keys of one namespace and put-sequence number. Raises OSError."""
        self._write_waiting()
        memory = aligned(tombstone_nbytes_for(len(group)))
        keys = b"".join(one.key for one in group)
        first = group[0]
        header = encode_tombstone(
            keys,
            memory,
            put_seq=first.put_seq,
            namespace=first.namespace,
            epoch=first.epoch,
            created_unix_ns=first.created_unix_ns,
        )
        place(memory, self._nonce, self._end)
        self._drive.write(self._file, self._end, memory)
        self._added(replace(header, nonce=self._nonce, offset=self._end), keys)

    def sync(self) -> None:
        """Make everything up to here durable. Raises OSError."""
        self._write_waiting()
        self._drive.sync(self._file)

    def seal(self) -> None:
        """Write the footer and cut the file behind it, durably; a segment without records is removed. Closes the file,
        also where that fails: it is an unsealed segment then, and as good. Raises OSError.
        """
        try:
            if not len(self._footer):
                self._drive.remove(self.path)
                return
            self.sync()
            footer = build_footer(self._footer.build(), nonce=self._nonce, segment_id=self.number, data_end=self._end)
            self._drive.write(self._file, self._end, footer)
            self._drive.engine.truncate(self._file, self._end + footer.nbytes)
            self._drive.sync(self._file)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, as it is."""
        self._drive.engine.close_file(self._file)

    def _added(self, header: RecordHeader, keys: bytes = b"") -> None:
        self._footer.add(header, tombstone_keys=keys)
        self._end += header.record_nbytes
        self.need += Need(header.record_nbytes, 1, 1, len(keys) // 32)

    def _write_waiting(self) -> None:
        nbytes, self._waiting = self._waiting, 0
        if nbytes:
            self._drive.write(self._file, self._end - nbytes, self._piece[:nbytes])

    def _move_payload(self, source: MediumFile, header: RecordHeader) -> bool:
        """Copy a payload piece by piece; whether every part was right."""
        sums = _Sums(header)
        start, to = header.offset + header.header_nbytes, self._end + header.header_nbytes
        for at in range(0, header.payload_nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, header.payload_nbytes - at)
            image = self._piece[: pad_to_page(nbytes)]
            if not _read(source, start + at, nbytes, image):
                return False
            sums.feed(at, image[:nbytes])
            self._drive.write(self._file, to + at, image)
        return sums.right()


class _Sums:
    """CRCs of a record's parts over its payload, given in pieces from its start on."""

    def __init__(self, header: RecordHeader) -> None:
        parts = header.parts
        self._starts = parts["offset"].astype(np.int64)
        self._ends = self._starts + parts["nbytes"]
        self._wanted: list[int] = parts["crc32c"].tolist()
        self._found = [0] * len(parts)

    def feed(self, at: int, piece: Bytes) -> None:
        for number in np.flatnonzero((self._starts < at + piece.nbytes) & (self._ends > at)).tolist():
            start, end = max(int(self._starts[number]) - at, 0), int(self._ends[number]) - at
            self._found[number] = crc32c(piece[start:end], self._found[number])

    def right(self) -> bool:
        return self._found == self._wanted


def _read_payload(source: MediumFile, header: RecordHeader, image: Bytes) -> bool:
    """A whole payload into `image`, which is as long with its padding; whether every part was right."""
    if not _read(source, header.offset + header.header_nbytes, header.payload_nbytes, image):
        return False
    return verify_parts(header, image) is None


def _read(source: MediumFile, offset: int, nbytes: int, image: Bytes) -> bool:
    """`nbytes` at `offset` into `image`, the rest of it zeros; whether they could be read."""
    at = 0
    for view in source.stream(offset, nbytes):
        image[at : at + view.nbytes] = view
        at += view.nbytes
    image[at:] = 0
    return at == nbytes


def _header_at(source: MediumFile, offset: int, expected: Identity) -> RecordHeader | None:
    header = decode_header(source.whole(offset, PAGE_NBYTES))
    if not isinstance(header, RecordHeader):
        header = decode_header(source.whole(offset, MAX_HEADER_NBYTES))
    if not isinstance(header, RecordHeader) or header.kind is not RecordKind.BLOCK:
        return None
    found: Identity = (
        header.nonce, header.offset, header.namespace, header.key, header.parent, header.sequence, header.put_seq,
        header.depth, header.epoch, header.payload_nbytes, header.header_nbytes, header.codec,
    )  # fmt: skip
    return header if found == expected else None
