"""The extent allocator against a model that is a list of units."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvterrace.engine.extents import ExtentAllocator

UNIT = 16
UNITS = 40


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12 * UNIT)), max_size=80))
def test_it_agrees_with_a_list_of_units(steps: list[tuple[bool, int]]) -> None:
    extents = ExtentAllocator(UNITS * UNIT, align=UNIT)
    owner: list[int | None] = [None] * UNITS  # unit -> offset of the extent that holds it
    for is_free, number in steps:
        held = sorted({offset for offset in owner if offset is not None})
        if is_free and held:
            offset = held[number % len(held)]
            extents.free(offset)
            owner = [None if unit == offset else unit for unit in owner]
        else:
            nbytes = number + 1
            units = -(-nbytes // UNIT)
            gaps = _gaps(owner)
            got = extents.allocate(nbytes)
            fitting = [(length, start) for start, length in gaps if length >= units]
            assert got == (min(fitting)[1] * UNIT if fitting else None)
            if got is not None:
                first = got // UNIT
                assert owner[first : first + units] == [None] * units
                owner[first : first + units] = [got] * units
                assert extents.size_of(got) == units * UNIT
        extents.check()
        assert extents.free_nbytes == owner.count(None) * UNIT
        assert extents.used_nbytes + extents.free_nbytes == extents.nbytes
        assert extents.largest_free_nbytes == max((length for _, length in _gaps(owner)), default=0) * UNIT
    for offset in {offset for offset in owner if offset is not None}:
        extents.free(offset)
    extents.check()
    assert extents.largest_free_nbytes == extents.free_nbytes == UNITS * UNIT


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 6)), max_size=60))
def test_many_at_once_overlap_nothing_and_miss_nothing(steps: list[tuple[bool, int, int]]) -> None:
    """`is_free`, units of each, how many: against a set of units that are taken."""
    extents = ExtentAllocator(UNITS * UNIT, align=UNIT)
    held: dict[int, int] = {}  # offset -> units
    for is_free, units, count in steps:
        if is_free:
            some = sorted(held)[::units][:count]
            assert extents.free_all(some) == [held[offset] * UNIT for offset in some]
            for offset in some:
                del held[offset]
            continue
        if count == 1 and units == 1:  # one by one merges what is loose, and must find the same room
            one = extents.allocate(UNIT)
            got = [] if one is None else [one]
        else:
            got = extents.allocate_all(units * UNIT, count)
        taken = {offset // UNIT + unit for offset, size in held.items() for unit in range(size)}
        for offset in got:
            mine = set(range(offset // UNIT, offset // UNIT + units))
            assert not mine & taken and max(mine) < UNITS
            taken |= mine
            held[offset] = units
        if len(got) < count:
            free = sorted(set(range(UNITS)) - taken)
            longest = run = 0
            for at, unit in enumerate(free):
                run = run + 1 if at and free[at - 1] == unit - 1 else 1
                longest = max(longest, run)
            assert longest < units, "there was room for one more"
        assert extents.free_nbytes == (UNITS - len(taken)) * UNIT
    extents.check()
    assert len(extents) == len(held)


def _gaps(owner: list[int | None]) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    for unit, offset in enumerate(owner):
        if offset is None:
            if gaps and sum(gaps[-1]) == unit:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + 1)
            else:
                gaps.append((unit, 1))
    return gaps
