"""Mutated segment files against the parsers of footers and records.

    python -m tests.fuzz.segments SECONDS [SEED]      a loop of its own: mutations of valid images
    python -m tests.fuzz.segments --atheris ...       atheris, where it is installed; the rest is for libFuzzer
    python -m tests.fuzz.segments --seeds FOLDER      a small corpus for the two

An input is a byte that picks an image, one of choices, then mutations of 6 bytes: what, place (4 bytes), value.
Whatever comes of it, the parsers answer with a documented outcome and raise nothing; they say of no byte outside the
file that it is part of something; and where no CRC was made to fit the damage, what they find was written, as it was
written.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import struct
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format import growing, recovery
from kvterrace.format import record as rec
from kvterrace.format import segment as seg
from kvterrace.format.checksum import crc32c
from kvterrace.format.growing import scan_onward
from kvterrace.format.recovery import SegmentContents, SegmentState, live_entries, read_sealed, scan_segment
from kvterrace.types import DeviceFailed

PAGE = 4096
NONCE = b"the-right-nonce\0"
_MUTATION = struct.Struct("<BIB")
_CRC = struct.Struct("<I")

Found = SegmentContents | seg.SegmentHeader | seg.BadSegment | seg.NewerFormat | DeviceFailed


@cache
def images() -> list[bytes]:
    """Valid files: sealed, not sealed, with tombstones, with nothing, with a record whose header has two pages."""
    plain = [(3000, 6000), (1,), (4096, 4096, 8)]
    return [
        _image(plain, tombstones=3, sealed=True),
        _image(plain, tombstones=3, sealed=False),
        _image([(16,) * 300], tombstones=0, sealed=True),
        _image([], tombstones=0, sealed=True),
        _image([(5000,)] * 12, tombstones=200, sealed=False),
        _image([(5000,)] * 12, tombstones=200, sealed=True),
    ]


def _image(blocks: list[tuple[int, ...]], *, tombstones: int, sealed: bool) -> bytes:
    page = np.zeros(PAGE, np.uint8)
    seg.encode_segment_header(seg.SegmentHeader(b"u" * 16, NONCE, 7, 1, 1 << 26), page)
    data, builder = bytearray(page.tobytes()), seg.FooterBuilder()
    for number, sizes in enumerate(blocks, 1):
        table, out = rec.part_table(sizes), np.zeros(rec.record_nbytes_for(sizes), np.uint8)
        start = rec.header_nbytes_for(len(sizes))
        out[start : start + sum(sizes)] = np.random.default_rng(number).integers(0, 256, sum(sizes), np.uint8)
        rec.seal_parts(table, out[start:])
        key = bytes([number]) * 32
        kind, nbytes = rec.RecordKind.BLOCK, sum(sizes)
        rec.encode_header(rec.RecordHeader(kind, number, b"d" * 32, key, bytes(32), nbytes, table), out)
        _append(data, builder, out, b"")
    if tombstones:
        keys = b"".join(bytes([255, number]) * 16 for number in range(tombstones))
        out = np.zeros(rec.tombstone_nbytes_for(tombstones), np.uint8)
        rec.encode_tombstone(keys, out, put_seq=99, namespace=b"d" * 32)
        _append(data, builder, out, keys)
    if sealed:
        data += seg.build_footer(builder.build(), nonce=NONCE, segment_id=7, data_end=len(data)).tobytes()
    return bytes(data)


def _append(data: bytearray, builder: seg.FooterBuilder, out: Bytes, keys: bytes) -> None:
    rec.place(out, NONCE, len(data))
    header = rec.decode_header(out)
    assert isinstance(header, rec.RecordHeader)
    builder.add(header, tombstone_keys=keys)
    data += out.tobytes()


def mutated(data: bytes) -> tuple[bytes, bytes, bool]:
    """The valid file, what the input makes of it, and whether a CRC was made to fit."""
    valid = images()[data[0] % len(images())]
    choices, file = data[1], bytearray(valid)
    for at in range(2, len(data) - _MUTATION.size + 1, _MUTATION.size):
        what, place, value = _MUTATION.unpack_from(data, at)
        pages = max(1, len(file) // PAGE)
        match what % 8:
            case 0:  # cut
                del file[place % (len(file) + 1) :]
            case 1:  # longer
                file += bytes([value]) * (place % (3 * PAGE))
            case 2:  # a page from elsewhere
                source = valid[value % (len(valid) // PAGE) * PAGE :][:PAGE]
                file[place % pages * PAGE : place % pages * PAGE + PAGE] = source
            case 3:  # a number of the header, of a record, of a footer or a trailer
                start = place % pages * PAGE + value // 8 * 8
                file[start : start + 8] = struct.pack("<Q", place * 0x1_0000_0001)[: len(file[start : start + 8])]
            case 4 | 5 if file:  # at the beginning of a page, where the fields are
                start = place % pages * PAGE
                file[min(len(file) - 1, start + (place >> 16) % 256)] = value
            case _ if file:
                file[place % len(file)] = value
    fits = bool(choices & 1)
    if fits:
        _renew(file)
    return valid, bytes(file), fits


def _renew(file: bytearray) -> None:
    """Make the CRC of each page that looks like a header, a trailer or a record fit, and that of the footer."""
    for at in range(0, len(file) - PAGE + 1, PAGE):
        view = np.frombuffer(file, np.uint8)[at:]
        magic = bytes(file[at : at + 8])
        if magic == rec.RECORD_MAGIC:
            nbytes = rec.peek_header_nbytes(view[:PAGE].copy())
            if isinstance(nbytes, int) and nbytes <= view.nbytes:
                view[16:20] = 0
                _CRC.pack_into(file, at + 16, crc32c(view[:nbytes]))
        elif magic in (seg.SEGMENT_MAGIC, seg.TRAILER_MAGIC):
            trailer = None
            view[12:16] = 0
            _CRC.pack_into(file, at + 12, crc32c(view[:PAGE]))
            if magic == seg.TRAILER_MAGIC:
                trailer = seg.parse_trailer(view[:PAGE].copy())
            if isinstance(trailer, seg.Trailer):
                footer = bytes(file[trailer.footer_offset : trailer.footer_offset + trailer.footer_nbytes])
                old = _CRC.pack(trailer.footer_crc)
                where = file.find(old, at, at + PAGE)
                if where >= 0:
                    _CRC.pack_into(file, where, crc32c(np.frombuffer(footer, np.uint8)))
                    view[12:16] = 0
                    _CRC.pack_into(file, at + 12, crc32c(view[:PAGE]))


def one_input(data: bytes) -> None:
    """Raises where a parser breaks its word."""
    if len(data) < 2:
        return
    valid, file, fits = mutated(data)
    memory = np.frombuffer(file, np.uint8)

    def read(offset: int, nbytes: int) -> Bytes:
        assert offset >= 0 and nbytes >= 0 and offset % PAGE == nbytes % PAGE == 0, (offset, nbytes)
        return memory[offset : offset + nbytes]

    piece = PAGE << (data[1] >> 4) % 5
    found = scan_segment(read, len(file), piece_nbytes=piece)
    assert isinstance(found, SegmentContents | seg.BadSegment | seg.NewerFormat | DeviceFailed)
    index = read_sealed(read, len(file))
    assert isinstance(index, Found)
    if isinstance(found, SegmentContents):
        assert isinstance(index, seg.SegmentHeader if found.state is SegmentState.SCANNED else SegmentContents)
        _check(found, file, valid, fits)
        live = live_entries([found])
        assert len(live.entries) <= len(found.entries)
    else:
        assert index == found
    if len(file) >= 2 * PAGE:
        footer, end = scan_onward(read, NONCE, PAGE, len(file), most=len(file))
        assert PAGE <= end <= len(file)
        _check_entries(footer, end, file, valid, fits)


def _check(found: SegmentContents, file: bytes, valid: bytes, fits: bool) -> None:
    assert found.data_end <= len(file) == found.file_nbytes
    assert len(found.problems) <= 101
    assert found.header.nonce == NONCE or fits
    _check_entries(seg.Footer(found.entries, found.namespaces, found.tombstones), found.data_end, file, valid, fits)


def _check_entries(footer: seg.Footer, data_end: int, file: bytes, valid: bytes, fits: bool) -> None:
    before = PAGE
    for entry in footer.entries:
        offset, nbytes = int(entry["offset"]), int(entry["record_nbytes"])
        assert before <= offset and offset + nbytes <= data_end
        assert int(entry["namespace"]) < len(footer.namespaces)
        before = offset + nbytes
    if fits:
        return
    known = _contents(valid)
    for entry in footer.entries:
        assert entry.tobytes() in known[0], entry
    for tombstone in footer.tombstones:
        assert tombstone.tobytes() in known[1]
    assert set(footer.namespaces) <= {b"d" * 32}


@cache
def _contents(valid: bytes) -> tuple[set[bytes], set[bytes]]:
    memory = np.frombuffer(valid, np.uint8)
    found = scan_segment(lambda offset, nbytes: memory[offset : offset + nbytes], len(valid))
    assert isinstance(found, SegmentContents)
    return {entry.tobytes() for entry in found.entries}, {one.tobytes() for one in found.tombstones}


def random_input(rng: random.Random) -> bytes:
    """One for the loop without coverage."""
    mutations = b"".join(
        _MUTATION.pack(rng.randrange(256), rng.randrange(1 << 32), rng.randrange(256))
        for _ in range(rng.choice((1, 1, 2, 3, 8)))
    )
    return bytes([rng.randrange(256), rng.randrange(256)]) + mutations


def _parsers() -> Iterator[FunctionType]:
    for module in (rec, seg, recovery, growing):
        owners = [vars(module), *(vars(one) for one in vars(module).values() if inspect.isclass(one))]
        for one in itertools.chain.from_iterable(owner.values() for owner in owners):
            if isinstance(one, FunctionType) and one.__module__ == module.__name__:
                yield one


def main(words: list[str]) -> None:
    """As the module says."""
    if words[0] == "--seeds":
        folder, rng = Path(words[1]), random.Random(1)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(64):
            (folder / f"{number:02}").write_bytes(random_input(rng))
    elif words[0] == "--atheris":
        atheris = importlib.import_module("atheris")
        for function in _parsers():
            atheris.instrument_func(function)
        atheris.Setup([sys.argv[0], *words[1:]], one_input)
        atheris.Fuzz()
    else:
        end_s, runs = time.monotonic() + float(words[0]), 0
        rng = random.Random(int(words[1]) if len(words) > 1 else None)
        while time.monotonic() < end_s:
            data = random_input(rng)
            try:
                one_input(data)
            except BaseException:
                sys.stderr.write(f"input {data.hex()}\n")
                raise
            runs += 1
        sys.stdout.write(f"segments: {runs} inputs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
