"""A drive that does not take writes: the breaker's write side in a store."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.harness import SEGMENT_NBYTES, SMALL, Box, Get, chain_of, kinds

from kvterrace.engine.fullness import Fullness
from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.io.faults import Fail, Hang
from kvterrace.types import Hit, Stored, Tier

FOUR = chain_of(SMALL, [1, 2, 3, 4])
OTHER = chain_of(SMALL, [5, 6])


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "store", dram_blocks=24, segments=20)


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno >= logging.WARNING]


def run(box: Box, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        box.step(0.1)


def test_a_hanging_write_stops_writes_and_holds_up_nobody(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    box.put_now(OTHER)
    box.cool()
    box.faults.add(Hang(), IoKind.WRITE, nth=1)
    box.put_now(FOUR)
    run(box, 2.5)
    assert len(box.faults.fired) == 1
    box.put_now(chain_of(SMALL, [9]))
    writes = len(box.writes)
    run(box, 12.5)  # ten seconds after the last that ended
    assert not box.store.stats().ssd_writable
    assert len(box.writes) <= writes + 2  # a new segment and its neighbour in the queue
    assert box.store.flush(0.3) is False
    assert box.get_now(OTHER) == [Hit(Tier.SSD)] * 2
    box.device.release()
    box.rest()
    run(box, 3.0)
    assert box.store.flush(10.0) and box.store.stats().ssd_writable
    assert len(changes(caplog)) == 2, changes(caplog)
    assert "writes closed -> open: a request has hung" in changes(caplog)[0] and "-> closed" in changes(caplog)[1]
    box.check()


def test_a_drive_whose_writes_all_hang_is_given_few(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=24, segments=20, parallel=32)
    box.faults.add(Hang(), IoKind.WRITE, when=lambda op: op.offset > 0)
    for way in range(10, 20):
        box.put_now(chain_of(SMALL, [way, 1]))
        run(box, 33.0)
    assert 2 <= len(box.faults.fired) <= 4
    box.patience = 5000
    box.faults.clear()
    box.device.release()
    run(box, 70.0)
    assert box.store.flush(10.0)
    box.check()


def test_a_process_that_was_stopped_does_not_blame_the_drive(box: Box) -> None:
    """An hour passes in which nobody looks: what the drive had done long since is not hanging."""
    box.put_now(FOUR)
    box.clock.advance(2.5)
    box.store._mover.pump()  # a write is on its way
    assert box.device.in_flight
    box.clock.advance(3600.0)
    box.store._mover.pump()  # by somebody who puts or gets, before its end was taken in
    assert box.store.stats().ssd_writable
    box.rest()
    assert box.store.flush(1.0)
    box.check()


def test_closing_with_a_write_that_hangs_is_bounded_and_honest(box: Box) -> None:
    box.faults.add(Hang(), IoKind.WRITE, when=lambda op: op.offset > 0)
    box.put_now(FOUR)
    run(box, 14.0)
    began_s = box.clock.monotonic_s()
    assert box.store.close(3.0) is False
    assert box.clock.monotonic_s() - began_s < 4.0


def test_closing_while_writes_are_stopped_is_at_once_and_honest(box: Box) -> None:
    box.put_now(OTHER)
    box.cool()
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE)
    box.put_now(FOUR)
    run(box, 3.0)
    assert not box.store.stats().ssd_writable
    began_s = box.clock.monotonic_s()
    assert box.store.flush(60.0) is False
    assert box.clock.monotonic_s() - began_s < 1.0
    began_s = box.clock.monotonic_s()
    assert box.reopen(60.0) is False
    assert box.clock.monotonic_s() - began_s < 10.0
    box.faults.clear()
    assert kinds(box.get_now(OTHER)) == ["Hit"] * 2
    assert box.store.match(FOUR).blocks == 0


def test_one_write_at_a_time_tries_the_drive_and_three_end_it(box: Box) -> None:
    box.put_now(OTHER)
    box.cool()
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE, nth=1)
    for way in range(20, 25):
        box.put_now(chain_of(SMALL, [way]))
    assert box.store.flush(0.5) is False  # the first write failed
    waiting: list[int] = []
    submit = box.device.submit

    def watched(requests: Any) -> None:
        submit(requests)
        device: Any = box.device
        active = [one.request for one in device._running]
        waiting.append(sum(one.kind in (IoKind.WRITE, IoKind.SYNC) for one in active))

    box.device.submit = watched  # type: ignore[method-assign]
    run(box, 0.9)
    assert waiting == []
    run(box, 3.0)
    assert max(waiting) == 1
    assert box.store.flush(1.0)
    box.check()


def test_nothing_is_written_while_reads_are_stopped_and_the_store_tries_one_itself(box: Box) -> None:
    """Nobody reads any more: else writes would stop for good."""
    chains = [chain_of(SMALL, [way]) for way in range(10, 16)]
    for chain in chains:
        box.put_now(chain)
    box.cool()
    box.faults.add(Fail(errno.ENXIO), IoKind.READ)
    for chain in chains:
        assert kinds(box.get_now(chain)) == ["DeviceFailed"]
    writes, reads = len(box.writes), len(box.reads)
    assert box.put_now(FOUR) == [Stored(Tier.DRAM)] * 4
    assert box.store.flush(1.0) is False
    run(box, 4.0)
    assert len(box.writes) == writes and len(box.reads) == reads
    run(box, 5.0)
    assert len(box.writes) == writes and len(box.reads) == reads + 1  # it has failed, too
    box.faults.clear()
    run(box, 60.0)
    assert box.store.flush(10.0)
    assert len(box.writes) > writes
    box.check()


@pytest.mark.parametrize("kind", [IoKind.WRITE, IoKind.SYNC, "create"])
def test_errors_of_one_kind_stop_writes_though_others_succeed(box: Box, kind: Any) -> None:
    box.put_now(OTHER)
    box.cool()
    box.faults.add(Fail(errno.EIO), kind, when=lambda op: op.offset > 0 or op.kind is not IoKind.WRITE)
    box.put_now(FOUR)
    for way in range(30, 40):
        box.put_now(chain_of(SMALL, [way, 1, 2]))
        box.store.flush(0.2)
    run(box, 5.0)
    assert 3 <= len(box.faults.fired) <= 40
    if kind is not IoKind.SYNC:  # blocks can be written, only not made durable: each flush says so
        assert not box.store.stats().ssd_writable
    assert box.store.flush(0.2) is False
    assert box.get_now(OTHER) == [Hit(Tier.SSD)] * 2
    box.faults.clear()
    run(box, 70.0)
    assert box.store.flush(10.0)
    box.check()


# -- room in DRAM while nothing is written -----------------------------------------------------------------------------


def read_only(box: Box, cold: int) -> None:
    """A drive that has chains of one block, 100 to 100 + `cold`, and then takes no writes any more."""
    for way in range(100, 100 + cold):
        box.put_now(chain_of(SMALL, [way]))
    box.cool()
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE)
    box.faults.add(Fail(errno.EROFS), "create")
    box.put_now(chain_of(SMALL, [99]))
    assert box.store.flush(0.1) is False
    assert not box.store.stats().ssd_writable


def still_there(box: Box, ways: range) -> list[int]:
    return [way for way in ways if box.store.match(chain_of(SMALL, [way])).tiers == (Tier.DRAM,)]


def test_copies_with_another_below_make_room_before_last_ones(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=20)
    read_only(box, 4)
    box.put_now(chain_of(SMALL, [1]))
    for way in range(100, 104):  # used last: by recency alone, they would stay
        assert box.get_now(chain_of(SMALL, [way])) == [Hit(Tier.SSD)]
    for way in range(2, 11):  # one block of 99, ten of these, one to spare for the promoted ones
        assert kinds(box.put_now(chain_of(SMALL, [way]))) == ["Stored"]
    assert still_there(box, range(1, 11)) == list(range(1, 11))
    assert box.store.stats().dropped_blocks == 0
    box.check()


@pytest.mark.parametrize("at_once", [1, 40])
def test_promotions_push_out_a_few_last_copies_at_most(tmp_path: Path, at_once: int) -> None:
    box = Box(tmp_path / "store", dram_blocks=16, segments=20, latency_s=0.05, parallel=2)
    read_only(box, 40)
    for way in range(1, 16):
        assert kinds(box.put_now(chain_of(SMALL, [way]))) == ["Stored"]
    assert still_there(box, range(1, 16)) == list(range(1, 16))
    for _ in range(2):
        for first in range(100, 140, at_once):
            gets = [Get(box.store, chain_of(SMALL, [way])) for way in range(first, first + at_once)]
            for get in gets:
                box.wait(get.transfer)
                get.check()
                assert get.transfer.outcomes in ([Hit(Tier.SSD)], [Hit(Tier.DRAM)])
    assert box.store.stats().dropped_blocks <= (1 if at_once == 1 else 8)
    box.check()


# -- a drive with less room than the capacity --------------------------------------------------------------------------


def test_a_segment_is_given_up_for_each_new_one_and_none_for_a_theft(box: Box) -> None:
    """C11, in steps: twelve segments are there when the drive is full first; six of them stay whatever happens.

    Two go before a new one is made: its place, and the room that reclaim has for itself.
    """
    fullness = Fullness(box.store._core.volumes[0])
    space = box.store._core.ledger.space
    assert space is not None
    for _ in range(12):
        space.begin().state = SegmentState.SEALED
    refused = IoResult(IoRequest(IoKind.CALL, IoClass.DEMOTION), crash=OSError(errno.ENOSPC, "full"))
    assert fullness.helps(IoResult(refused.request, crash=OSError(errno.EIO, "bad"))) is False
    assert space.room_for_segment()
    held, refusals = 12, 0
    while fullness.helps(refused):
        refusals += 1
        assert space.limit_nbytes == held * SEGMENT_NBYTES and not space.room_for_carried()
        for own in (True, False):
            assert not space.room_for_segment()
            space.remove(space.segments[min(space.segments)])  # reclaimed
            assert space.room_for_carried()
            assert space.room_for_segment() is not own
        assert fullness.helps(refused) is False  # somebody else took it: nothing more is given up
        space.begin().state = SegmentState.SEALED
        fullness.made()  # later there was room, and now none again
        held -= 1
        assert len(space.segments) == held and not space.room_for_segment()
    assert (held, refusals) == (7, 5)  # a sixth would leave five
    space.limit_nbytes = None
    for _ in range(3):
        space.remove(space.segments[min(space.segments)])
    assert Fullness(box.store._core.volumes[0]).helps(refused) is False  # four: too few to give two up
    space.begin().state = SegmentState.SEALED
    assert Fullness(box.store._core.volumes[0]).helps(refused) is True


def test_the_room_that_the_store_keeps_for_itself_is_not_room_that_others_left(tmp_path: Path) -> None:
    """A drive smaller than the capacity: found full once, and not again whenever the store looks."""
    box = Box(tmp_path, segments=40, dram_blocks=30, after_s=0.0)
    box.device._medium.capacity_nbytes = 12 * SEGMENT_NBYTES
    (space,) = box.store._core.ledger.spaces
    limits: set[int | None] = set()
    for way in range(200):
        box.patience = 5000
        box.put_now(chain_of(SMALL, [way, 0]))
        box.step(0.5)
        if limits or space.limit_nbytes is not None:
            limits.add(space.limit_nbytes)
    assert limits and None not in limits
    box.device._medium.capacity_nbytes = 16 * SEGMENT_NBYTES
    run(box, 6.0)
    assert space.limit_nbytes is None, "others have left room"
    box.check()
