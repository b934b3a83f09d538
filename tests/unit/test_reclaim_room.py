"""Reclaim on a full drive: what it carries over has somewhere to go before its old segment does."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tests.harness import SEGMENT_NBYTES, SMALL, SMALL_NBYTES, Box, chain_of, kinds
from tests.unit.test_reclaim_faults import after_a_crash

from kvterrace.engine import reclaim
from kvterrace.engine.blocks import DramState
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail, Hang
from kvterrace.keys import KeyChain
from kvterrace.testing.invariants import check_ledger
from kvterrace.tiers.segments import footer_room_nbytes

HELD = chain_of(SMALL, [1, 2])


@pytest.mark.parametrize("segments", [4, 5, 8])
@pytest.mark.parametrize("dram_blocks", [8, 24])
def test_active_blocks_that_were_flushed_survive_a_crash_at_any_moment(
    tmp_path: Path, segments: int, dram_blocks: int
) -> None:
    box = Box(tmp_path / "store", dram_blocks=dram_blocks, segments=segments, busy_after_s=20.0, after_s=0.0)
    box.put_now(HELD)
    assert box.store.flush(10.0)
    pin = box.store.pin(HELD)
    crashes = 0
    for turn in range(40):
        box.put(chain_of(SMALL, [100 * turn + at for at in range(9, 14)]))
        for _ in range(6):
            box.step(0.0002)
            if box.writer._reclaimer.busy:
                crashes += 1
                assert after_a_crash(box, unsynced=False).match(HELD).blocks == 2
        box.step(0.05)
        box.check()
        assert box.store.match(HELD).blocks == 2
    stats = box.store.stats()
    assert crashes > 20 and stats.carried_blocks >= 2 and stats.reclaimed_segments > 10
    assert stats.put_stored_blocks > 80  # it gets on meanwhile
    pin.release()


def test_a_segment_is_kept_for_reclaim_and_used_by_nothing_else(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=24, segments=6, busy_after_s=20.0, after_s=0.0)
    space = box.store._core.ledger.space
    writer = box.writer
    assert space is not None
    for number in range(60):
        box.put(chain_of(SMALL, [10 * number + at for at in range(5)]))
        for _ in range(4):
            box.step(0.0005)
            taken = sum(len(data) for path, data in box.device.snapshot().items() if path.suffix == ".seg")
            if not writer._reclaimer.busy and not space.in_state(SegmentState.RECLAIMING) and not writer._maker.busy:
                assert taken <= 5 * SEGMENT_NBYTES or space.kept_nbytes or space.lent
            assert taken <= 6 * SEGMENT_NBYTES
        box.check()
    assert box.store.stats().reclaimed_segments > 20


def test_a_carry_that_hangs_does_not_hold_up_reclaim(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=6, busy_after_s=300.0)
    for number in range(6):
        assert kinds(box.put_now(chain_of(SMALL, [10 * number + at for at in range(5)]))) == ["Stored"] * 5
    assert box.store.flush(10.0)
    writer = box.writer
    box.store._core.ledger.evict_idle()
    pin = box.store.pin(chain_of(SMALL, [0, 1, 2, 3, 4]))
    box.store.touch(chain_of(SMALL, [0, 1, 2, 3, 4]))
    box.faults.add(Hang(), IoKind.READ, nth=1)
    for number in range(6, 40):
        box.put(chain_of(SMALL, [10 * number + at for at in range(5)]))
        for _ in range(10):
            box.step(0.5)
        box.check()
        if len(box.faults.fired) and number > 30:
            break
    assert len(box.faults.fired) == 1, "nothing hung"
    hung = next(one for one in box.store._core.ledger.space.segments.values() if one.readers)  # type: ignore[union-attr]
    assert hung.state is SegmentState.SEALED and writer._reclaimer._reclaiming is not hung
    before = box.store.stats().reclaimed_segments
    for number in range(40, 50):
        box.put(chain_of(SMALL, [10 * number + at for at in range(5)]))
        for _ in range(10):
            box.step(0.5)
    assert box.store.stats().reclaimed_segments > before + 3
    assert box.store.match(chain_of(SMALL, [0, 1, 2, 3, 4])).blocks == 5
    box.device.release()
    pin.release()
    box.rest()
    box.check()


# -- what gives way in DRAM --------------------------------------------------------------------------------------------


def ledger_of(blocks: int) -> Ledger:
    space = SegmentSpace(8 * SEGMENT_NBYTES, SEGMENT_NBYTES, footer_room_nbytes)
    ledger = Ledger(blocks * SMALL_NBYTES, space)
    ledger.add_namespace(0, Geometry(4096, SMALL_NBYTES - 4096), SMALL.digest)
    return ledger


def fill(ledger: Ledger, chain: KeyChain, start: int, now_s: float) -> list[int]:
    ids, _ = ledger.begin_put(chain, start, len(chain), namespace=0, sequence=b"", now_s=now_s)
    assert len(ids) == len(chain) - start
    for block in ids.tolist():
        ledger.filled(block, now_s)
        ledger.let_go(block)
    ledger.touch(chain, len(chain), now_s)
    return [int(block) for block in ids]


def test_what_is_worth_least_gives_way_and_nothing_active_or_needed() -> None:
    ledger = ledger_of(8)
    old = fill(ledger, chain_of(SMALL, [1, 2]), 0, 1.0)  # the oldest, but active
    needed = fill(ledger, chain_of(SMALL, [3]), 0, 2.0)
    idle = fill(ledger, chain_of(SMALL, [5, 6, 7]), 0, 3.0)
    young = fill(ledger, chain_of(SMALL, [8, 9]), 0, 4.0)
    ledger.pin(np.array(old, np.int32))
    assert ledger.dram.allocator.free_nbytes == 0
    ledger.drop_for(np.array([needed[0]], np.int32))
    # one slot: the tail of the run that was used longest ago and is neither active nor what the block hangs on
    assert ledger.dropped_blocks == 1
    assert ledger.dram.allocator.free_nbytes == SMALL_NBYTES
    assert [len(ledger.find(chain_of(SMALL, path))) for path in ([1, 2], [3], [5, 6, 7], [8, 9])] == [2, 1, 2, 2]
    ledger.drop_for(np.array(needed * 5, np.int32))  # more than there is to give
    assert ledger.dropped_blocks == 5
    assert [len(ledger.find(chain_of(SMALL, path))) for path in ([1, 2], [3], [5, 6, 7], [8, 9])] == [2, 1, 0, 0]
    assert (ledger.table.state[old] == DramState.READY).all()
    assert idle and young


@pytest.mark.parametrize(
    ("files", "used", "room", "carried"),
    [
        (6, None, True, True),  # two segments are free
        (7, None, False, True),  # one is: reclaim's
        (8, None, False, False),
        (8, 4096, False, True),  # none is, but the open one has room
        (8, 61440, False, False),
    ],
)
def test_who_may_have_a_segment(files: int, used: int | None, *, room: bool, carried: bool) -> None:
    space = SegmentSpace(8 * SEGMENT_NBYTES, SEGMENT_NBYTES, footer_room_nbytes)
    for _ in range(files):
        segment = space.begin()
        segment.state = SegmentState.SEALED
    if used is not None:
        segment.state, space.open, segment.used_nbytes = SegmentState.OPEN, segment, used
    assert space.room_for_segment() is room
    assert bool(space.carried_room_nbytes) is carried
    if carried:  # so much fits, in the smallest records
        target = space.open
        if target is None:
            target = space.begin()
            target.state = SegmentState.OPEN
        for _ in range(space.carried_room_nbytes // SMALL_NBYTES if used is not None else 5):
            space.place(target, SMALL_NBYTES, 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_what_cannot_be_written_elsewhere_counts_where_it_was_again(tmp_path: Path, code: int) -> None:
    """Writes into what reclaim keeps for itself fail: the old copies are the only ones, and stay. Into
    segments alone: of an error that blames the place (EIO) there is a log, and each that fails leaves a file, until
    what was active has to make room for them after a crash.
    """
    box = Box(tmp_path / "store", dram_blocks=24, segments=6, busy_after_s=20.0, after_s=0.0)
    box.put_now(HELD)
    assert box.store.flush(10.0)
    pin = box.store.pin(HELD)
    writer = box.writer
    for turn in range(60):
        box.put(chain_of(SMALL, [100 * turn + at for at in range(9, 14)]))
        for _ in range(8):
            if writer._reclaimer._anew is not None and len(writer._reclaimer._anew[0]):
                box.faults.add(Fail(code), IoKind.WRITE, nth=1, when=lambda one: one.path.suffix == ".seg")
            segment = writer._reclaimer._reclaiming
            assert segment is None or not writer._reclaimer.is_done_with(segment), "its copies may count again"
            box.step(0.0002)
            box.check()
            assert box.store.match(HELD).blocks == 2
            assert after_a_crash(box, unsynced=False).match(HELD).blocks == 2
        box.step(1.0)
    assert len(box.faults.fired) > 5
    box.faults.clear()
    box.step(10.0)
    box.check()
    assert kinds(box.get_now(HELD)) == ["Hit"] * 2
    pin.release()


def test_invalidations_do_not_take_the_room_that_reclaim_needs(tmp_path: Path) -> None:
    """The oldest segment stays, so that the tombstones of every other one are to be written again before it goes."""
    box = Box(tmp_path / "store", dram_blocks=60, segments=8, after_s=0.0, latency_s=1e-3)
    held = chain_of(SMALL, [0])
    for way in range(45):
        box.put_now(chain_of(SMALL, [way]))
        box.step(0.05)
        if way == 0:
            pin = box.store.pin(held)
        if way % 2 == 0:
            box.store.invalidate(chain_of(SMALL, [10**6 + way]))
            box.step(0.05)
        box.check()
    for way in range(100, 160):
        box.put_now(chain_of(SMALL, [way]))
        box.check()
    assert box.store.flush(20.0)
    assert box.store.stats().reclaimed_segments > 10
    assert box.store.match(held).blocks == 1
    pin.release()


def test_taking_back_is_the_undoing_of_giving_up() -> None:
    ledger = ledger_of(8)
    space = ledger.space
    assert space is not None
    segment = space.begin()
    segment.state, space.open = SegmentState.OPEN, segment
    ids = np.array(fill(ledger, chain_of(SMALL, [1, 2, 3]), 0, 0.0), np.int32)
    batch = ledger.next_write(0.0, pressed=True)
    assert batch is not None and batch.nbytes == 3 * SMALL_NBYTES
    ledger.written(batch)
    space.open, segment.state = None, SegmentState.RECLAIMING
    pages = ledger.table.page[ids].copy()
    assert pages.tolist() == [1, 3, 5]
    anew = reclaim.give_up(ledger, segment, ids, 1.0)
    assert anew.tolist() == ids.tolist() and segment.live_nbytes == 0
    assert ledger.dirty.nbytes == 3 * SMALL_NBYTES
    reclaim.take_back(ledger, segment, ids[1:], pages[1:])
    check_ledger(ledger)
    assert segment.live_nbytes == 2 * SMALL_NBYTES and ledger.dirty.nbytes == SMALL_NBYTES
    reclaim.take_back(ledger, segment, ids[:1], pages[:1])
    check_ledger(ledger)
    assert ledger.table.page[ids].tolist() == [1, 3, 5] and (ledger.table.segment[ids] == segment.number).all()
    assert not ledger.dirty.wait_for(lambda _: False)
