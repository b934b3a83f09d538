"""Segments and their sums: what is counted as it changes is what a count of everything gives."""

from __future__ import annotations

import numpy as np
import pytest

from kvterrace.engine.blocks import NOWHERE, BlockTable
from kvterrace.engine.space import SegmentSpace, SegmentState

NBYTES = 1 << 20


def make(segments: int = 8) -> SegmentSpace:
    return SegmentSpace(segments * NBYTES, NBYTES, lambda records, namespaces: 4096)


def test_sums_follow_every_change_of_a_segment() -> None:
    space = make()
    one, two = space.begin(), space.begin()
    assert (one.number, two.number, space.oldest) == (1, 2, 1)
    assert space.file_nbytes == 2 * NBYTES
    one.file_nbytes = 12288
    space.other_nbytes = 100
    assert (space.file_nbytes, one.file_nbytes, two.file_nbytes) == (NBYTES + 12288 + 100, 12288, NBYTES)
    space.remove(one)
    assert (space.file_nbytes, list(space.segments), space.oldest) == (NBYTES + 100, [2], 2)
    three = space.begin()
    assert (three.number, space.file_nbytes) == (3, 2 * NBYTES + 100), "the row of a removed segment is used again"
    assert (three.live_nbytes, two.live_nbytes) == (0, 0)


def test_segments_are_listed_by_state_oldest_first() -> None:
    space = make()
    made = [space.begin() for _ in range(4)]
    for segment in (made[3], made[0], made[2]):
        segment.state = SegmentState.SEALED
    assert space.in_state(SegmentState.SEALED) == [made[0], made[2], made[3]]
    assert space.in_state(SegmentState.CREATING) == [made[1]]
    made[2].state = SegmentState.RECLAIMING
    space.remove(made[0])
    assert space.in_state(SegmentState.SEALED) == [made[3]]
    assert space.columns.sealed.tolist().count(1) == 1


def test_live_blocks_are_counted_where_they_lie() -> None:
    space, table = make(), BlockTable()
    one, two = space.begin(), space.begin()
    ids = table.allocate(5)
    used_s = np.array([1.0, 2.0, 3.0, 4.0, 5.5])
    space.gain(table, one, ids[:3], 30, used_s[:3])
    space.gain(table, two, ids[3:], 20, used_s[3:])
    rows = [one.row, two.row]
    assert table.segment[ids].tolist() == [1, 1, 1, 2, 2]
    assert space.columns.live_blocks[rows].tolist() == [3, 2]
    assert space.columns.used_us[rows].tolist() == [6_000_000, 9_500_000]
    assert (one.live_nbytes, two.live_nbytes, space.live_nbytes) == (30, 20, 50)

    space.touch(table, ids[1:4], used_s[1:4], 10.0)  # from 2 and 3, and from 4
    assert space.columns.used_us[rows].tolist() == [21_000_000, 15_500_000]

    space.lose(table, ids[[0, 4]], 10, used_s[[0, 4]])
    assert space.columns.live_blocks[rows].tolist() == [2, 1]
    assert space.columns.used_us[rows].tolist() == [20_000_000, 10_000_000]
    assert (one.live_nbytes, two.live_nbytes, space.live_nbytes) == (20, 10, 30)
    assert table.segment[ids].tolist() == [NOWHERE, 1, 1, 2, NOWHERE]
    assert (one.live_ids(table).tolist(), two.live_ids(table).tolist()) == (ids[1:3].tolist(), ids[3:4].tolist())
    space.touch(table, ids[[0, 4]], used_s[[0, 4]], 99.0)  # without a copy: no segment is any younger
    assert space.columns.used_us[rows].tolist() == [20_000_000, 10_000_000]


def test_a_block_that_comes_again_is_live_once() -> None:
    space, table = make(), BlockTable()
    segment = space.begin()
    ids = table.allocate(2)
    for _ in range(3):
        space.gain(table, segment, ids, 20, np.zeros(2))
        space.lose(table, ids[1:], 10, np.zeros(1))
        space.lose(table, ids[:1], 10, np.zeros(1))
    space.gain(table, segment, ids[::-1], 20, np.zeros(2))
    assert sorted(segment.live_ids(table).tolist()) == ids.tolist()
    assert (segment.live_nbytes, space.live_nbytes) == (20, 20)


def test_what_would_spoil_the_books_is_a_bug() -> None:
    space, table = make(2), BlockTable()
    segment = space.begin()
    ids = table.allocate(1)
    space.gain(table, segment, ids, 10, np.zeros(1))
    with pytest.raises(AssertionError, match="what is live in it"):
        space.remove(segment)
    with pytest.raises(AssertionError, match="lost more than it held"):
        space.lose(table, ids, 11, np.zeros(1))
    with pytest.raises(AssertionError, match="segment 1 after 1"):
        space.adopt(1, SegmentState.SEALED, 4096)
    space.begin()
    with pytest.raises(AssertionError, match="over the cap"):
        space.begin()


def test_rows_grow_and_are_used_again() -> None:
    space = make(1000)
    segments = [space.begin() for _ in range(300)]
    rows = len(space.columns.number)
    for segment in segments[::2]:
        space.remove(segment)
    more = [space.begin() for _ in range(150)]
    assert len(space.columns.number) == rows
    assert space.file_nbytes == 300 * NBYTES
    assert sorted(space.columns.number[space.columns.number > 0]) == sorted(space.segments)
    assert {segment.number for segment in more} == set(range(301, 451))


def test_who_watches_the_table_hears_of_each_copy_that_comes_and_goes() -> None:
    """Whatever makes a copy count, or count no longer: written, found, taken back, lost."""
    space, table = make(), BlockTable()
    heard: list[tuple[str, bytes]] = []
    table.on_enter = lambda tier, keys: heard.append((f"+{tier.name}", keys))
    table.on_leave = lambda tier, keys: heard.append((f"-{tier.name}", keys))
    segment, ids = space.begin(), table.allocate(2)
    table.key[ids] = np.arange(64, dtype=np.uint8).reshape(2, 32)
    first, second = bytes(range(32)), bytes(range(32, 64))
    space.gain(table, segment, ids, 20, np.zeros(2))
    space.lose(table, ids[1:], 10, np.zeros(1))
    assert heard == [("+SSD", first + second), ("-SSD", second)]
