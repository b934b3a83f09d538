"""The disk format under arbitrary bytes and arbitrary histories."""

from __future__ import annotations

import crc32c as reference
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvterrace.buffers import Bytes
from kvterrace.format import record as rec
from kvterrace.format import segment as seg
from kvterrace.format.recovery import SegmentContents, SegmentState, live_entries, scan_segment

NONCE = b"0123456789abcde\0"
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEYS, IDS = st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16)
FAST = settings(max_examples=150, deadline=None)


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


@st.composite
def headers(draw: st.DrawFn) -> rec.RecordHeader:
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=300))
    raw = [size * 2 for size in sizes] if draw(st.booleans()) else sizes
    table = rec.part_table(sizes, raw)
    table["crc32c"] = draw(st.lists(U32, min_size=len(sizes), max_size=len(sizes)))
    return rec.RecordHeader(
        rec.RecordKind.BLOCK,
        draw(U64),
        draw(KEYS),
        draw(KEYS),
        draw(KEYS),
        sum(sizes) + draw(st.integers(0, 9)),
        table,
        draw(U32),
        draw(U32),
        draw(IDS),
        draw(st.integers(0, 65535)),
        0,
        draw(U64),
    )


@FAST
@given(headers(), IDS, st.integers(0, 2**50))
def test_header_round_trip(header: rec.RecordHeader, nonce: bytes, page: int) -> None:
    out = np.full(rec.MAX_HEADER_NBYTES, 0xEE, dtype=np.uint8)
    nbytes = rec.encode_header(header, out)
    rec.place(out, nonce, page * 4096)
    again = rec.decode_header(out[:nbytes])
    assert isinstance(again, rec.RecordHeader)
    assert again.parts.tobytes() == header.parts.tobytes()
    assert (again.nonce, again.offset) == (nonce, page * 4096)
    for name in set(header.__slots__) - {"parts", "nonce", "offset"}:
        assert getattr(again, name) == getattr(header, name), name
    assert bytes(out[nbytes:]) == b"\xee" * (out.nbytes - nbytes)


def any_bytes(magic: bytes) -> st.SearchStrategy[bytes]:
    tail = st.binary(max_size=600).map(lambda data: (data * (9000 // max(len(data), 1)))[:8192])
    return st.one_of(st.binary(max_size=300), tail, tail.map(lambda data: magic + b"\1\0" + data))


@FAST
@given(any_bytes(rec.RECORD_MAGIC), any_bytes(seg.SEGMENT_MAGIC), any_bytes(seg.TRAILER_MAGIC))
def test_arbitrary_bytes_never_raise(record: bytes, segment: bytes, trailer: bytes) -> None:
    assert isinstance(rec.decode_header(array(record)), rec.BadRecord)
    assert isinstance(seg.parse_segment_header(array(segment)), seg.BadSegment)
    assert isinstance(seg.parse_trailer(array(trailer)), seg.BadFooter)


@FAST
@given(st.builds(seg.Trailer, IDS, *[U64] * 4, *[st.integers(0, 99)] * 3, U32), st.binary(max_size=9000))
def test_arbitrary_footers_never_raise(trailer: seg.Trailer, data: bytes) -> None:
    """Even where length and CRC agree."""
    fields = {name: getattr(trailer, name) for name in trailer.__slots__}
    agreeing = {**fields, "footer_nbytes": len(data), "footer_crc": reference.crc32c(data)}
    for one in (trailer, seg.Trailer(**agreeing)):
        assert isinstance(seg.parse_footer(one, array(data)), seg.Footer | seg.BadFooter)


def image_of(sizes: list[int]) -> tuple[bytes, list[tuple[int, int, int]]]:
    """A sealed segment, and (offset, end of used bytes, key number) of each record."""
    page = np.zeros(4096, dtype=np.uint8)
    seg.encode_segment_header(seg.SegmentHeader(b"u" * 16, NONCE, 3, 0, 1 << 26), page)
    data, spans = bytearray(page.tobytes()), []
    builder = seg.FooterBuilder()
    for number, size in enumerate(sizes):
        parts = (size // 2, size - size // 2)
        table = rec.part_table(parts)
        out = np.zeros(rec.record_nbytes_for(parts), dtype=np.uint8)
        out[4096 : 4096 + size] = (np.arange(size) * (number + 7) % 251).astype(np.uint8) + 1
        rec.seal_parts(table, out[4096:])
        key = bytes([number]) * 32
        header = rec.RecordHeader(rec.RecordKind.BLOCK, number, b"n" * 32, key, b"p" * 32, size, table)
        rec.encode_header(header, out)
        rec.place(out, NONCE, len(data))
        builder.add(header, len(data))
        spans.append((len(data), len(data) + 4096 + size, number))
        data += out.tobytes()
    end = len(data)
    data += seg.build_footer(builder.build(), nonce=NONCE, segment_id=3, data_end=end).tobytes()
    return bytes(data), spans


DAMAGE = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.binary(min_size=1, max_size=20), st.integers(1, 3).map(lambda pages: bytes(pages * 4096))),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 20000), max_size=8),
    st.lists(DAMAGE, max_size=4),
    st.floats(0, 1.0),
    st.sampled_from([4096, 12288, 1 << 20]),
)
def test_a_damaged_image_yields_exactly_its_intact_records(
    sizes: list[int], damage: list[tuple[float, bytes]], keep: float, piece: int
) -> None:
    original, spans = image_of(sizes)
    data = bytearray(original)
    for where, patch in damage:
        at = int(where * len(data))
        data[at : at + len(patch)] = patch[: len(data) - at]
    if keep < 0.5:
        del data[int(keep * 2 * len(data)) :]
    damaged = bytes(data)

    def read(offset: int, nbytes: int) -> Bytes:
        return array(damaged[offset : offset + nbytes])

    found = scan_segment(read, len(damaged), piece_nbytes=piece)
    if damaged[:4096] != original[:4096]:
        assert isinstance(found, seg.BadSegment)
        return
    assert isinstance(found, SegmentContents)
    intact = [
        (offset, bytes([number]) * 32)
        for offset, end, number in spans
        if damaged[offset:end] == original[offset:end] and -(-end // 4096) * 4096 <= len(damaged)
    ]
    got = [(int(row["offset"]), row["key"].tobytes()) for row in found.entries]
    if found.state is SegmentState.SEALED:
        # The footer is believed as it stands; a damaged payload behind it is found when it is read.
        assert len(damaged) == len(original)
        assert damaged[-8192:] == original[-8192:]
        assert got == [(offset, bytes([number]) * 32) for offset, _, number in spans]
    else:
        assert got == intact
    assert len(live_entries([found]).entries) == len(got)


@FAST
@given(st.binary(max_size=200), st.integers(0, 9 * 4096))
def test_an_arbitrary_file_never_raises(seed: bytes, nbytes: int) -> None:
    data = (image_of([])[0][:4096] + (rec.RECORD_MAGIC + seed) * 500)[:nbytes]

    def read(offset: int, want: int) -> Bytes:
        return array(data[offset : offset + want])

    found = scan_segment(read, nbytes)
    if isinstance(found, SegmentContents):
        assert len(found.entries) == 0
