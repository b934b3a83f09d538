"""A segment file: header page, records, and once sealed a footer and a trailer page. Layout: docs/design.md.

Pure functions over bytes. What parses bytes from a disk answers with values and never raises; what builds bytes raises
`ValueError` when the caller's own numbers do not fit, which is a bug.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import (
    FIXED,
    FIXED_NBYTES,
    FORMAT_VERSION,
    MAX_PARTS,
    PAGE_NBYTES,
    PART_DTYPE,
    RecordHeader,
    RecordKind,
    pad_to_page,
)

__all__ = [
    "ENTRY_DTYPE",
    "MAX_SEGMENT_NBYTES",
    "NAMESPACE_NBYTES",
    "RECORDS_AT",
    "SEGMENT_MAGIC",
    "TOMBSTONE_DTYPE",
    "TRAILER_MAGIC",
    "BadFooter",
    "BadSegment",
    "EntryTable",
    "Footer",
    "FooterBuilder",
    "FooterRow",
    "NewerFormat",
    "SegmentHeader",
    "TombstoneTable",
    "Trailer",
    "build_footer",
    "encode_segment_header",
    "footer_nbytes_for",
    "footer_row",
    "parse_footer",
    "parse_segment_header",
    "parse_trailer",
]

SEGMENT_MAGIC = b"KVTSEGMT"
TRAILER_MAGIC = b"KVTFOOTR"
#: Where the first record begins.
RECORDS_AT = PAGE_NBYTES
NAMESPACE_NBYTES = 32
#: A larger file is no segment, whatever its first page says: nobody has to read it to its end.
MAX_SEGMENT_NBYTES = 1 << 30

# magic, format_version, flags, header_crc, store_uuid, nonce, segment_id, created_unix_ns, capacity
_HEADER = struct.Struct("<8sHHI16s16sQQQ")
assert _HEADER.size == 72
# magic, format_version, flags, trailer_crc, nonce, segment_id, data_end, footer_offset, footer_nbytes,
# entries, namespaces, tombstones, footer_crc
_TRAILER = struct.Struct("<8sHHI16sQQQQIIII")
assert _TRAILER.size == 80
_CRC = struct.Struct("<I")
_CRC_AT = 12  # in the segment header and in the trailer, in every version

#: One record. Keys are void (V), never bytes (S): numpy strips trailing NULs from the latter.
ENTRY_DTYPE = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),
        ("sequence", "V16"),
        ("put_seq", "<u8"),
        ("offset", "<u8"),
        ("created_unix_ns", "<u8"),
        ("record_nbytes", "<u8"),
        ("payload_nbytes", "<u8"),
        ("depth", "<u4"),
        ("epoch", "<u4"),
        ("namespace", "<u4"),  # number in the footer's namespace table
        ("header_nbytes", "<u4"),
        ("parts", "<u4"),
        ("kind", "<u2"),
        ("codec", "<u2"),
    ]
)
assert ENTRY_DTYPE.itemsize == 144
#: One dropped key: blocks under it with a smaller put_seq are dead.
TOMBSTONE_DTYPE = np.dtype([("key", "V32"), ("put_seq", "<u8")])
assert TOMBSTONE_DTYPE.itemsize == 40

EntryTable = npt.NDArray[Any]
TombstoneTable = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BadSegment:
    """The file does not begin with a segment header that can be believed: empty, cut short or damaged."""

    reason: str


@dataclass(frozen=True, slots=True)
class BadFooter:
    """No footer that can be believed: the segment was never sealed, or was damaged. Scan its records."""

    reason: str


@dataclass(frozen=True, slots=True)
class NewerFormat:
    """A page with the right magic and CRC, written by a newer kvterrace. Not garbage: leave it alone."""

    version: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Page 0. `store_uuid` and `nonce` take 16 B each; the nonce is random, so no two segments share one.
    `capacity`: bytes that the file may reach."""

    store_uuid: bytes
    nonce: bytes
    segment_id: int
    created_unix_ns: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment. Offsets from the start of the file."""

    nonce: bytes
    segment_id: int
    data_end: int
    footer_offset: int
    footer_nbytes: int
    entries: int
    namespaces: int
    tombstones: int
    footer_crc: int

    @property
    def file_nbytes(self) -> int:
        """Size of the sealed file."""
        return self.footer_offset + self.footer_nbytes + PAGE_NBYTES


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """What a sealed segment holds. `entries`: `ENTRY_DTYPE` in order of offset, tombstone records included;
    `namespaces`: digests; `tombstones`: `TOMBSTONE_DTYPE`, the keys inside the tombstone records."""

    entries: EntryTable
    namespaces: tuple[bytes, ...]
    tombstones: TombstoneTable


#: The fields of `ENTRY_DTYPE`, with the digest of the namespace in place of its number.
FooterRow = tuple[bytes, bytes, bytes, int, int, int, int, int, int, int, bytes, int, int, int, int]
_NAMESPACE_AT: Final = 10


def footer_row(placed: Bytes) -> FooterRow:
    """What a footer says of the block whose record begins `placed`. Its header is not checked: it was encoded, and
    given its place, by this process.
    """
    (
        _, _, kind, header_nbytes, _, codec, _, _, offset, put_seq, namespace, key, parent,
        depth, epoch, sequence, payload_nbytes, _, created, parts, _,
    ) = FIXED.unpack_from(placed.data)  # fmt: skip
    record_nbytes = header_nbytes + pad_to_page(payload_nbytes)
    return (
        key, parent, sequence, put_seq, offset, created, record_nbytes, payload_nbytes, depth, epoch, namespace,
        header_nbytes, parts, kind, codec,
    )  # fmt: skip


class FooterBuilder:
    """Collects the records of one segment as they are placed. One owner; not thread-safe."""

    __slots__ = ("_entries", "_namespaces", "_tombstones")

    def __init__(self) -> None:
        self._entries: list[tuple[object, ...]] = []
        self._namespaces: dict[bytes, int] = {}
        self._tombstones: list[tuple[bytes, int]] = []

    @classmethod
    def of(cls, footer: Footer) -> FooterBuilder:
        """One that holds what `footer` says, so that more may be added."""
        builder = cls()
        builder._entries = footer.entries.tolist()
        builder._namespaces = {digest: number for number, digest in enumerate(footer.namespaces)}
        builder._tombstones = footer.tombstones.tolist()
        return builder

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, header: RecordHeader, offset: int | None = None, tombstone_keys: bytes = b"") -> None:
        """Add a record: at `offset`, or at `header.offset`. `tombstone_keys`: payload of a tombstone, else empty."""
        self.add_row(
            (
                header.key, header.parent, header.sequence, header.put_seq, header.offset if offset is None else offset,
                header.created_unix_ns, header.record_nbytes, header.payload_nbytes, header.depth, header.epoch,
                header.namespace, header.header_nbytes, len(header.parts), int(header.kind), header.codec,
            )
        )  # fmt: skip
        for at in range(0, len(tombstone_keys), 32):
            self._tombstones.append((tombstone_keys[at : at + 32], header.put_seq))

    def add_row(self, row: FooterRow) -> None:
        """Add a block's record by what the footer will say of it."""
        number = self._namespaces.setdefault(row[_NAMESPACE_AT], len(self._namespaces))
        self._entries.append((*row[:_NAMESPACE_AT], number, *row[_NAMESPACE_AT + 1 :]))

    @property
    def footer_nbytes(self) -> int:
        """Bytes that footer and trailer would take now."""
        return footer_nbytes_for(len(self._entries), len(self._namespaces), len(self._tombstones)) + PAGE_NBYTES

    def build(self) -> Footer:
        """The tables, in order of offset. A copy: more may be added afterwards."""
        entries = np.array(self._entries, dtype=ENTRY_DTYPE)
        entries = entries[np.argsort(entries["offset"], kind="stable")]
        return Footer(entries, tuple(self._namespaces), np.array(self._tombstones, dtype=TOMBSTONE_DTYPE))


def encode_segment_header(header: SegmentHeader, out: Bytes) -> None:
    """Write page 0 into `out` (at least one page; the caller's).

    Raises:
        ValueError: `out` is too short or a field does not fit.
    """
    if out.nbytes < PAGE_NBYTES or len(header.store_uuid) != 16 or len(header.nonce) != 16:
        raise ValueError("a segment header takes a page; store_uuid and nonce take 16 B")
    out[:PAGE_NBYTES] = 0
    try:
        _HEADER.pack_into(
            out.data, 0, SEGMENT_MAGIC, FORMAT_VERSION, 0, 0, header.store_uuid, header.nonce, header.segment_id,
            header.created_unix_ns, header.capacity,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a segment header field is out of range: {error}") from error
    _CRC.pack_into(out.data, _CRC_AT, _page_crc(out[:PAGE_NBYTES]))


def parse_segment_header(page: Bytes) -> SegmentHeader | BadSegment | NewerFormat:
    """The header in the first page of a file. Never raises."""
    reason = _page_fault(page, SEGMENT_MAGIC, "segment header")
    if isinstance(reason, NewerFormat):
        return reason
    if reason is not None:
        return BadSegment(reason)
    _, _, _, _, store_uuid, nonce, segment_id, created, capacity = _HEADER.unpack_from(page.data)
    return SegmentHeader(store_uuid, nonce, segment_id, created, capacity)


def footer_nbytes_for(entries: int, namespaces: int, tombstones: int) -> int:
    """Bytes of a footer without its trailer: whole pages."""
    return pad_to_page(
        namespaces * NAMESPACE_NBYTES + entries * ENTRY_DTYPE.itemsize + tombstones * TOMBSTONE_DTYPE.itemsize
    )


def build_footer(
    footer: Footer, *, nonce: bytes, segment_id: int, data_end: int, footer_offset: int | None = None
) -> Bytes:
    """Footer and trailer as whole pages, to be written at `footer_offset` and to end the file. Page-aligned memory.

    Args:
        data_end: first byte after the last record.
        footer_offset: `data_end` unless something unusable lies between.

    Raises:
        ValueError: `parse_footer` would refuse what was asked for.
    """
    at = data_end if footer_offset is None else footer_offset
    size = footer_nbytes_for(len(footer.entries), len(footer.namespaces), len(footer.tombstones))
    if len(nonce) != 16 or data_end % PAGE_NBYTES or at % PAGE_NBYTES or not RECORDS_AT <= data_end <= at < 2**62:
        raise ValueError(f"a footer cannot lie at {at} after data up to {data_end}")
    if any(len(digest) != NAMESPACE_NBYTES for digest in footer.namespaces):
        raise ValueError(f"a namespace digest takes {NAMESPACE_NBYTES} B")
    fault = _entries_fault(footer.entries, len(footer.namespaces), data_end)
    if fault is not None:
        raise ValueError(fault)
    out = _aligned_zeros(size + PAGE_NBYTES)
    body = b"".join((*footer.namespaces, footer.entries.tobytes(), footer.tombstones.tobytes()))
    out[: len(body)] = np.frombuffer(body, dtype=np.uint8)
    trailer = out[size:]
    _TRAILER.pack_into(
        trailer.data, 0, TRAILER_MAGIC, FORMAT_VERSION, 0, 0, nonce, segment_id, data_end, at, size,
        len(footer.entries), len(footer.namespaces), len(footer.tombstones), crc32c(out[:size]),
    )  # fmt: skip
    _CRC.pack_into(trailer.data, _CRC_AT, _page_crc(trailer))
    return out


def parse_trailer(page: Bytes) -> Trailer | BadFooter | NewerFormat:
    """The trailer in the last page of a file; its numbers agree with each other. Never raises."""
    reason = _page_fault(page, TRAILER_MAGIC, "trailer")
    if isinstance(reason, NewerFormat):
        return reason
    if reason is not None:
        return BadFooter(reason)
    trailer = Trailer(*_TRAILER.unpack_from(page.data)[4:])
    if trailer.data_end % PAGE_NBYTES or trailer.footer_offset % PAGE_NBYTES:
        return BadFooter(f"footer at {trailer.footer_offset} after data up to {trailer.data_end}: not whole pages")
    if not RECORDS_AT <= trailer.data_end <= trailer.footer_offset < 2**62:
        return BadFooter(f"footer at {trailer.footer_offset} cannot follow data up to {trailer.data_end}")
    if trailer.footer_nbytes != footer_nbytes_for(trailer.entries, trailer.namespaces, trailer.tombstones):
        return BadFooter(f"a footer of {trailer.footer_nbytes} B does not hold {trailer.entries} entries exactly")
    return trailer


def parse_footer(trailer: Trailer, data: Bytes) -> Footer | BadFooter:
    """The footer in `data`, the `trailer.footer_nbytes` bytes at `trailer.footer_offset`. A copy. Never raises."""
    if data.nbytes != trailer.footer_nbytes:
        return BadFooter(f"{data.nbytes} B of a footer of {trailer.footer_nbytes} B")
    if crc32c(data) != trailer.footer_crc:
        return BadFooter("footer CRC does not match")
    entries_at = trailer.namespaces * NAMESPACE_NBYTES
    tombstones_at = entries_at + trailer.entries * ENTRY_DTYPE.itemsize
    end = tombstones_at + trailer.tombstones * TOMBSTONE_DTYPE.itemsize
    if end > data.nbytes:
        return BadFooter(f"tables of {end} B in a footer of {data.nbytes} B")
    digests = data[:entries_at].tobytes()
    namespaces = tuple(digests[at : at + NAMESPACE_NBYTES] for at in range(0, entries_at, NAMESPACE_NBYTES))
    entries = data[entries_at:tombstones_at].copy().view(ENTRY_DTYPE)
    fault = _entries_fault(entries, len(namespaces), trailer.data_end)
    if fault is not None:
        return BadFooter(fault)
    return Footer(entries, namespaces, data[tombstones_at:end].copy().view(TOMBSTONE_DTYPE))


def _entries_fault(entries: Sequence[Any] | EntryTable, namespaces: int, data_end: int) -> str | None:
    """Why these entries cannot be the records between `RECORDS_AT` and `data_end`; None if they can."""
    table = np.asarray(entries, dtype=ENTRY_DTYPE)
    if not len(table):
        return None
    offset, size, payload = table["offset"], table["record_nbytes"], table["payload_nbytes"]
    header, parts = table["header_nbytes"].astype(np.uint64), table["parts"].astype(np.uint64)
    page = np.uint64(PAGE_NBYTES)
    if bool(((offset > data_end) | (size > data_end) | (payload > data_end) | (offset < RECORDS_AT)).any()):
        return "an entry leaves the segment"
    if bool(((parts < 1) | (parts > MAX_PARTS)).any()):
        return "an entry has an impossible number of parts"
    want_header = (parts * np.uint64(PART_DTYPE.itemsize) + np.uint64(FIXED_NBYTES + PAGE_NBYTES - 1)) // page * page
    want_size = header + (payload + page - np.uint64(1)) // page * page
    if bool(((offset % page != 0) | (header != want_header) | (size != want_size)).any()):
        return "an entry has lengths that no record has"
    ends = offset + size
    if int(ends[-1]) > data_end or bool((offset[1:] < ends[:-1]).any()):
        return "entries overlap, are out of order or leave the segment"
    known = np.logical_or.reduce([table["kind"] == kind for kind in RecordKind])
    if bool((table["namespace"] >= namespaces).any()) or not bool(known.all()):
        return "an entry has an unknown namespace or kind"
    return None


def _page_crc(page: Bytes) -> int:
    return crc32c(page[_CRC_AT + 4 : PAGE_NBYTES], crc32c(b"\0\0\0\0", crc32c(page[:_CRC_AT])))


def _page_fault(page: Bytes, magic: bytes, what: str) -> str | NewerFormat | None:
    """Why `page` has not this magic, a right CRC and a known version. These three lie alike in every version."""
    if page.nbytes < PAGE_NBYTES:
        return f"{what}: {page.nbytes} B are less than a page"
    found, version, flags, crc = struct.unpack_from("<8sHHI", page.data)
    if found != magic:
        return f"{what}: wrong magic {found!r}"
    if _page_crc(page) != crc:
        return f"{what}: CRC does not match"
    if version > FORMAT_VERSION:
        return NewerFormat(version)
    if version != FORMAT_VERSION or flags:
        return f"{what}: unknown version {version} or flags {flags:#x}"
    return None


def _aligned_zeros(nbytes: int) -> Bytes:
    memory = np.zeros(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
