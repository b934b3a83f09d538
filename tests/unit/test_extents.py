"""Extent bookkeeping, case by case."""

from __future__ import annotations

import random

import pytest

from kvterrace.engine.extents import ExtentAllocator

PAGE = 4096


def test_lowest_first_and_rounding() -> None:
    extents = ExtentAllocator(10 * PAGE + 17)
    assert extents.nbytes == extents.free_nbytes == 10 * PAGE
    assert [extents.allocate(1), extents.allocate(PAGE + 1), extents.allocate(PAGE)] == [0, PAGE, 3 * PAGE]
    assert (extents.used_nbytes, extents.size_of(PAGE), len(extents)) == (4 * PAGE, 2 * PAGE, 3)
    assert extents.allocate(7 * PAGE) is None
    assert extents.allocate(6 * PAGE) == 4 * PAGE
    assert (extents.free_nbytes, extents.largest_free_nbytes) == (0, 0)
    assert extents.allocate(1) is None
    extents.check()


def test_best_fit_spares_the_long_extent() -> None:
    extents = ExtentAllocator(16 * PAGE)
    offsets = [extents.allocate(size * PAGE) for size in (4, 1, 2, 1, 8)]
    for offset in (offsets[0], offsets[2]):
        assert offset is not None
        extents.free(offset)
    assert extents.allocate(2 * PAGE) == offsets[2]
    assert extents.largest_free_nbytes == 4 * PAGE


def test_free_merges_on_both_sides() -> None:
    extents = ExtentAllocator(3 * PAGE)
    for _ in range(3):
        extents.allocate(PAGE)
    for offset, largest in [(0, 1), (2 * PAGE, 1), (PAGE, 3)]:
        extents.free(offset)
        extents.check()
        assert extents.largest_free_nbytes == largest * PAGE


@pytest.mark.parametrize("offset", [0, PAGE, 4 * PAGE, -PAGE])
def test_what_is_not_in_use_cannot_be_freed(offset: int) -> None:
    extents = ExtentAllocator(8 * PAGE)
    extents.allocate(2 * PAGE)
    extents.free(0)
    with pytest.raises(AssertionError, match="not in use"):
        extents.free(offset)
    with pytest.raises(AssertionError, match="not in use"):
        extents.size_of(offset)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_extent_is_a_bug(nbytes: int) -> None:
    with pytest.raises(AssertionError):
        ExtentAllocator(PAGE).allocate(nbytes)


def test_an_empty_allocator_has_nothing() -> None:
    extents = ExtentAllocator(PAGE - 1)
    assert (extents.nbytes, extents.allocate(1)) == (0, None)
    extents.check()


def test_thousands_of_equal_extents_in_random_order() -> None:
    count, rng = 20_000, random.Random(1)
    extents = ExtentAllocator(count * 2 * PAGE)
    held = [extents.allocate(2 * PAGE) for _ in range(count)]
    assert extents.free_nbytes == 0
    for _ in range(20_000):
        at = rng.randrange(count)
        offset = held[at]
        assert offset is not None
        extents.free(offset)
        held[at] = extents.allocate(2 * PAGE)
    assert sorted(offset for offset in held if offset is not None) == list(range(0, count * 2 * PAGE, 2 * PAGE))
    rng.shuffle(held)
    for offset in held:
        assert offset is not None
        extents.free(offset)
    extents.check()
    assert extents.largest_free_nbytes == extents.nbytes
