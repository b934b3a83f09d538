"""Blocks that another process wrote, entered one look after the other: which copy counts, what waits, what is dead."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.harness import LARGE, SMALL, chain_of
from tests.shared import Library

from kvterrace.engine import grafting
from kvterrace.engine.grafting import Grafts, Row
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.shared_ledger import SharedLedger
from kvterrace.engine.space import SegmentState
from kvterrace.keys import KeyChain
from kvterrace.testing.invariants import check_ledger

_SIZES = {SMALL.digest: Geometry(4096, 256), LARGE.digest: Geometry(4096, 12288)}
_NONE = bytes(32)


class Bench:
    """A reader of an empty store, and segments 1 to 9 that exist in its books alone."""

    def __init__(self, root: Path) -> None:
        self.library = Library(root)
        self.store = self.library.open_reader()
        ledger = self.store._core.ledger
        assert isinstance(ledger, SharedLedger)
        self.ledger = ledger
        self.grafts = Grafts(self.store._core, ledger)
        for number in range(1, 10):
            ledger.spaces[0].adopt(number, SegmentState.SEALED, 1 << 30).used_nbytes = 1 << 30
        ledger.spaces[0].cap_nbytes = 1 << 40
        self._pages = itertools.count(1, 10)

    def row(self, chain: KeyChain, index: int, *, put_seq: int = 1, segment: int = 1, **changed: Any) -> Row:
        parent = chain.key(index - 1) if index else _NONE
        row = Row(
            chain.key(index), parent, bytes(16), put_seq, next(self._pages), index, chain.namespace.digest, 0,
            _SIZES[chain.namespace.digest], segment,
        )  # fmt: skip
        return row._replace(**changed)

    def enter(self, *rows: Row) -> None:
        self.grafts.enter(rows, 5.0)
        check_ledger(self.ledger)

    def copy_of(self, chain: KeyChain, index: int) -> tuple[int, int, int] | None:
        """Segment, page and put-sequence number of the copy that the index knows."""
        ids = self.ledger.find(chain)
        table = self.ledger.table
        if len(ids) <= index or table.segment[ids[index]] < 0:
            return None
        block = ids[index]
        return int(table.segment[block]), int(table.page[block]), int(table.put_seq[block])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "kv")


CHAIN = chain_of(SMALL, [1, 2, 3, 4, 5, 6])


def place(row: Row) -> tuple[int, int, int]:
    return row.segment, row.page, row.put_seq


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("newer_first", [True, False])
def test_the_newest_copy_counts_whichever_comes_first(bench: Bench, newer_first: bool, together: bool) -> None:
    older, newer = bench.row(CHAIN, 0, put_seq=5, segment=2), bench.row(CHAIN, 0, put_seq=9, segment=1)
    rows = [newer, older] if newer_first else [older, newer]
    for group in [rows] if together else [[row] for row in rows]:
        bench.enter(*group)
    assert bench.copy_of(CHAIN, 0) == place(newer)
    assert [bench.ledger.spaces[0].segments[number].live_nbytes for number in (1, 2)] == [8192, 0]


@pytest.mark.parametrize("together", [True, False])
def test_of_equal_ones_the_later_counts(bench: Bench, together: bool) -> None:
    """A copy carried forward: its original goes soon."""
    original, carried = bench.row(CHAIN, 0, put_seq=5, segment=1), bench.row(CHAIN, 0, put_seq=5, segment=3)
    for group in [[original, carried]] if together else [[original], [carried]]:
        bench.enter(*group)
    assert bench.copy_of(CHAIN, 0) == place(carried)


@pytest.mark.parametrize("carried_first", [True, False])
def test_of_equal_ones_the_one_that_stays_counts_in_the_end(bench: Bench, carried_first: bool) -> None:
    """The original is named once more, or comes late, before its segment is removed."""
    original, carried = bench.row(CHAIN, 0, put_seq=5, segment=1), bench.row(CHAIN, 0, put_seq=5, segment=3)
    for row in [carried, original] if carried_first else [original, carried, original]:
        bench.enter(row)
    segment = bench.ledger.spaces[0].segments[1]
    segment.state = SegmentState.RECLAIMING
    bench.grafts.vanish(segment, 100, 5.0)
    assert bench.copy_of(CHAIN, 0) == place(carried)
    other = bench.ledger.spaces[0].segments[3]
    other.state = SegmentState.RECLAIMING
    bench.grafts.vanish(other, 100, 5.0)
    assert bench.copy_of(CHAIN, 0) is None, "there is no third"


def test_of_equal_ones_the_other_counts_when_one_goes(bench: Bench) -> None:
    """The carried copy has the smaller number: it lies on another drive, or was found first."""
    first, second = bench.row(CHAIN, 0, put_seq=5, segment=3), bench.row(CHAIN, 0, put_seq=5, segment=1)
    bench.enter(first)
    bench.enter(second)
    assert bench.copy_of(CHAIN, 0) == place(first)
    segment = bench.ledger.spaces[0].segments[3]
    segment.state = SegmentState.RECLAIMING
    bench.grafts.vanish(segment, 100, 5.0)
    assert bench.copy_of(CHAIN, 0) == place(second)
    check_ledger(bench.ledger)


def test_a_tombstone_kills_what_is_older_whichever_comes_first(bench: Bench) -> None:
    rows = [bench.row(CHAIN, index, put_seq=5) for index in range(4)]
    bench.enter(*rows)
    dead = [(CHAIN.key(1), 7), (CHAIN.key(4), 7)]
    bench.grafts.remember_dead(dead)
    bench.grafts.bury(dead, 5.0)
    check_ledger(bench.ledger)
    assert len(bench.ledger.find(CHAIN)) == 1  # what hangs on it is as old
    bench.enter(bench.row(CHAIN, 1, put_seq=6), bench.row(CHAIN, 4, put_seq=6))
    assert len(bench.ledger.find(CHAIN)) == 1
    again = [bench.row(CHAIN, index, put_seq=8) for index in range(1, 5)]
    bench.enter(*again)
    assert [bench.copy_of(CHAIN, index) for index in range(1, 5)] == [place(row) for row in again]
    bench.grafts.bury(dead, 5.0)  # old news
    assert [bench.copy_of(CHAIN, index) for index in range(1, 5)] == [place(row) for row in again]


@pytest.mark.parametrize("waits", [False, True])
def test_what_hangs_on_an_invalidated_block_stays_dead_when_that_is_put_again(bench: Bench, waits: bool) -> None:
    old = [bench.row(CHAIN, index, put_seq=5) for index in (1, 2)]
    if waits:
        bench.enter(*old)
    bench.grafts.remember_dead([(CHAIN.key(0), 7)])
    bench.grafts.bury([(CHAIN.key(0), 7)], 5.0)
    bench.enter(bench.row(CHAIN, 0, put_seq=8), *(() if waits else old))
    bench.enter(*old)
    assert len(bench.ledger.find(CHAIN)) == 1
    bench.enter(*(bench.row(CHAIN, index, put_seq=9) for index in (2, 1)))
    bench.enter(*old)
    assert len(bench.ledger.find(CHAIN)) == 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_blocks_come_in_any_order(bench: Bench, order: tuple[int, ...]) -> None:
    rows = [bench.row(CHAIN, index, segment=1 + index) for index in range(4)]
    for index in order:
        bench.enter(rows[index])
    assert [bench.copy_of(CHAIN, index) for index in range(4)] == [place(row) for row in rows]
    assert bench.grafts._waiting_rows == 0


def test_what_waits_comes_with_a_put(bench: Bench) -> None:
    rows = [bench.row(CHAIN, index) for index in range(1, 4)]
    bench.enter(*rows)
    assert bench.grafts._waiting_rows == 3
    store, library = bench.store, bench.library
    blocks = bytearray(SMALL.layout.block_nbytes * 2)
    transfer = store.put(CHAIN, blocks, stop=2)
    store.wait(transfer, 10.0)
    bench.grafts.again(5.0)
    check_ledger(bench.ledger)
    assert [bench.copy_of(CHAIN, index) for index in range(4)] == [None, *(place(row) for row in rows)]
    assert store.stats().dirty_nbytes == 8192, "the first block is the only one that is on no drive"
    del library


def test_what_waits_is_bounded_and_leaves_with_its_segment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grafting, "MOST_WAITING", 10)
    chains = [chain_of(SMALL, [number, 0]) for number in range(30)]
    for number, chain in enumerate(chains):
        bench.enter(bench.row(chain, 1, segment=1 + number % 2))
        assert bench.grafts._waiting_rows == min(10, number + 1)
    bench.grafts.leave(2)
    bench.enter(*(bench.row(chain, 0, segment=3) for chain in chains))
    there = [number for number, chain in enumerate(chains) if bench.copy_of(chain, 1) is not None]
    assert there == [20, 22, 24, 26, 28]


def test_entries_that_cannot_be_are_left_out(bench: Bench) -> None:
    """A footer is only an index (I4): what it says of a block may be wrong, and must not upset the books."""
    other = chain_of(LARGE, [1, 2])
    bench.enter(bench.row(CHAIN, 0), bench.row(other, 0))
    bench.enter(bench.row(CHAIN, 1, depth=3))
    bench.enter(bench.row(CHAIN, 1, parent=other.key(0)))
    bench.enter(bench.row(CHAIN, 1, geometry=Geometry(4096, 100)))
    bench.enter(bench.row(CHAIN, 0, namespace=LARGE.digest, geometry=_SIZES[LARGE.digest], put_seq=9))
    bench.enter(bench.row(CHAIN, 1, segment=77))
    assert len(bench.ledger.find(CHAIN)) == 1 and bench.copy_of(CHAIN, 0) is not None
    bench.enter(bench.row(CHAIN, 1))
    assert bench.copy_of(CHAIN, 1) is not None


def test_branches_and_sequences_make_runs_of_their_own(bench: Bench) -> None:
    trunk = [bench.row(CHAIN, index) for index in range(6)]
    branch = chain_of(SMALL, [1, 2, 3, 9, 9])
    bench.enter(*trunk)
    bench.enter(*(bench.row(branch, index) for index in (3, 4)))
    longer = chain_of(SMALL, [1, 2, 3, 4, 5, 6, 7, 8])
    bench.enter(bench.row(longer, 6), bench.row(longer, 7, sequence=b"another one " + bytes(4)))
    for chain in (CHAIN, branch, longer):
        assert all(bench.copy_of(chain, index) is not None for index in range(len(chain)))
    assert sorted(len(run) for run in bench.ledger.tree) == [1, 2, 3, 4]


def test_a_vanished_segment_takes_its_blocks_along_but_not_the_pinned(bench: Bench) -> None:
    bench.enter(*(bench.row(CHAIN, index, segment=1 + index // 2) for index in range(6)))
    pin = bench.store.pin(chain_of(SMALL, [1, 2, 3]))
    segment = bench.ledger.spaces[0].segments[2]
    assert bench.grafts.vanish(segment, 100, 5.0) == 1
    check_ledger(bench.ledger)
    assert [bench.copy_of(CHAIN, index) is not None for index in range(6)] == [True, True, True, False, True, True]
    pin.release()
    assert bench.grafts.vanish(segment, 100, 5.0) == 1
    assert bench.grafts.vanish(bench.ledger.spaces[0].segments[3], 1, 5.0) == 1
    assert bench.grafts.vanish(bench.ledger.spaces[0].segments[3], 1, 5.0) == 1
    check_ledger(bench.ledger)
    assert len(bench.ledger.find(CHAIN)) == 2, "what is nowhere is forgotten once nothing hangs on it"
