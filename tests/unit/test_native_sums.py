"""CRC32C of the native module: alone, carried on, put together, and taken while bytes are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import crc32c as reference
import numpy as np
import pytest

from kvterrace.buffers import Bytes

native: Any = pytest.importorskip("kvterrace._native", reason="the native module is not built")

Sum = Callable[..., int]
SUMS = [native.crc32c, native.crc32c_software]
COPIES = [native.copy_crc32c, native.stream_crc32c]
#: Around every boundary inside: words, lanes of 256 and 2,048 bytes, stretches of three, pieces of 4 KiB.
LENGTHS = sorted(
    {a * b + c for a in (256, 512, 2048, 4096) for b in (1, 2, 3, 4, 6, 7) for c in (-9, -1, 0, 1, 63, 65)}
)


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("crc", SUMS)
@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, B.4; and the check value of the polynomial
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (
            bytes.fromhex("01c00000000000000000000000000000140000000000040000000014000000182800000000000000")
            + bytes.fromhex("0200000000000000"),
            0xD9963A56,
        ),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(crc: Sum, data: bytes, expected: int) -> None:
    assert crc(data) == expected


@pytest.mark.parametrize("crc", SUMS)
def test_every_length_at_every_alignment(crc: Sum) -> None:
    data = random_bytes(1100)
    for start in range(16):
        for nbytes in range(1026):
            piece = data[start : start + nbytes]
            assert crc(piece) == reference.crc32c(piece.data), (start, nbytes)


@pytest.mark.parametrize("crc", SUMS)
def test_long_data_and_lengths_around_every_lane(crc: Sum) -> None:
    data = random_bytes((3 << 20) + 77)
    for nbytes in [*LENGTHS, 1 << 20, data.size - 5]:
        for start in (0, 1, 5):
            piece = data[start : start + nbytes]
            assert crc(piece, 0xDEADBEEF) == reference.crc32c(piece.data, 0xDEADBEEF), (start, nbytes)


@pytest.mark.parametrize("crc", SUMS)
def test_a_sum_is_carried_on(crc: Sum) -> None:
    data = random_bytes(40_000)
    whole = reference.crc32c(data.data)
    for cut in (0, 1, 7, 8, 767, 768, 6144, 39_999, 40_000):
        assert crc(data[cut:], crc(data[:cut])) == whole


@pytest.mark.parametrize("nbytes_b", [0, 1, 7, 256, 4096, 65_537])
def test_two_sums_are_put_together(nbytes_b: int) -> None:
    data = random_bytes(1000 + nbytes_b)
    a, b = reference.crc32c(data[:1000].data), reference.crc32c(data[1000:].data)
    assert native.crc32c_combine(a, b, nbytes_b) == reference.crc32c(data.data)


@pytest.mark.parametrize(("a", "b"), [(1, 2), (1 << 20, 3 << 20), (1 << 40, (1 << 40) + 1), (1 << 62, 12345)])
def test_lengths_of_any_size_add_up(a: int, b: int) -> None:
    zeros = native.crc32c_combine(native.crc32c_combine(0x12345678, 0, a), 0, b)
    assert zeros == native.crc32c_combine(0x12345678, 0, a + b)
    assert zeros != 0x12345678


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_the_source_and_has_its_sum(copy: Sum) -> None:
    data = random_bytes(40_000)
    for nbytes in [*range(0, 200, 7), 1599, 1600, 1601, *LENGTHS]:
        for to, start in ((0, 0), (1, 0), (0, 3), (13, 8), (63, 1)):
            memory = np.full(nbytes + 200, 0xA5, np.uint8)
            base = -memory.__array_interface__["data"][0] % 64 + to
            source = data[start : start + nbytes]
            assert copy(memory[base : base + nbytes], source) == reference.crc32c(source.data), (nbytes, to, start)
            assert np.array_equal(memory[base : base + nbytes], source), (nbytes, to, start)
            assert (memory[:base] == 0xA5).all() and (memory[base + nbytes :] == 0xA5).all(), (nbytes, to, start)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_another_size_is_refused(copy: Sum) -> None:
    target = bytearray(b"....")
    with pytest.raises(ValueError, match="a copy of 5 B does not fill 4 B"):
        copy(target, b"12345")
    assert target == b"...."
    with pytest.raises(BufferError):
        copy(b"4444", b"1234")


def test_memory_that_is_not_in_one_piece_is_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        native.crc32c(np.zeros((8, 8), np.uint8)[:, ::2])


def test_the_cpu_s_instruction_is_used_where_the_package_finds_it() -> None:
    assert (native.crc32c_kernel() == "software") is (not reference.hardware_based)
