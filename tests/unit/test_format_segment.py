"""Segment header, footer and trailer, against a layout written down here again by hand."""

from __future__ import annotations

import struct
from typing import Any

import crc32c as reference
import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.format import record as rec
from kvterrace.format import segment as seg
from kvterrace.format.segment import BadFooter, BadSegment, Footer, FooterBuilder, NewerFormat, SegmentHeader, Trailer

UUID, NONCE = b"store-uuid-16-B\0", b"segment-nonce-1\0"
HEADER = SegmentHeader(UUID, NONCE, 42, 1_700_000_000_000_000_000, 64 << 20)
DIGESTS = (b"n" * 31 + b"\0", b"m" * 32)


def key(number: int) -> bytes:
    return struct.pack("<Q", number) + bytes(24)  # ends in NULs on purpose


def header_page() -> Bytes:
    page = np.full(4096, 0xEE, dtype=np.uint8)
    seg.encode_segment_header(HEADER, page)
    return page


def footer() -> tuple[Footer, int]:
    """Three blocks and a tombstone of two keys, end to end from 4096; and where they end."""
    builder = FooterBuilder()
    offset = 4096
    for number in (1, 2, 3):
        table = rec.part_table((5000 * number, 7))
        header = rec.RecordHeader(
            rec.RecordKind.BLOCK,
            10 + number,
            DIGESTS[number % 2],
            key(number),
            key(number - 1),
            5000 * number + 7,
            table,
            depth=number,
            epoch=6,
            sequence=b"s" * 15 + b"\0",
            codec=2,
            created_unix_ns=99,
        )
        builder.add(header, offset)
        offset += header.record_nbytes
    keys = key(8) + key(9)
    out = np.zeros(8192, dtype=np.uint8)
    tombstone = rec.encode_tombstone(keys, out, put_seq=20, namespace=DIGESTS[0], epoch=6)
    builder.add(tombstone, offset, keys)
    assert builder.footer_nbytes == 8192
    return builder.build(), offset + tombstone.record_nbytes


def built() -> tuple[Bytes, int]:
    tables, end = footer()
    return seg.build_footer(tables, nonce=NONCE, segment_id=42, data_end=end), end


def trailer_of(page: Bytes) -> Trailer:
    trailer = seg.parse_trailer(page)
    assert isinstance(trailer, Trailer), trailer
    return trailer


def with_crc(page: Bytes) -> Bytes:
    """The page with the CRC at 12 put right, by the package itself."""
    raw = bytearray(page.tobytes())
    raw[12:16] = bytes(4)
    raw[12:16] = struct.pack("<I", reference.crc32c(bytes(raw)))
    return np.frombuffer(bytes(raw), dtype=np.uint8)


def test_segment_header_lies_as_the_design_says() -> None:
    raw = header_page().tobytes()
    crc = reference.crc32c(raw[:12] + bytes(4) + raw[16:])
    assert struct.unpack_from("<8sHHI16s16sQQQ", raw) == (
        *(b"KVTSEGMT", 1, 0, crc, UUID, NONCE),
        *(42, 1_700_000_000_000_000_000, 64 << 20),
    )
    assert raw[72:] == bytes(4096 - 72)
    assert seg.parse_segment_header(header_page()) == HEADER


def test_footer_and_trailer_lie_as_the_design_says() -> None:
    data, end = built()
    assert data.ctypes.data % 4096 == 0
    raw = data.tobytes()
    assert len(raw) == 8192
    assert raw[:64] == DIGESTS[1] + DIGESTS[0]
    offset = 4096
    for number in (1, 2, 3):
        payload = 5000 * number + 7
        size = 4096 + -(-payload // 4096) * 4096
        at = 64 + 144 * (number - 1)
        assert struct.unpack_from("<32s32s16sQQQQQIIIIIHH", raw, at) == (
            *(key(number), key(number - 1), b"s" * 15 + b"\0"),
            *(10 + number, offset, 99, size, payload),
            *(number, 6, 1 - number % 2, 4096, 2, 1, 2),
        )
        offset += size
    tombstone = struct.unpack_from("<32s32s16sQQQQQIIIIIHH", raw, 64 + 3 * 144)
    assert tombstone == (bytes(32), bytes(32), bytes(16), 20, offset, 0, 8192, 64, 0, 6, 1, 4096, 1, 2, 0)
    at = 64 + 4 * 144
    assert raw[at : at + 80] == key(8) + struct.pack("<Q", 20) + key(9) + struct.pack("<Q", 20)
    assert raw[at + 80 : 4096] == bytes(4096 - at - 80)
    page = raw[4096:]
    assert struct.unpack_from("<8sHHI16sQQQQIIII", page) == (
        *(b"KVTFOOTR", 1, 0, reference.crc32c(page[:12] + bytes(4) + page[16:]), NONCE),
        *(42, end, end, 4096, 4, 2, 2, reference.crc32c(raw[:4096])),
    )
    assert page[80:] == bytes(4096 - 80)


def test_footer_round_trip_keeps_trailing_nuls() -> None:
    tables, end = footer()
    data, _ = built()
    trailer = trailer_of(data[4096:])
    assert trailer.file_nbytes == end + 8192
    again = seg.parse_footer(trailer, data[:4096])
    assert isinstance(again, Footer)
    assert again.entries.tobytes() == tables.entries.tobytes()
    assert again.tombstones.tobytes() == tables.tombstones.tobytes()
    assert again.namespaces == (DIGESTS[1], DIGESTS[0])
    assert again.entries["key"][1].tobytes() == key(2)
    data[:] = 0
    assert again.entries.tobytes() == tables.entries.tobytes(), "a copy"


def test_an_empty_footer() -> None:
    data = seg.build_footer(FooterBuilder().build(), nonce=NONCE, segment_id=1, data_end=4096, footer_offset=8192)
    trailer = trailer_of(data)
    assert (trailer.data_end, trailer.footer_offset, data.nbytes) == (4096, 8192, 4096)
    again = seg.parse_footer(trailer, data[:0])
    assert isinstance(again, Footer)
    assert len(again.entries) == len(again.tombstones) == len(again.namespaces) == 0


def test_every_flipped_byte_is_noticed() -> None:
    data, _ = built()
    trailer = trailer_of(data[4096:])
    page = header_page()
    for at in range(4096):
        for mask in (1 << at % 8, 0xFF):
            page[at] ^= mask
            assert isinstance(seg.parse_segment_header(page), BadSegment), at
            page[at] ^= mask
            data[4096 + at] ^= mask
            assert isinstance(seg.parse_trailer(data[4096:]), BadFooter), at
            data[4096 + at] ^= mask
            data[at] ^= mask
            assert isinstance(seg.parse_footer(trailer, data[:4096]), BadFooter), at
            data[at] ^= mask


def test_a_newer_version_is_told_from_garbage() -> None:
    page = header_page()
    tail = built()[0][4096:].copy()
    for version in (2, 65535):
        for view in (page, tail):
            struct.pack_into("<H", view.data, 8, version)
        assert isinstance(seg.parse_segment_header(page), BadSegment), "the CRC is wrong: a flipped bit"
        assert isinstance(seg.parse_trailer(tail), BadFooter)
        assert seg.parse_segment_header(with_crc(page)) == NewerFormat(version)
        assert seg.parse_trailer(with_crc(tail)) == NewerFormat(version)
    for at, value in ((8, 0), (10, 1)):  # version 0; an unknown flag
        page, tail = header_page(), built()[0][4096:].copy()
        for view in (page, tail):
            struct.pack_into("<H", view.data, at, value)
        assert isinstance(seg.parse_segment_header(with_crc(page)), BadSegment)
        assert isinstance(seg.parse_trailer(with_crc(tail)), BadFooter)


@pytest.mark.parametrize("nbytes", [0, 1, 79, 4095])
def test_less_than_a_page_is_a_value(nbytes: int) -> None:
    assert isinstance(seg.parse_segment_header(header_page()[:nbytes]), BadSegment)
    assert isinstance(seg.parse_trailer(built()[0][4096:][:nbytes]), BadFooter)


@pytest.mark.parametrize(
    ("at", "code", "value"),
    [
        (40, "Q", 1),  # data_end
        (40, "Q", 0),
        (40, "Q", 1 << 63),
        (48, "Q", 4096),  # footer_offset before data_end
        (48, "Q", 1 << 63),
        (56, "Q", 0),  # footer_nbytes
        (56, "Q", 2**64 - 4096),
        (64, "I", 2**32 - 1),  # entries
        (68, "I", 2**32 - 1),
        (72, "I", 2**32 - 1),
    ],
)
def test_impossible_trailers_with_a_right_crc_are_refused(at: int, code: str, value: int) -> None:
    page = built()[0][4096:].copy()
    struct.pack_into("<" + code, page.data, at, value)
    assert isinstance(seg.parse_trailer(with_crc(page)), BadFooter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 0),
        ("offset", 4097),
        ("offset", 2**64 - 4096),
        ("record_nbytes", 4096),
        ("record_nbytes", 2**64 - 4096),
        ("payload_nbytes", 2**64 - 1),
        ("payload_nbytes", 0),
        ("header_nbytes", 0),
        ("header_nbytes", 8192),
        ("parts", 0),
        ("parts", 2**32 - 1),
        ("namespace", 2),
        ("kind", 0),
        ("kind", 3),
    ],
)
def test_impossible_entries_with_a_right_crc_are_refused(field: str, value: int) -> None:
    tables, end = footer()
    data, _ = built()
    trailer = trailer_of(data[4096:])
    for row in range(len(tables.entries)):
        entries = tables.entries.copy()
        entries[field][row] = value
        if entries.tobytes() == tables.entries.tobytes():
            continue
        forged = data[:4096].copy()
        forged[64 : 64 + entries.nbytes] = np.frombuffer(entries.tobytes(), dtype=np.uint8)
        fields = {name: getattr(trailer, name) for name in trailer.__slots__}
        lying = Trailer(**{**fields, "footer_crc": reference.crc32c(forged.tobytes())})
        assert isinstance(seg.parse_footer(lying, forged), BadFooter)
        broken = Footer(entries, tables.namespaces, tables.tombstones)
        with pytest.raises(ValueError, match="entr"):
            seg.build_footer(broken, nonce=NONCE, segment_id=42, data_end=end)


def test_entries_out_of_order_are_refused() -> None:
    tables, end = footer()
    wrapping = Footer(tables.entries.copy(), tables.namespaces, tables.tombstones)
    wrapping.entries["payload_nbytes"] = 2**64 - 1  # padded, 0 in 64 bits
    wrapping.entries["record_nbytes"] = 4096
    with pytest.raises(ValueError, match="leaves"):
        seg.build_footer(wrapping, nonce=NONCE, segment_id=42, data_end=end)
    swapped = Footer(tables.entries[::-1].copy(), tables.namespaces, tables.tombstones)
    with pytest.raises(ValueError, match="order"):
        seg.build_footer(swapped, nonce=NONCE, segment_id=42, data_end=end)


def test_what_could_not_be_read_again_is_not_written() -> None:
    tables, end = footer()
    right: dict[str, Any] = {"nonce": NONCE, "segment_id": 42, "data_end": end}
    for changes in ({"nonce": b""}, {"data_end": end + 1}, {"footer_offset": end - 4096}, {"footer_offset": 1 << 62}):
        with pytest.raises(ValueError, match="footer cannot"):
            seg.build_footer(tables, **{**right, **changes})
    with pytest.raises(ValueError, match="leave"):
        seg.build_footer(tables, **{**right, "data_end": end - 4096})
    with pytest.raises(ValueError, match="digest"):
        seg.build_footer(Footer(tables.entries, (b"", b""), tables.tombstones), **right)
    with pytest.raises(ValueError, match="16 B"):
        seg.encode_segment_header(SegmentHeader(b"", NONCE, 1, 1, 1), np.zeros(4096, dtype=np.uint8))
    with pytest.raises(ValueError, match="range"):
        seg.encode_segment_header(SegmentHeader(UUID, NONCE, -1, 1, 1), np.zeros(4096, dtype=np.uint8))


def test_a_footer_says_of_a_placed_record_what_its_header_says() -> None:
    table = rec.part_table((5000, 7))
    header = rec.RecordHeader(
        rec.RecordKind.BLOCK, 10, DIGESTS[0], key(1), key(2), 5007, table, depth=3, epoch=6,
        sequence=b"s" * 15 + b"\0", codec=2, created_unix_ns=99,
    )  # fmt: skip
    memory = np.zeros(4096 + 8192, dtype=np.uint8)
    rec.encode_header(header, memory)
    rec.place(memory, NONCE, 40960)
    row = seg.footer_row(memory)
    assert row == (key(1), key(2), b"s" * 15 + b"\0", 10, 40960, 99, 12288, 5007, 3, 6, DIGESTS[0], 4096, 2, 1, 2)
    by_row, by_header = FooterBuilder(), FooterBuilder()
    for builder in (by_row, by_header):  # the first namespace is another's
        builder.add(rec.RecordHeader(rec.RecordKind.BLOCK, 1, DIGESTS[1], key(5), key(6), 5007, table), 4096)
    by_row.add_row(row)
    by_header.add(header, 40960)
    mine, wanted = by_row.build(), by_header.build()
    assert mine.entries.tobytes() == wanted.entries.tobytes() and mine.namespaces == wanted.namespaces == DIGESTS[::-1]
