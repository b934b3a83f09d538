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

#: Payload moved at once.
_PIECE_NBYTES = 1 << 20
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
        source.forget()
        header = _header_at(source, offset, expected)
        if header is None:
            return False
        at, header_nbytes = self._end, header.header_nbytes
        self._header[:header_nbytes] = source.whole(offset, header_nbytes)
        if not self._payload(source, header, offset + header_nbytes, at + header_nbytes):
            return False
        # The header last: without it, what was written is nothing.
        place(self._header, self._nonce, at)
        self._drive.write(self._file, at, self._header[:header_nbytes])
        self._added(replace(header, nonce=self._nonce, offset=at))
        return True

    def bury(self, group: Sequence[Dropped]) -> None:
        """Write a tombstone for keys of one namespace and put-sequence number. Raises OSError."""
        memory = aligned(tombstone_nbytes_for(len(group)))
        keys = b"".join(one.key for one in group)
        header = encode_tombstone(keys, memory, put_seq=group[0].put_seq, namespace=group[0].namespace)
        place(memory, self._nonce, self._end)
        self._drive.write(self._file, self._end, memory)
        self._added(replace(header, nonce=self._nonce, offset=self._end), keys)

    def sync(self) -> None:
        """Make everything up to here durable. Raises OSError."""
        self._drive.sync(self._file)

    def seal(self) -> None:
        """Write the footer and cut the file behind it, durably; a segment without records is removed. Closes the file,
        also where that fails: it is an unsealed segment then, and as good. Raises OSError.
        """
        try:
            if not len(self._footer):
                self._drive.remove(self.path)
                return
            self._drive.sync(self._file)
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

    def _payload(self, source: MediumFile, header: RecordHeader, start: int, to: int) -> bool:
        """Copy the payload piece by piece; whether every part was right. Padding is written as zeros."""
        sums = _Sums(header)
        for at in range(0, header.payload_nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, header.payload_nbytes - at)
            view = source.whole(start + at, nbytes)
            if view.nbytes < nbytes:
                return False
            padded = pad_to_page(nbytes)
            self._piece[:nbytes] = view
            self._piece[nbytes:padded] = 0
            sums.feed(at, self._piece[:nbytes])
            self._drive.write(self._file, to + at, self._piece[:padded])
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
