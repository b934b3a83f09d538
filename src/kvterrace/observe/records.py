"""One segment's file as a tool reads it: every record in full, each against all its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import (
    PAGE_NBYTES,
    RECORD_MAGIC,
    BadRecord,
    RecordHeader,
    RecordKind,
    decode_header,
    peek_header_nbytes,
)
from kvterrace.format.segment import (
    RECORDS_AT,
    BadFooter,
    BadSegment,
    Footer,
    NewerFormat,
    SegmentHeader,
    Trailer,
    parse_footer,
    parse_segment_header,
    parse_trailer,
)
from kvterrace.observe.medium import MediumFile

__all__ = ["BadPlace", "ForeignRecord", "SealedFooter", "SegmentReader", "SoundRecord"]

_MAGIC_U64 = np.frombuffer(RECORD_MAGIC, dtype="<u8")[0]
#: How far to step over what the device cannot read.
_STEP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SealedFooter:
    """Trailer and footer, both believed."""

    trailer: Trailer
    footer: Footer


@dataclass(frozen=True, slots=True)
class SoundRecord:
    """A sound record, with the keys of a tombstone."""

    header: RecordHeader
    keys: bytes


@dataclass(frozen=True, slots=True)
class BadPlace:
    """Not a sound record. `key`: where a header that is right names one. `unreadable`: the device said so. `header`:
    where that is right, though the rest is not.
    """

    reason: str
    key: bytes | None = None
    unreadable: bool = False
    header: RecordHeader | None = None


class ForeignRecord:
    """A sound header of another segment: old bytes, or a copy inside a payload."""


class SegmentReader:
    """One segment's file, seen as pages and records."""

    def __init__(self, medium: MediumFile, where: str, number: int) -> None:
        self.medium, self.where, self.number = medium, where, number

    def header(self) -> SegmentHeader | BadSegment | NewerFormat:
        """Page 0."""
        nbytes = self.medium.nbytes
        if nbytes < PAGE_NBYTES:
            return BadSegment(f"a file of {nbytes} B is shorter than a segment header")
        return parse_segment_header(self.medium.whole(0, PAGE_NBYTES))

    def footer(self, header: SegmentHeader, nbytes: int) -> SealedFooter | str:
        """Footer and trailer, or why there are none."""
        if nbytes % PAGE_NBYTES or nbytes < RECORDS_AT + PAGE_NBYTES:
            return f"a file of {nbytes} B has no trailer"
        trailer = parse_trailer(self.medium.whole(nbytes - PAGE_NBYTES, PAGE_NBYTES))
        if isinstance(trailer, NewerFormat):
            return f"trailer of format version {trailer.version} in an older segment"
        if isinstance(trailer, BadFooter):
            return trailer.reason
        if trailer.nonce != header.nonce or trailer.segment_id != header.segment_id or trailer.file_nbytes != nbytes:
            return "trailer: of another segment, or in another place"
        footer = parse_footer(trailer, self.medium.whole(trailer.footer_offset, trailer.footer_nbytes))
        return footer.reason if isinstance(footer, BadFooter) else SealedFooter(trailer, footer)

    def walk(self, nonce: bytes | None, start: int, stop: int) -> Iterator[tuple[int, SoundRecord | BadPlace]]:
        """What begins like a record between `start` and `stop`. `nonce` None: of whatever segment."""
        offset = start
        while offset < stop:
            window = self.medium.some(offset, stop - offset)
            window = window[: window.nbytes // PAGE_NBYTES * PAGE_NBYTES]
            if not window.nbytes:
                if not self.medium.fault[0]:
                    return
                yield offset, BadPlace(f"cannot be read: {self.medium.fault[0]}", unreadable=True)
                self.medium.forget()
                offset += _STEP_NBYTES
                continue
            words = window.reshape(-1, PAGE_NBYTES)[:, :8].copy().view("<u8")[:, 0]
            hits = np.flatnonzero(words == _MAGIC_U64)
            if not len(hits):
                offset += window.nbytes
                continue
            offset += int(hits[0]) * PAGE_NBYTES
            record = self.record(nonce, offset, stop)
            if not isinstance(record, ForeignRecord):
                yield offset, record
            offset += record.header.record_nbytes if isinstance(record, SoundRecord) else PAGE_NBYTES

    def record(self, nonce: bytes | None, offset: int, stop: int) -> SoundRecord | BadPlace | ForeignRecord:
        """The record at `offset`, read in full and compared with all its checksums."""
        self.medium.fault = ("", 0)
        nbytes = peek_header_nbytes(self.medium.some(offset, PAGE_NBYTES))
        if isinstance(nbytes, BadRecord):
            return self._bad(nbytes.reason)
        header = decode_header(self.medium.whole(offset, nbytes))
        if isinstance(header, BadRecord):
            return self._bad(header.reason)
        if nonce is not None and header.nonce != nonce:
            return ForeignRecord()
        if header.offset != offset:
            return self._bad(f"the record belongs at {header.offset}", header)
        if offset + header.record_nbytes > stop:
            return self._bad(
                f"the record of {header.record_nbytes} B is cut {stop - offset} B behind its start", header
            )
        keys: list[bytes] = []
        for number, (at, part_nbytes, expected, _) in enumerate(header.parts.tolist()):
            crc = have = 0
            view: Bytes
            for view in self.medium.stream(offset + header.header_nbytes + at, part_nbytes):
                crc = crc32c(view, crc)
                have += view.nbytes
                if header.kind is RecordKind.TOMBSTONE:
                    keys.append(view.tobytes())
            if have != part_nbytes:
                return self._bad(f"part {number}: {have} of {part_nbytes} B are there", header)
            if crc != expected:
                return self._bad(f"part {number}: CRC32C is {crc:08x}, expected {expected:08x}", header)
        return SoundRecord(header, b"".join(keys))

    def _bad(self, reason: str, header: RecordHeader | None = None) -> BadPlace:
        key = header.key if header is not None and header.kind is RecordKind.BLOCK else None
        fault, at = self.medium.fault
        if fault:
            return BadPlace(f"cannot be read at {at}: {fault}", key, unreadable=True, header=header)
        return BadPlace(reason, key, header=header)
