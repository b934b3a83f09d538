"""Records at the end of a segment that another process is still writing. Pure, as `recovery`."""

from __future__ import annotations

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.record import (
    PAGE_NBYTES,
    BadRecord,
    RecordHeader,
    RecordKind,
    decode_header,
    peek_header_nbytes,
    verify_parts,
)
from kvterrace.format.recovery import ReadAt
from kvterrace.format.segment import Footer, FooterBuilder

__all__ = ["scan_onward"]

_NOTHING: Bytes = np.zeros(0, np.uint8)


def scan_onward(read: ReadAt, nonce: bytes, start: int, nbytes: int, *, most: int) -> tuple[Footer, int]:
    """Records that lie end to end from `start` on, at most `most`, in a file of `nbytes`; and where the next may begin.

    Stops at the first place that is no record, not yet or never: what lies behind a hole comes with the footer. Of a
    block only the header is read: its payload may still be on its way, and shows that when it is read (I3). A tombstone
    is believed whole or not at all.
    """
    found = FooterBuilder()
    while len(found) < most:
        record = _record(read, nonce, start, nbytes)
        if record is None:
            break
        header, keys = record
        found.add(header, tombstone_keys=keys)
        start += header.record_nbytes
    return found.build(), start


def _record(read: ReadAt, nonce: bytes, offset: int, nbytes: int) -> tuple[RecordHeader, bytes] | None:
    page = _some(read, offset, PAGE_NBYTES, nbytes)
    header_nbytes = peek_header_nbytes(page)
    if isinstance(header_nbytes, BadRecord):
        return None
    if header_nbytes > page.nbytes:
        page = _some(read, offset, header_nbytes, nbytes)
    header = decode_header(page)
    if isinstance(header, BadRecord) or header.nonce != nonce or header.offset != offset:
        return None
    if offset + header.record_nbytes > nbytes:
        return None
    if header.kind is not RecordKind.TOMBSTONE:
        return header, b""
    payload = _some(read, offset + header.header_nbytes, header.record_nbytes - header.header_nbytes, nbytes)
    if payload.nbytes < header.payload_nbytes or verify_parts(header, payload) is not None:
        return None
    at, keys_nbytes = int(header.parts["offset"][0]), int(header.parts["nbytes"][0])
    return header, payload[at : at + keys_nbytes].tobytes()


def _some(read: ReadAt, offset: int, want: int, nbytes: int) -> Bytes:
    if offset + want > nbytes:
        return _NOTHING
    try:
        return read(offset, want)
    except OSError:
        return _NOTHING
