"""Reclaim and write-behind when something goes wrong: nothing comes back, and nothing is lost that need not be."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness import SEGMENT_NBYTES, SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.engine.blocks import NOWHERE
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.gate import ReadGate
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail
from kvterrace.keys import KeyChain
from kvterrace.store import Store
from kvterrace.tiers.segments import footer_room_nbytes

ROOT = chain_of(SMALL, [1])


def after_a_crash(box: Box, *, unsynced: bool = True) -> Store:
    """Another store, on what the drive would hold now; the one in the box goes on."""
    mine: Any = box.store._drives[0][0]
    directory: Any = SimpleNamespace(
        partition=mine.partition, store_uuid=mine.store_uuid, close=lambda: None, describe=lambda _: None
    )
    return Store(
        dram_nbytes=box.dram_nbytes,
        ssd_nbytes=box.cap_nbytes,
        directory=directory,
        engine=box.device.crash_image(lambda _: unsynced),
        clock=box.clock,
        segment_nbytes=SEGMENT_NBYTES,
        background=False,
    )


# -- tombstones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsynced", [True, False])
@pytest.mark.parametrize("seed", [1, 4, 8])
def test_what_was_invalidated_and_flushed_never_comes_back(tmp_path: Path, seed: int, unsynced: bool) -> None:
    rnd = random.Random(seed)
    box = Box(tmp_path / "store", dram_blocks=16, segments=5, busy_after_s=1.0, after_s=0.0)
    live: list[KeyChain] = []
    fresh: list[KeyChain] = []
    dead: list[KeyChain] = []
    pins: list[Any] = []
    for number in range(180):
        live.append(chain_of(SMALL, [number * 10 + at for at in range(3)]))
        box.put(live[-1])
        if rnd.random() < 0.5 and len(live) > 6:
            fresh.append(live.pop(rnd.randrange(len(live) - 3)))
            box.store.invalidate(fresh[-1])
        if rnd.random() < 0.2 and len(live) > 3:
            pins.append(box.store.pin(live[rnd.randrange(len(live))]))
        if len(pins) > 2:
            pins.pop(0).release()
        if rnd.random() < 0.25 and box.store.flush(2.0):
            dead += fresh
            fresh = []
        for _ in range(4):
            box.step(0.0005)
            if dead and rnd.random() < 0.3:
                again = after_a_crash(box, unsynced=unsynced)
                assert not [chain for chain in dead if again.match(chain).blocks]
        box.check()
    assert box.store.stats().reclaimed_segments > 5 and len(dead) > 10


def test_reclaim_is_called_off_where_tombstones_find_no_room(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=16, segments=4, after_s=0.0)
    writer = box.writer
    space = box.store._core.ledger.space
    assert space is not None
    old = chain_of(SMALL, [7, 8])
    box.put_now(old)
    box.store.flush(10.0)
    writer.seal_open()
    box.step()
    box.rest()
    box.put_now(chain_of(SMALL, [9, 10]))
    box.store.invalidate(old)
    assert box.store.flush(10.0)
    writer.seal_open()
    box.step()
    box.rest()
    segment = space.segments[max(space.segments)]
    tombstones = list(segment.tombstones)
    assert tombstones and segment.state is SegmentState.SEALED
    space.other_nbytes = space.cap_nbytes - space.file_nbytes  # no room is left, and none is open
    box.cap_nbytes = 1 << 30
    segment.state = SegmentState.RECLAIMING
    reclaimer = writer._reclaimer
    reclaimer._reclaiming, reclaimer._carried = segment, np.zeros(0, np.int32)
    reclaimer._carry = reclaimer._reader.bring(reclaimer._carried, 0.0)
    reclaimer.go_on(box.clock.monotonic_s())
    assert segment.state is SegmentState.SEALED and segment.tombstones == tombstones
    assert reclaimer._reclaiming is None and reclaimer._moved is None and reclaimer._moved_syncs is None
    assert not after_a_crash(box).match(old).blocks


# -- what is carried ---------------------------------------------------------------------------------------------------


def test_a_root_that_finds_no_room_in_dram_is_not_lost(tmp_path: Path) -> None:
    """Everything hangs on it, it lies in the oldest segment, and DRAM is full of what waits to be written."""
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, busy_after_s=50.0)
    box.put_now(ROOT)
    box.put_now(chain_of(SMALL, [2, 3, 4, 5, 6]))
    box.cool()
    for turn in range(8):
        box.store.touch(ROOT)
        outcomes = kinds(box.put_now(chain_of(SMALL, [1] + [1000 * turn + at for at in range(1, 13)])))
        assert outcomes[0] == "Present" and "Stored" in outcomes
        assert box.store.match(ROOT).blocks == 1
        box.check()
    assert box.store.stats().reclaimed_segments > 2


def test_reads_that_fail_for_a_while_do_not_cost_the_root(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=24, segments=4, busy_after_s=20.0)
    box.put_now(ROOT)
    box.put_now(chain_of(SMALL, [2, 3, 4, 5, 6]))
    chains = [chain_of(SMALL, [1, 100 + turn, 200 + turn]) for turn in range(40)]
    for chain in chains[:5]:
        box.put_now(chain)
    box.cool()
    box.faults.add(Fail(errno.ETIMEDOUT), IoKind.READ)
    for chain in chains[5:30]:
        box.store.touch(ROOT)
        box.put_now(chain)
        box.step(3.0)
        assert box.store.match(ROOT).blocks == 1
        box.check()
    box.faults.clear()
    box.step(100.0)
    for chain in chains[30:]:
        box.store.touch(ROOT)
        box.put_now(chain)
        box.step(3.0)
        assert box.store.match(ROOT).blocks == 1
    assert box.store.match(chains[-1]).blocks == 3


def test_no_reclaim_starts_while_reads_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, busy_after_s=0.5)
    gate = box.store._core.volumes[0].gate
    monkeypatch.setattr(ReadGate, "is_open", False)
    for number in range(8):
        box.put_now(chain_of(SMALL, [number * 10 + at for at in range(5)]))
    assert box.store.stats().reclaimed_segments == 0
    monkeypatch.undo()
    assert gate.is_open
    for number in range(8, 12):
        box.put_now(chain_of(SMALL, [number * 10 + at for at in range(5)]))
    assert box.store.stats().reclaimed_segments > 0
    box.check()


def test_a_crash_while_a_block_is_carried_leaves_one_copy_of_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=40, segments=5, after_s=2.0)
    box.put_now(ROOT)
    box.put_now(chain_of(SMALL, [2, 3, 4, 5, 6]))
    assert box.store.flush(10.0)
    for turn in range(60):
        box.store.touch(ROOT)
        box.put_now(chain_of(SMALL, [1, 100 + turn, 200 + turn]))
        for _ in range(5):
            box.step(0.1)
            for unsynced in (True, False):
                assert after_a_crash(box, unsynced=unsynced).match(ROOT).blocks == 1
        if box.store.stats().carried_blocks >= 2:
            return
    raise AssertionError("nothing was carried")


# -- writes that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [2, 3, 5])
def test_one_failed_write_costs_nothing(tmp_path: Path, nth: int) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=12, busy_after_s=20.0)
    box.faults.add(Fail(errno.EIO), IoKind.WRITE, nth=nth)
    for number in range(8):
        assert kinds(box.put_now(chain_of(SMALL, [10 + number, 1, 2, 3]))) == ["Stored"] * 4
    assert len(box.faults.fired) == 1
    assert box.store.stats().dropped_blocks == 0 and box.store.stats().blocks == 32
    assert box.store.flush(0.5)
    box.check()


def test_a_drive_that_takes_no_writes_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """A full drive is tried after 1 and 3 s, and next after 7; another one is left alone after five failures."""
    for error, most in ((errno.ENOSPC, 3), (errno.EIO, 7)):
        box = Box(tmp_path / f"store{error}", dram_blocks=12, segments=12)
        box.faults.add(Fail(error), IoKind.WRITE)
        box.put_now(chain_of(SMALL, [1, 2, 3, 4]))
        for _ in range(45):
            box.step(0.1)
        assert len(box.faults.fired) == most and not box.store.stats().ssd_writable
        box.faults.clear()
        box.step(6.0)
        assert box.store.flush(1.0)
        box.check()


# -- write-behind ------------------------------------------------------------------------------------------------------


def test_a_run_in_use_all_the_time_is_written_all_the_same(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=64, segments=16, after_s=2.0)
    box.put_now(ROOT)
    block = int(box.store._core.ledger.find(ROOT)[0])
    for _ in range(18):
        box.step(1.0)
        box.store.touch(ROOT)
    assert box.store._core.ledger.table.segment[block] == NOWHERE
    for _ in range(6):
        box.step(1.0)
        box.store.touch(ROOT)
    assert box.store._core.ledger.table.segment[block] != NOWHERE


def test_a_run_is_not_written_before_what_it_hangs_on() -> None:
    space = SegmentSpace(4 * SEGMENT_NBYTES, SEGMENT_NBYTES, footer_room_nbytes)
    ledger = Ledger(40 * SMALL_NBYTES, space, writes=WritePolicy(after_s=2.0))
    ledger.add_namespace(0, Geometry(4096, SMALL_NBYTES - 4096), SMALL.digest)
    segment = space.begin()
    segment.state, space.open = SegmentState.OPEN, segment

    def put(chain: KeyChain, at: int, now_s: float) -> list[int]:
        ids, _ = ledger.begin_put(chain, at, len(chain), namespace=0, sequence=b"", now_s=now_s)
        for block in ids.tolist():
            ledger.filled(block, now_s)
            ledger.let_go(block)
        return [int(block) for block in ids]

    first = put(ROOT, 0, 0.0)
    put(chain_of(SMALL, [1, 2]), 1, 0.0)
    third = put(chain_of(SMALL, [1, 3]), 1, 0.0)
    ledger.touch(ROOT, 1, 2.5)
    ledger.touch(chain_of(SMALL, [1, 2]), 2, 2.5)
    batch = ledger.next_write(3.0, pressed=False)
    assert batch is not None and batch.ids.tolist() == first + third


# -- what was there at open --------------------------------------------------------------------------------------------


def test_segments_with_a_footer_are_not_synced_again(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=24, segments=12)
    for number in range(4):
        box.put_now(chain_of(SMALL, [number * 10 + at for at in range(5)]))
    assert box.reopen()
    box.step(0.01)
    writer = box.writer
    assert box.store.stats().blocks == 20 and not writer._syncing._unsynced
    box.put_now(ROOT)
    assert box.store.flush(10.0)
    box.device = box.device.crash_image(lambda _: True)  # no footer: from a process that was killed
    box.store._drives[0][0].close()
    box.store = box._open()
    killed = box.writer
    assert len(killed._syncing._unsynced) == 1
