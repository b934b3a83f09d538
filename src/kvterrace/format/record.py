"""A record: one block's bytes, or a list of dropped keys, as it lies in a segment. Layout: docs/design.md.

Pure functions over bytes; no file handles. A view is a 1-D C-contiguous `uint8` array. Functions that read bytes from
a disk answer with values and never raise, whatever the bytes; functions that write raise `ValueError` when the caller's
own numbers do not fit, which is a bug.

The put path: fill the payload in a slot, `seal_parts`, `encode_header` (nonce and offset still zero); later, when the
record gets its place in a segment, `place` patches those two and the header's CRC. A payload is summed once, at put.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c

__all__ = [
    "FIXED",
    "FIXED_NBYTES",
    "FORMAT_VERSION",
    "MAX_HEADER_NBYTES",
    "MAX_PARTS",
    "MAX_TOMBSTONE_KEYS",
    "PAGE_NBYTES",
    "PART_DTYPE",
    "RECORD_MAGIC",
    "BadRecord",
    "PartTable",
    "RecordHeader",
    "RecordKind",
    "StaleRecord",
    "check_identity",
    "decode_header",
    "encode_header",
    "encode_tombstone",
    "header_nbytes_for",
    "pad_to_page",
    "part_table",
    "peek_header_nbytes",
    "place",
    "record_nbytes_for",
    "seal_parts",
    "tombstone_nbytes_for",
    "verify_parts",
]

PAGE_NBYTES = 4096
FORMAT_VERSION = 1
RECORD_MAGIC = b"KVTRECRD"
MAX_PARTS = 4096
#: Keys in one tombstone; a larger drop takes several.
MAX_TOMBSTONE_KEYS = 32768
_KEY_NBYTES = 32
_ZERO16 = bytes(16)
_ZERO32 = bytes(32)
_U32_MAX = 2**32 - 1

# magic, format_version, kind, header_nbytes, header_crc, codec, flags, segment_nonce, offset, put_seq, namespace, key,
# parent, depth, epoch, sequence, payload_nbytes, raw_nbytes, created_unix_ns, parts, part_entry_nbytes
FIXED = struct.Struct("<8sHHIIHH16sQQ32s32s32sII16sQQQII")
assert FIXED.size == 208
#: Bytes of a header before its part table.
FIXED_NBYTES = FIXED.size

_PREFIX = struct.Struct("<8sHHII")  # magic, format_version, kind, header_nbytes, header_crc
_CRC = struct.Struct("<I")
_CRC_AT = 16
_PLACE = struct.Struct("<16sQ")  # segment_nonce, offset
_PLACE_AT = 24

PART_DTYPE = np.dtype([("offset", "<u4"), ("nbytes", "<u4"), ("crc32c", "<u4"), ("raw_nbytes", "<u4")])
assert PART_DTYPE.itemsize == 16
#: Array of `PART_DTYPE`, shape `(parts,)`: where each part lies in the payload, its CRC32C and its size when decoded.
PartTable = npt.NDArray[Any]

MAX_HEADER_NBYTES = -(-(FIXED_NBYTES + MAX_PARTS * PART_DTYPE.itemsize) // PAGE_NBYTES) * PAGE_NBYTES


class RecordKind(enum.IntEnum):
    """What a record is, as its header says it."""

    BLOCK = 1
    #: Keys that are dead up to this record's put_seq.
    TOMBSTONE = 2


@dataclass(frozen=True, slots=True)
class BadRecord:
    """The bytes are not a record that this build can believe: torn, overwritten, truncated, misplaced."""

    reason: str


@dataclass(frozen=True, slots=True)
class StaleRecord:
    """A valid record, but not the expected one."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class RecordHeader:
    """What a header says.

    Attributes:
        kind: a block or a tombstone.
        put_seq: the partition's counter; higher is newer.
        namespace: namespace digest, 32 B.
        key, parent: 32 B each. Zero in a tombstone.
        payload_nbytes: encoded bytes, without padding.
        parts: part table; ascending, without overlap, inside the payload.
        depth: index of the block in its chain.
        epoch: the namespace's generation.
        sequence: 16 B, the conversation or document it belongs to.
        codec: codec id. flags: 0 in format 1.
        created_unix_ns: for people; never compared.
        nonce, offset: the segment's nonce and the record's own byte offset in the file; zero until `place`.
    """

    kind: RecordKind
    put_seq: int
    namespace: bytes
    key: bytes
    parent: bytes
    payload_nbytes: int
    parts: PartTable
    depth: int = 0
    epoch: int = 0
    sequence: bytes = _ZERO16
    codec: int = 0
    flags: int = 0
    created_unix_ns: int = 0
    nonce: bytes = _ZERO16
    offset: int = 0

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header on disk: where the payload begins, from the record's start."""
        return header_nbytes_for(len(self.parts))

    @property
    def record_nbytes(self) -> int:
        """Bytes of header and padded payload: where the next record may begin, from the record's start."""
        return self.header_nbytes + pad_to_page(self.payload_nbytes)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the block when decoded."""
        return int(self.parts["raw_nbytes"].sum(dtype=np.uint64))


def pad_to_page(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def header_nbytes_for(parts: int) -> int:
    """Bytes of the header of a record with `parts` parts: as few pages as hold it."""
    return pad_to_page(FIXED_NBYTES + parts * PART_DTYPE.itemsize)


def record_nbytes_for(part_nbytes: Sequence[int]) -> int:
    """Bytes on disk of a record whose parts take `part_nbytes` encoded bytes, end to end."""
    return header_nbytes_for(len(part_nbytes)) + pad_to_page(sum(part_nbytes))


def tombstone_nbytes_for(keys: int) -> int:
    """Bytes on disk of a tombstone for `keys` keys."""
    return record_nbytes_for((keys * _KEY_NBYTES,))


def part_table(part_nbytes: Sequence[int], raw_nbytes: Sequence[int] | None = None) -> PartTable:
    """A part table for parts end to end from offset 0, CRCs still zero. `raw_nbytes`: decoded sizes, if others.

    Raises:
        ValueError: no parts, too many, or a payload of 4 GiB or more.
    """
    if not 1 <= len(part_nbytes) <= MAX_PARTS:
        raise ValueError(f"{len(part_nbytes)} parts; a record has 1 to {MAX_PARTS}")
    sizes = np.asarray(part_nbytes, dtype=np.int64)
    raw = sizes if raw_nbytes is None else np.asarray(raw_nbytes, dtype=np.int64)
    if raw.shape != sizes.shape or sizes.min() < 0 or raw.min() < 0 or max(sizes.sum(), raw.max()) > _U32_MAX:
        raise ValueError("part sizes must be in pairs, not negative, and less than 4 GiB together")
    table = np.zeros(len(sizes), dtype=PART_DTYPE)
    table["offset"] = np.cumsum(sizes) - sizes
    table["nbytes"] = sizes
    table["raw_nbytes"] = raw
    return table


def seal_parts(table: PartTable, payload: Bytes, parts: range | None = None) -> None:
    """Write into `table` the CRC of each part (or of `parts`), as it lies in `payload` (the whole payload's view)."""
    for number in range(len(table)) if parts is None else parts:
        start = int(table["offset"][number])
        table["crc32c"][number] = crc32c(payload[start : start + int(table["nbytes"][number])])


def encode_header(header: RecordHeader, out: Bytes) -> int:
    """Write `header` to the front of `out`; returns the bytes written (`header.header_nbytes`). `out` is the caller's.

    Raises:
        ValueError: `out` is too short, or a field does not fit: `decode_header` would refuse it.
    """
    nbytes = header.header_nbytes
    table = np.ascontiguousarray(header.parts, dtype=PART_DTYPE)
    reason = _parts_fault(header.kind, table, header.payload_nbytes)
    if out.nbytes < nbytes or reason is not None:
        raise ValueError(reason or f"a header of {nbytes} B does not fit {out.nbytes} B")
    ids = (header.namespace, header.key, header.parent)
    if any(len(item) != _KEY_NBYTES for item in ids) or len(header.nonce) != 16 or len(header.sequence) != 16:
        raise ValueError("namespace, key and parent take 32 B, nonce and sequence 16 B")
    if header.flags or header.offset % PAGE_NBYTES:
        raise ValueError(f"flags {header.flags} must be 0 and offset {header.offset} a multiple of {PAGE_NBYTES}")
    try:
        FIXED.pack_into(
            out.data, 0, RECORD_MAGIC, FORMAT_VERSION, header.kind, nbytes, 0, header.codec, header.flags, header.nonce,
            header.offset, header.put_seq, *ids, header.depth, header.epoch, header.sequence, header.payload_nbytes,
            header.raw_nbytes, header.created_unix_ns, len(table), PART_DTYPE.itemsize,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a header field is out of range: {error}") from error
    end = FIXED_NBYTES + table.nbytes
    out[FIXED_NBYTES:end] = table.view(np.uint8)
    out[end:nbytes] = 0
    _seal_header(out[:nbytes])
    return nbytes


def place(header_view: Bytes, nonce: bytes, offset: int) -> None:
    """Give an encoded header its place: patch nonce and offset, and renew the header's CRC (one pass over the header).

    Raises:
        ValueError: `header_view` does not begin with a header from `encode_header`, or the place is impossible.
    """
    nbytes = peek_header_nbytes(header_view)
    if isinstance(nbytes, BadRecord) or nbytes > header_view.nbytes:
        raise ValueError(f"no encoded header to place: {nbytes}")
    if len(nonce) != 16 or offset % PAGE_NBYTES or not 0 <= offset < 2**64:
        raise ValueError(f"a record cannot lie at {offset} under a nonce of {len(nonce)} B")
    _PLACE.pack_into(header_view.data, _PLACE_AT, nonce, offset)
    _seal_header(header_view[:nbytes])


def encode_tombstone(
    keys: bytes, out: Bytes, *, put_seq: int, namespace: bytes, epoch: int = 0, created_unix_ns: int = 0
) -> RecordHeader:
    """Write a whole tombstone record (header, keys, zero padding) to the front of `out`, still to be `place`d.

    Args:
        keys: n x 32 B, n in 1..`MAX_TOMBSTONE_KEYS`.
        out: at least `tombstone_nbytes_for(n)` B.

    Raises:
        ValueError: as `encode_header`.
    """
    table = part_table((len(keys),))
    table["crc32c"][0] = crc32c(keys)
    header = RecordHeader(
        RecordKind.TOMBSTONE, put_seq, namespace, _ZERO32, _ZERO32, len(keys), table,
        epoch=epoch, created_unix_ns=created_unix_ns,
    )  # fmt: skip
    if out.nbytes < header.record_nbytes:
        raise ValueError(f"a tombstone of {header.record_nbytes} B does not fit {out.nbytes} B")
    start = encode_header(header, out)
    out[start : start + len(keys)] = np.frombuffer(keys, dtype=np.uint8)
    out[start + len(keys) : header.record_nbytes] = 0
    return header


def peek_header_nbytes(view: Bytes) -> int | BadRecord:
    """How long the header at the front of `view` says it is, not yet believed: a whole number of pages, bounded."""
    if view.nbytes < FIXED_NBYTES:
        return BadRecord(f"{view.nbytes} B are too short for a record header")
    magic, _, _, nbytes, _ = _PREFIX.unpack_from(view.data)
    if magic != RECORD_MAGIC:
        return BadRecord("no record begins here")
    if nbytes % PAGE_NBYTES or not PAGE_NBYTES <= nbytes <= MAX_HEADER_NBYTES:
        return BadRecord(f"impossible header length {nbytes}")
    return int(nbytes)


def decode_header(view: Bytes) -> RecordHeader | BadRecord:
    """The header at the front of `view`, believed only if its CRC, version, lengths and part table are right.

    `view` may go on past the header. The result owns its memory. Never raises. A record of a newer version is a
    `BadRecord` here: a segment's version says which version its records have, and is looked at first.
    """
    nbytes = peek_header_nbytes(view)
    if isinstance(nbytes, BadRecord):
        return nbytes
    if nbytes > view.nbytes:
        return BadRecord(f"a header of {nbytes} B is cut at {view.nbytes} B")
    (
        _, version, kind, _, crc, codec, flags, nonce, offset, put_seq, namespace, key, parent,
        depth, epoch, sequence, payload_nbytes, raw_nbytes, created, parts, entry_nbytes,
    ) = FIXED.unpack_from(view.data)  # fmt: skip
    if _header_crc(view[:nbytes]) != crc:
        return BadRecord("header CRC does not match")
    if version != FORMAT_VERSION:
        return BadRecord(f"record of format version {version}, this build reads {FORMAT_VERSION}")
    if kind not in (RecordKind.BLOCK, RecordKind.TOMBSTONE) or flags:
        return BadRecord(f"unknown kind {kind} or flags {flags:#x}")
    if entry_nbytes != PART_DTYPE.itemsize or not 1 <= parts <= MAX_PARTS or nbytes != header_nbytes_for(parts):
        return BadRecord(f"{parts} parts of {entry_nbytes} B do not fit a header of {nbytes} B")
    if offset % PAGE_NBYTES:
        return BadRecord(f"offset {offset} is not on a page boundary")
    table = view[FIXED_NBYTES : FIXED_NBYTES + parts * entry_nbytes].copy().view(PART_DTYPE)
    reason = _parts_fault(kind, table, payload_nbytes)
    if reason is not None:
        return BadRecord(reason)
    header = RecordHeader(
        RecordKind(kind), put_seq, namespace, key, parent, payload_nbytes, table, depth, epoch, sequence, codec, flags,
        created, nonce, offset,
    )  # fmt: skip
    if header.raw_nbytes != raw_nbytes:
        return BadRecord(f"parts decode to {header.raw_nbytes} B, the header says {raw_nbytes} B")
    return header


def check_identity(
    header: RecordHeader, *, key: bytes, namespace: bytes, epoch: int, put_seq: int, nonce: bytes, offset: int
) -> BadRecord | StaleRecord | None:
    """Whether a decoded header is the block that the index means; None if so. Pure, no I/O.

    `BadRecord`: this segment's record, but from another offset: the device moved it (a misdirected read or write).
    `StaleRecord`: a valid record of another segment, or of another block: the place was used again.
    """
    if header.nonce != nonce:
        return StaleRecord(f"segment nonce is {header.nonce.hex()}, expected {nonce.hex()}")
    if header.offset != offset:
        return BadRecord(f"record belongs at {header.offset}, found at {offset}")
    if header.kind is not RecordKind.BLOCK:
        return StaleRecord(f"found a {header.kind.name.lower()}, expected a block")
    if header.key != key:
        return StaleRecord(f"key is {header.key.hex()}, expected {key.hex()}")
    if header.namespace != namespace:
        return StaleRecord(f"namespace is {header.namespace.hex()}, expected {namespace.hex()}")
    if header.epoch != epoch:
        return StaleRecord(f"epoch is {header.epoch}, expected {epoch}")
    if header.put_seq != put_seq:
        return StaleRecord(f"put_seq is {header.put_seq}, expected {put_seq}")
    return None


def verify_parts(
    header: RecordHeader, payload: Bytes, parts: range | None = None, *, base: int = 0
) -> BadRecord | None:
    """Check the CRC of every part, or of `parts`, of a decoded header; None if all match. Never raises on any bytes.

    Args:
        payload: the payload's bytes from its offset `base` on; may end in padding.
        parts: part numbers, ascending. One that the record lacks is a `BadRecord`.
    """
    for number in range(len(header.parts)) if parts is None else parts:
        if not 0 <= number < len(header.parts):
            return BadRecord(f"no part {number} in a record of {len(header.parts)}")
        offset, nbytes, expected, _ = header.parts[number].tolist()
        start = offset - base
        if start < 0 or start + nbytes > payload.nbytes:
            return BadRecord(f"part {number} at {offset}+{nbytes} is not in the {payload.nbytes} B read from {base}")
        found = crc32c(payload[start : start + nbytes])
        if found != expected:
            return BadRecord(f"part {number}: CRC is {found:08x}, expected {expected:08x}")
    return None


def _seal_header(header: Bytes) -> None:
    _CRC.pack_into(header.data, _CRC_AT, 0)
    _CRC.pack_into(header.data, _CRC_AT, crc32c(header))


def _header_crc(view: Bytes) -> int:
    """CRC32C of `view` with the CRC field taken as zero."""
    return crc32c(view[_CRC_AT + 4 :], crc32c(b"\0\0\0\0", crc32c(view[:_CRC_AT])))


def _parts_fault(kind: int, table: PartTable, payload_nbytes: int) -> str | None:
    """Why this part table cannot be: out of the payload, overlapping, or not that of a tombstone. None if it can."""
    if not 1 <= len(table) <= MAX_PARTS or not 0 <= payload_nbytes <= _U32_MAX:
        return f"{len(table)} parts in a payload of {payload_nbytes} B"
    starts = table["offset"].astype(np.int64)
    ends = starts + table["nbytes"]
    if int(ends[-1]) > payload_nbytes or bool((starts[1:] < ends[:-1]).any()):
        return f"the part table overlaps itself or leaves the payload of {payload_nbytes} B"
    if kind == RecordKind.TOMBSTONE:
        whole = len(table) == 1 and int(table["nbytes"][0]) == payload_nbytes
        keys, rest = divmod(payload_nbytes, _KEY_NBYTES)
        if not whole or rest or not 1 <= keys <= MAX_TOMBSTONE_KEYS:
            return f"a tombstone cannot have {len(table)} parts and {payload_nbytes} B"
    return None
