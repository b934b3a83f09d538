"""What a scan finds in whole, torn, holed, cut and lying images; and which blocks live."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

import crc32c as reference
import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.format import record as rec
from kvterrace.format import segment as seg
from kvterrace.format.recovery import ReadAt, SegmentContents, SegmentState, live_entries, scan_segment
from kvterrace.format.segment import BadSegment, FooterBuilder, NewerFormat, SegmentHeader
from kvterrace.types import DeviceFailed

NONCE, OTHER = b"the-right-nonce\0", b"some-other-nonce"
DIGEST = b"d" * 31 + b"\0"


def key(number: int) -> bytes:
    return struct.pack(">Q", number) + bytes(24)


@dataclass
class Image:
    """A segment file under construction."""

    data: bytearray = field(default_factory=bytearray)
    builder: FooterBuilder = field(default_factory=FooterBuilder)
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    nonce: bytes = NONCE

    def __post_init__(self) -> None:
        page = np.zeros(4096, dtype=np.uint8)
        seg.encode_segment_header(SegmentHeader(b"u" * 16, self.nonce, 7, 1, 1 << 26), page)
        self.data += page.tobytes()

    def block(self, number: int, *sizes: int, put_seq: int | None = None, payload: bytes | None = None) -> bytes:
        sizes = sizes or (3000, 6000)
        record = block_bytes(number, sizes, self.nonce, len(self.data), put_seq, payload)
        return self.append(record)

    def tombstone(self, *numbers: int, put_seq: int) -> bytes:
        keys = b"".join(key(number) for number in numbers)
        out = np.zeros(rec.tombstone_nbytes_for(len(numbers)), dtype=np.uint8)
        rec.encode_tombstone(keys, out, put_seq=put_seq, namespace=DIGEST)
        rec.place(out, self.nonce, len(self.data))
        return self.append(out.tobytes(), keys)

    def append(self, record: bytes, keys: bytes = b"") -> bytes:
        header = rec.decode_header(np.frombuffer(record, dtype=np.uint8))
        assert isinstance(header, rec.RecordHeader)
        self.builder.add(header, tombstone_keys=keys)
        self.offsets.append(len(self.data))
        self.data += record
        self.ends.append(len(self.data))
        return record

    def seal(self) -> bytes:
        at = len(self.data)
        tables = self.builder.build()
        return bytes(self.data) + seg.build_footer(tables, nonce=self.nonce, segment_id=7, data_end=at).tobytes()


def block_bytes(
    number: int,
    sizes: tuple[int, ...],
    nonce: bytes,
    offset: int,
    put_seq: int | None = None,
    payload: bytes | None = None,
) -> bytes:
    table = rec.part_table(sizes)
    out = np.zeros(rec.record_nbytes_for(sizes), dtype=np.uint8)
    start = rec.header_nbytes_for(len(sizes))
    body = os.urandom(sum(sizes)) if payload is None else payload
    out[start : start + sum(sizes)] = np.frombuffer(body, dtype=np.uint8)
    rec.seal_parts(table, out[start:])
    header = rec.RecordHeader(
        rec.RecordKind.BLOCK,
        number if put_seq is None else put_seq,
        DIGEST,
        key(number),
        key(number - 1),
        sum(sizes),
        table,
    )
    rec.encode_header(header, out)
    rec.place(out, nonce, offset)
    return out.tobytes()


class Disk:
    """Reads out of one memory that the next read overwrites, as a real reader does; counts what it gave."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = bytes(data)
        self.memory = np.zeros(0, dtype=np.uint8)
        self.reads: list[tuple[int, int]] = []

    def __call__(self, offset: int, nbytes: int) -> Bytes:
        assert offset % 4096 == nbytes % 4096 == 0
        self.memory[:] = 0xEE
        piece = self.data[offset : offset + nbytes]
        self.memory = np.frombuffer(bytearray(piece), dtype=np.uint8)
        self.reads.append((offset, nbytes))
        return self.memory


def scan(data: bytes | bytearray, read: ReadAt | None = None, piece_nbytes: int = 1 << 20) -> SegmentContents:
    found = scan_segment(read or Disk(data), len(data), piece_nbytes=piece_nbytes)
    assert isinstance(found, SegmentContents), found
    return found


def keys_of(found: SegmentContents) -> list[bytes]:
    return [item.tobytes() for item in found.entries["key"]]


def blocks(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def six() -> Image:
    image = Image()
    for number in range(1, 7):
        image.block(number, 2000 * number, 300)
    return image


def test_sealed_segment_is_three_reads() -> None:
    image = six()
    image.tombstone(1, 99, put_seq=7)
    data = image.seal()
    disk = Disk(data)
    found = scan(data, disk)
    assert (found.state, found.problems) == (SegmentState.SEALED, [])
    assert len(disk.reads) == 3
    assert sum(nbytes for _, nbytes in disk.reads) == 3 * 4096
    assert keys_of(found)[:6] == blocks(*range(1, 7))
    assert found.entries["offset"].tolist() == image.offsets
    assert (found.data_end, found.file_nbytes) == (image.ends[-1], len(data))
    assert [(row["key"].tobytes(), int(row["put_seq"])) for row in found.tombstones] == [(key(1), 7), (key(99), 7)]


@pytest.mark.parametrize("piece_nbytes", [4096, 8192, 5 * 4096, 1 << 20])
def test_scan_finds_exactly_what_the_footer_says(piece_nbytes: int) -> None:
    image = six()
    image.tombstone(*range(1000, 1300), put_seq=7)  # a payload of three pages
    image.block(8, *([2048] * 600))  # a header of three pages, a payload of 1.2 MiB
    sealed = scan(image.seal())
    disk = Disk(image.data)
    found = scan(image.data, disk, piece_nbytes)
    assert found.state is SegmentState.SCANNED
    assert found.entries.tobytes() == sealed.entries.tobytes()
    assert found.tombstones.tobytes() == sealed.tombstones.tobytes()
    assert (found.namespaces, found.data_end) == (sealed.namespaces, sealed.data_end)
    assert max(nbytes for _, nbytes in disk.reads) <= piece_nbytes
    assert sum(nbytes for _, nbytes in disk.reads) <= len(image.data) + 2 * 4096 + piece_nbytes


def test_preallocated_zeros_behind_the_data_are_no_records() -> None:
    image = six()
    found = scan(image.data + bytes(40 * 4096))
    assert keys_of(found) == blocks(*range(1, 7))
    assert found.data_end == image.ends[-1]


@pytest.mark.parametrize("sealed", [False, True])
def test_cut_anywhere_keeps_what_lies_before_the_cut(sealed: bool) -> None:
    image = six()
    data = image.seal() if sealed else bytes(image.data)
    for page in range(0, len(data), 4096):
        for cut in {page, page + 1, page + 511, page + 4095} - {len(data)}:
            found = scan_segment(Disk(data[:cut]), cut)
            if cut < 4096:
                assert isinstance(found, BadSegment)
                continue
            assert isinstance(found, SegmentContents)
            assert found.state is SegmentState.SCANNED
            whole = [n for n, end in enumerate(image.ends, 1) if end <= cut]
            assert keys_of(found) == blocks(*whole), cut
            assert found.data_end == (image.ends[whole[-1] - 1] if whole else 4096)


def test_cut_inside_a_long_header_or_behind_the_last_part() -> None:
    image = Image()
    image.block(1, *([1] * 600))
    table = rec.part_table((10,))
    out = np.zeros(4096 + 8192, dtype=np.uint8)
    rec.seal_parts(table, out[4096:])
    rec.encode_header(rec.RecordHeader(rec.RecordKind.BLOCK, 2, DIGEST, key(2), key(1), 8000, table), out)
    rec.place(out, NONCE, len(image.data))
    image.append(out.tobytes())
    asked: list[int] = []

    def read(offset: int, nbytes: int) -> Bytes:
        asked.append(nbytes)
        return np.frombuffer(bytes(image.data[offset : offset + nbytes]), dtype=np.uint8)

    for cut in range(4096, len(image.data), 4096):
        found = scan_segment(read, cut, piece_nbytes=4096)
        assert isinstance(found, SegmentContents)
        assert keys_of(found) == blocks(*(n for n, end in enumerate(image.ends, 1) if end <= cut))
    assert min(asked) == 4096


def test_a_file_that_shrank_since_it_was_listed_is_a_short_read() -> None:
    image = six()
    for cut in (4096, image.ends[2], image.ends[2] + 4096, image.ends[2] + 4097):
        found = scan_segment(Disk(image.data[:cut]), len(image.data))
        assert isinstance(found, SegmentContents)
        assert keys_of(found) == blocks(1, 2, 3)[: 0 if cut == 4096 else 3]
        assert found.problems
    assert isinstance(scan_segment(Disk(b""), len(image.data)), DeviceFailed)


def test_a_hole_hides_nothing_behind_it() -> None:
    image = six()
    for page in range(4096, len(image.data), 4096):
        data = bytearray(image.data)
        data[page : page + 4096] = bytes(4096)
        hit = next(n for n, end in enumerate(image.ends, 1) if page < end)
        assert keys_of(scan(data)) == blocks(*(n for n in range(1, 7) if n != hit)), page


def test_every_flipped_used_byte_loses_only_its_record() -> None:
    image = Image()
    for number in (1, 2, 3):
        image.block(number, 100, 50)
    start = image.offsets[1]
    for at in [*range(4096), *range(4096, 4096 + 150)]:
        data = bytearray(image.data)
        data[start + at] ^= 1 << at % 8
        assert keys_of(scan(data)) == blocks(1, 3), at
    data = bytearray(image.data)
    data[start + 4096 + 150 : start + 8192] = b"\xff" * (4096 - 150)
    assert keys_of(scan(data)) == blocks(1, 2, 3), "padding is nobody's"


def test_a_damaged_footer_or_trailer_falls_back_to_the_scan() -> None:
    image = six()
    data = bytearray(image.seal())
    right = scan(data)
    used = 32 + 6 * 144
    for at in [*range(used), *range(used, 4096, 61), *range(4096, 4096 + 80), *range(4096 + 80, 8192, 61)]:
        place = len(image.data) + at
        data[place] ^= 1 << at % 8
        found = scan(data)
        assert found.state is SegmentState.SCANNED
        assert found.entries.tobytes() == right.entries.tobytes()
        assert found.problems
        data[place] ^= 1 << at % 8
    assert scan(data).state is SegmentState.SEALED


def test_a_footer_of_another_segment_is_not_believed() -> None:
    image, other = Image(), Image(nonce=OTHER)
    image.block(1)
    other.block(2)
    data = bytes(image.data) + other.seal()[len(other.data) :]
    found = scan(data)
    assert (found.state, keys_of(found)) == (SegmentState.SCANNED, blocks(1))


def test_a_footer_followed_by_more_bytes_is_not_believed() -> None:
    image = six()
    sealed = image.seal()
    tail = sealed[len(image.data) :]
    assert scan(sealed + bytes(4096)).state is SegmentState.SCANNED
    assert scan(sealed + tail[-4096:]).state is SegmentState.SCANNED, "the right trailer in the wrong place"


def test_a_damaged_segment_header_is_a_value() -> None:
    image = six()
    data = bytearray(image.seal())
    for at in range(4096):
        data[at] ^= 1 << at % 8
        assert isinstance(scan_segment(Disk(data), len(data)), BadSegment), at
        data[at] ^= 1 << at % 8
    data[8:10] = struct.pack("<H", 9)
    data[12:16] = bytes(4)
    data[12:16] = struct.pack("<I", reference.crc32c(bytes(data[:4096])))
    assert scan_segment(Disk(data), len(data)) == NewerFormat(9)


@pytest.mark.parametrize("data", [b"", b"\0", bytes(4095), bytes(4096), b"\xff" * 8192, bytes(1 << 20)])
def test_a_leftover_file_is_a_value(data: bytes) -> None:
    assert isinstance(scan_segment(Disk(data), len(data)), BadSegment)


def test_a_file_that_somebody_stretched_is_not_read_to_its_end() -> None:
    sealed = six().seal()
    asked: list[int] = []

    def read(offset: int, nbytes: int) -> Bytes:
        asked.append(nbytes)
        assert sum(asked) < 1 << 20, "on and on"
        data = sealed[offset : offset + nbytes]
        return np.frombuffer(data + bytes(nbytes - len(data)), np.uint8)

    found = scan_segment(read, 1 << 40)
    assert isinstance(found, BadSegment) and "larger" in found.reason


def test_records_of_an_older_segment_in_the_same_place_are_ignored() -> None:
    old, new = Image(nonce=OTHER), Image()
    for number in range(1, 7):
        old.block(number, 5000)
    new.block(100, 5000)
    found = scan(new.data + old.data[len(new.data) :])
    assert keys_of(found) == blocks(100)
    assert found.data_end == new.ends[0]


def test_a_record_in_another_place_of_its_segment_is_ignored() -> None:
    image = Image()
    first = image.block(1)
    image.block(2)
    found = scan(image.data + first)
    assert keys_of(found) == blocks(1, 2)
    assert any("belongs at 4096" in problem for problem in found.problems)


@pytest.mark.parametrize("torn", [False, True])
def test_a_record_inside_a_payload_is_ignored(torn: bool) -> None:
    image = Image()
    image.block(1)
    place = len(image.data) + 4096  # page-aligned inside the payload, with its own offset right
    fake = block_bytes(666, (100,), OTHER, place)
    image.block(2, len(fake) + 10, payload=fake + b"0123456789")
    image.block(3)
    data = bytearray(image.data)
    if torn:
        data[image.offsets[1] + 60] ^= 1
    assert keys_of(scan(data)) == (blocks(1, 3) if torn else blocks(1, 2, 3))


def test_a_device_error_hides_nothing_behind_its_piece() -> None:
    image = six()
    disk = Disk(image.data)

    def failing(offset: int, nbytes: int) -> Bytes:
        if offset <= image.offsets[2] < offset + nbytes:
            raise OSError(5, "Input/output error")
        return disk(offset, nbytes)

    found = scan(image.data, failing, piece_nbytes=4096)
    assert keys_of(found) == blocks(1, 2, 4, 5, 6)
    assert any("Input/output error" in problem for problem in found.problems)

    def dead(offset: int, nbytes: int) -> Bytes:
        raise OSError(5, "Input/output error")

    assert isinstance(scan_segment(dead, len(image.data)), DeviceFailed)


def test_problems_are_bounded() -> None:
    image = Image()
    first = image.block(1, 10)
    found = scan(image.data + first * 300)
    assert keys_of(found) == blocks(1)
    assert len(found.problems) == 101


def live(*images: Image) -> list[tuple[bytes, int, int]]:
    result = live_entries([scan(image.data) for image in images])
    return [
        (row["key"].tobytes(), int(row["put_seq"]), int(number))
        for row, number in zip(result.entries, result.segments, strict=True)
    ]


def test_live_entries_of_nothing() -> None:
    assert live() == []
    assert live(Image(), Image()) == []


def test_the_newest_copy_wins_and_tombstones_kill_what_is_older() -> None:
    one, two = Image(), Image(nonce=OTHER)
    for number, put_seq in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5)):
        one.block(number, put_seq=put_seq)
    two.block(1, put_seq=10)  # written again
    two.block(2, put_seq=2)  # carried forward
    two.tombstone(3, 4, 77, put_seq=11)
    two.block(4, put_seq=12)  # put again after it was dropped
    two.tombstone(5, put_seq=5)  # not newer than the block
    expected = [(key(5), 5, 0), (key(1), 10, 1), (key(2), 2, 1), (key(4), 12, 1)]
    assert live(one, two) == expected
    assert sorted((k, s) for k, s, _ in live(two, one)) == sorted((k, s) for k, s, _ in expected)


def test_live_entries_tell_keys_apart_that_share_their_first_bytes() -> None:
    image = Image()
    for number in range(1, 4):
        image.block(number)
    data = scan(image.data)
    data.entries["key"][0] = np.void(b"same8bytes" + bytes(22))
    data.entries["key"][1] = np.void(b"same8bytes" + bytes(21) + b"\1")
    data.entries["key"][2] = np.void(b"same8bytes" + bytes(21) + b"\1")
    found = live_entries([data])
    assert found.entries["put_seq"].tolist() == [1, 3]


def test_live_entries_join_namespace_tables() -> None:
    one, two = scan(six().data), scan(six().data)
    two.entries["put_seq"] += np.uint64(100)
    two = SegmentContents(
        two.header, two.state, two.entries, (b"e" * 32,), two.tombstones, two.data_end, two.file_nbytes
    )
    before = two.entries.tobytes()
    found = live_entries([one, two])
    assert found.namespaces == (DIGEST, b"e" * 32)
    assert found.entries["namespace"].tolist() == [1] * 6
    assert two.entries.tobytes() == before


def test_live_entries_against_a_dict_on_random_histories() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        count = 400
        entries = np.zeros(count, dtype=seg.ENTRY_DTYPE)
        words = rng.integers(0, 6, (count, 4)).astype("<u8")
        words[:, 1:3] = 0
        entries["key"] = words.view("V32").reshape(-1)
        entries["put_seq"] = rng.permutation(count)
        entries["kind"] = 1
        tombstones = np.zeros(60, dtype=seg.TOMBSTONE_DTYPE)
        tombstones["key"] = entries["key"][rng.integers(0, count, 60)]
        tombstones["put_seq"] = rng.integers(0, count, 60)
        header = SegmentHeader(b"u" * 16, NONCE, 1, 1, 1)
        cut = int(rng.integers(0, count))
        parts = [
            SegmentContents(header, SegmentState.SEALED, table, (DIGEST,), dead, 4096, 4096)
            for table, dead in ((entries[:cut], tombstones[:30]), (entries[cut:], tombstones[30:]))
        ]
        model: dict[bytes, int] = {}
        for row in entries:
            name = row["key"].tobytes()
            model[name] = max(model.get(name, -1), int(row["put_seq"]))
        for row in tombstones:
            name = row["key"].tobytes()
            if model.get(name, 1 << 60) < int(row["put_seq"]):
                del model[name]
        found = live_entries(parts).entries
        assert {row["key"].tobytes(): int(row["put_seq"]) for row in found} == model
        assert len(found) == len(model)
