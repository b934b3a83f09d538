"""A partition over several drives: who writes what, who is waited for, and what survives on which drive."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import SEGMENT_NBYTES, SMALL, SMALL_NBYTES, Box, Get, chain_of, contents, kinds

from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.fake import FakeDevice
from kvterrace.io.faults import Effect, Fail, Hang, Slow
from kvterrace.keys import KeyChain
from kvterrace.store import Store
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Hit

LONG = chain_of(SMALL, range(100, 116))


def drives_of(box: Box, chain: KeyChain) -> list[int]:
    """The drive that each block of `chain` lies on, by the device that has its bytes; -1 for none."""
    nbytes = chain.namespace.layout.block_nbytes
    files = [b"".join(device.snapshot().values()) for device in box.devices]
    found = []
    for index in range(len(chain)):
        payload = bytes(contents(chain, index, index + 1))
        assert len(payload) == nbytes
        on = [number for number, data in enumerate(files) if payload in data]
        assert len(on) < 2, f"block {index} lies on two drives"
        found.append(on[0] if on else -1)
    return found


def crashed(box: Box, *, only: int | None = None, keep: bool = True) -> tuple[Store, list[FakeDevice]]:
    """Another store on what the drives would hold now (or one of them alone); the one in the box goes on."""
    numbers = range(len(box.devices)) if only is None else [only]
    images = [box.devices[number].crash_image(lambda _: keep) for number in numbers]
    return stored_on(box, images, list(numbers)), images


def stored_on(box: Box, devices: list[FakeDevice], numbers: list[int]) -> Store:
    pairs: list[Any] = []
    for number, device in zip(numbers, devices, strict=True):
        mine = box.store._drives[number][0]
        directory: Any = StoreDirectory.__new__(StoreDirectory)
        directory.__init__(mine.root, mine.partition, mine.store_uuid, -1)
        pairs.append((directory, device))
    return Store(
        dram_nbytes=box.dram_nbytes,
        ssd_nbytes=box.cap_nbytes // len(box.devices) * len(pairs),
        directory=None,
        engine=FakeDevice(box.clock),
        more=pairs,
        clock=box.clock,
        segment_nbytes=SEGMENT_NBYTES,
        background=False,
    )


# -- striping ----------------------------------------------------------------------------------------------------------


def test_a_long_run_is_dealt_to_all_drives_in_turn(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=3, batch_nbytes=2 * SMALL_NBYTES)
    chain = chain_of(SMALL, range(12))
    box.put_now(chain)
    assert box.store.flush(10.0)
    assert drives_of(box, chain) == [0, 0, 1, 1, 2, 2] * 2
    stats = box.store.stats()
    assert [one.live_nbytes for one in stats.drives] == [4 * SMALL_NBYTES] * 3
    assert stats.ssd_live_nbytes == 12 * SMALL_NBYTES
    assert stats.ssd_nbytes == 3 * 8 * SEGMENT_NBYTES == sum(one.nbytes for one in stats.drives)
    box.check()
    assert box.reopen()
    assert kinds(box.get_now(chain)) == ["Hit"] * 12
    box.check()


def test_a_run_is_read_from_all_drives_at_once(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    box.cool()
    box.asked.clear()
    get = Get(box.store, LONG)
    reads = [(drive, one) for drive, batch in box.asked for one in batch if one[0] is IoKind.READ]
    nbytes = Counter[int]()
    for drive, one in reads:
        nbytes[drive] += one[3]
    assert nbytes == {0: 8 * SMALL_NBYTES, 1: 8 * SMALL_NBYTES}, "not all of it was asked for in one go"
    assert [drive for drive, batch in box.asked if batch] == [0, 1], "one call for each drive"
    box.wait(get.transfer)
    get.check()


def test_prefetches_of_one_drive_do_not_wait_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.engine.prefetching._AT_ONCE_NBYTES", 2 * SMALL_NBYTES)
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    box.cool()
    box.plans[0].add(Hang(), IoKind.READ)
    transfer = box.store.prefetch(LONG)
    for _ in range(10):
        box.step(0.1)
    found = kinds(transfer.outcomes)
    assert [found[at] for at in range(16) if drives_of(box, LONG)[at] == 1] == ["Hit"] * 8
    assert found.count("Pending") == 8
    box.plans[0].clear()
    box.devices[0].release()
    box.wait(transfer)
    assert kinds(transfer.outcomes) == ["Hit"] * 16


# -- a drive that fails or hangs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("effect", [Fail(errno.EIO), Fail(errno.ENOSPC)])
def test_what_one_drive_does_not_take_the_other_does(tmp_path: Path, bad: int, effect: Effect) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.plans[bad].add(effect, IoKind.WRITE)
    box.put_now(LONG)
    assert box.store.flush(4.0)
    assert set(drives_of(box, LONG)) == {1 - bad}
    stats = box.store.stats()
    assert [one.writable for one in stats.drives] == [number != bad for number in range(2)]
    assert stats.ssd_writable and stats.dropped_blocks == 0
    box.check()
    box.plans[bad].clear()
    box.step(6.0)
    more = chain_of(SMALL, range(200, 208))
    box.put_now(more)
    assert box.store.flush(4.0)
    assert set(drives_of(box, more)) == {0, 1}  # the drive is tried with one batch at a time first


def test_writes_that_fail_half_way_go_to_the_other_drive(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.plans[0].add(Fail(errno.EIO), IoKind.WRITE, nth=2)  # the first is the segment's header
    box.put_now(LONG)
    assert box.store.flush(4.0)
    assert -1 not in drives_of(box, LONG)
    assert box.store.stats().ssd_write_failures == 1
    box.cool()
    assert kinds(box.get_now(LONG)) == ["Hit"] * 16


@pytest.mark.parametrize("nth", [1, 2])
def test_a_drive_that_hangs_in_writing_stops_no_other(tmp_path: Path, nth: int) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    for more in range(nth, nth + 10):
        box.plans[0].add(Hang(), IoKind.WRITE, nth=more)
    box.put_now(LONG)
    flushed = box.store.flush(10.0)
    found = Counter(drives_of(box, LONG))
    # at the segment's header nothing of the run is on its way to it; later, two batches may be
    assert found == ({1: 16} if nth == 1 else {1: 12, -1: 4})
    assert flushed == (nth == 1), "durable is what is on a drive"
    cold = chain_of(SMALL, range(300, 310))
    box.put_now(cold)
    box.step(3.0)
    box.store.flush(1.0)
    assert set(drives_of(box, cold)) == {1}
    assert kinds(box.get_now(LONG)) == ["Hit"] * 16
    for plan in box.plans:
        plan.clear()
    box.devices[0].release()
    assert box.store.flush(10.0)
    box.check()
    assert box.reopen()
    assert kinds(box.get_now(LONG)) == ["Hit"] * 16


def test_reads_of_a_drive_that_hangs_cost_only_its_own_blocks(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    box.cool()
    where = drives_of(box, LONG)
    box.plans[1].add(Hang(), IoKind.READ)
    outcomes = box.get_now(LONG, deadline_s=1.0)
    assert kinds(outcomes) == ["Expired" if drive else "Hit" for drive in where]
    box.step(40.0)  # the gate of the second closes
    stats = box.store.stats()
    assert [one.readable for one in stats.drives] == [True, False]
    found = kinds(box.get_now(LONG, deadline_s=1.0))
    assert [found[at] for at in range(16) if not where[at]] == ["Hit"] * 8
    assert "Hit" not in [found[at] for at in range(16) if where[at]]
    assert box.store.match(LONG).blocks == 16  # as on one drive: a read is tried, and says what it found
    box.plans[1].clear()
    box.devices[1].release()
    box.step(100.0)
    box.step(1.0)
    assert kinds(box.get_now(LONG)) == ["Hit"] * 16
    box.check()


def test_no_drive_takes_writes(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2)
    for plan in box.plans:
        plan.add(Fail(errno.ENOSPC), IoKind.WRITE)
    box.put_now(LONG)
    before = box.clock.monotonic_s()
    assert not box.store.flush(100.0)
    assert box.clock.monotonic_s() - before < 5.0, "waited for nothing"
    assert not box.store.stats().ssd_writable
    assert kinds(box.get_now(LONG)) == ["Hit"] * 16


def test_each_drive_makes_room_for_itself(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=24, segments=4, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    for number in range(60):
        box.put_now(chain_of(SMALL, [1000 * number + at for at in range(4)]))
        box.check()
    stats = box.store.stats()
    assert stats.reclaimed_segments > 4 and stats.ssd_write_failures == 0
    assert all(one.file_nbytes <= one.nbytes == 4 * SEGMENT_NBYTES for one in stats.drives)
    assert all(one.live_nbytes > SEGMENT_NBYTES for one in stats.drives)


def test_a_full_drive_that_hangs_does_not_stop_reclaim_on_another(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=24, segments=4, drives=2, batch_nbytes=2 * SMALL_NBYTES, busy_after_s=60.0)
    for number in range(40):
        box.put_now(chain_of(SMALL, [1000 * number + at for at in range(4)]))
    before = box.store.stats().reclaimed_segments
    box.plans[0].add(Hang(), IoKind.WRITE)
    box.plans[0].add(Hang(), IoKind.SYNC)
    stored = 0
    for number in range(40, 80):
        outcomes = kinds(box.put_now(chain_of(SMALL, [1000 * number + at for at in range(4)])))
        stored += outcomes.count("Stored")
    assert stored == 160
    assert box.store.stats().reclaimed_segments > before + 4
    box.check()


def test_what_is_carried_over_is_written_to_its_own_drive(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=60, segments=5, drives=2, batch_nbytes=2 * SMALL_NBYTES, after_s=0.0)
    root = chain_of(SMALL, [1, 2, 3])
    box.put_now(root)
    assert box.store.flush(10.0)
    where = drives_of(box, root)
    before = box.store.stats()
    for number in range(60):
        box.put_now(chain_of(SMALL, [1000 * number + at for at in range(9, 13)]))
        box.store.touch(root)
        box.step(0.01)
        # on its way, or where it was
        assert all(now in (old, -1) for now, old in zip(drives_of(box, root), where, strict=True))
    assert box.store.stats().carried_blocks > before.carried_blocks


@pytest.mark.parametrize("kind", [IoKind.WRITE, IoKind.SYNC])
def test_what_is_carried_over_is_not_waited_for_for_ever(tmp_path: Path, kind: IoKind) -> None:
    """Another drive has what one drive's reclaim has carried over, and hangs: the segment goes all the same."""
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, after_s=0.0)
    first, root = chain_of(SMALL, [1]), chain_of(SMALL, [2])
    for chain in (first, root):
        box.put_now(chain)
        box.cool()
    assert drives_of(box, first) + drives_of(box, root) == [0, 1]
    writers: Any = box.store._mover.writers
    writer, space = writers.each[1], box.store._core.ledger.spaces[1]
    writer.seal_open()
    box.step()
    box.rest()
    (segment,) = space.segments.values()
    ids = box.store._core.ledger.find(root)
    box.plans[0].add(Hang(), kind)
    writers._turn = 0
    ledger: Any = box.store._core.ledger
    # as while the drive itself takes no writes: the other may have it
    ledger.dealing.refused_by = lambda _: lambda _: False
    reclaimer = writer._reclaimer
    segment.state = SegmentState.RECLAIMING
    reclaimer._reclaiming, reclaimer._carried = segment, ids
    reclaimer._carry = reclaimer._reader.bring(ids, box.clock.monotonic_s())
    for _ in range(5):
        box.step(0.1)
    table = box.store._core.ledger.table
    if kind is IoKind.WRITE:
        assert table.writing[ids].all(), "the first drive has it"
    else:
        assert (table.segment[ids] >> 24 == 0).all(), "the first drive has it"
    assert segment.number in space.segments, "the old copy was given up before there is a new one"
    for _ in range(20):
        box.step(0.1)
    assert segment.number not in space.segments and not reclaimer.busy
    assert kinds(box.get_now(root)) == ["Hit"]
    box.plans[0].clear()
    box.devices[0].release()
    box.rest()
    box.check()


def test_a_slow_drive_has_all_the_time_for_what_its_reclaim_carries_over(tmp_path: Path) -> None:
    """Another drive can write, but what is carried over is this one's to write: its segment stays until then."""
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, after_s=0.0)
    first, root = chain_of(SMALL, [1]), chain_of(SMALL, [2])
    for chain in (first, root):
        box.put_now(chain)
        box.cool()
    assert drives_of(box, first) + drives_of(box, root) == [0, 1]
    writers: Any = box.store._mover.writers
    writer, space = writers.each[1], box.store._core.ledger.spaces[1]
    writer.seal_open()
    box.step()
    box.rest()
    (segment,) = space.segments.values()
    table, ids = box.store._core.ledger.table, box.store._core.ledger.find(root)
    pin = box.store.pin(root)
    reclaimer = writer._reclaimer
    segment.state = SegmentState.RECLAIMING
    reclaimer._reclaiming, reclaimer._carried = segment, ids
    reclaimer._carry = reclaimer._reader.bring(ids, box.clock.monotonic_s())
    box.devices[1]._bytes_per_s = 3e3  # nearly three seconds a block
    carried_s = box.clock.monotonic_s()
    while reclaimer.busy:
        box.step(0.1)
        assert box.clock.monotonic_s() < carried_s + 20.0
    assert box.clock.monotonic_s() > carried_s + 2.5
    assert (table.segment[ids] >> 24 == 1).all(), "the old copy was given up before there is a new one"
    pin.release()
    box.rest()
    box.check()


# -- invalidations -----------------------------------------------------------------------------------------------------


def test_an_invalidation_is_written_to_every_drive(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    first, second = chain_of(SMALL, [1, 2]), chain_of(SMALL, [3, 4])
    box.put_now(first)
    assert box.store.flush(10.0)
    box.put_now(second)
    assert box.store.flush(10.0)
    assert drives_of(box, first) + drives_of(box, second) == [0, 0, 1, 1]
    box.store.invalidate(first)
    box.store.invalidate(second)
    assert box.store.flush(10.0)
    for only in (None, 0, 1):
        again, _ = crashed(box, only=only, keep=False)
        assert not again.match(first).blocks and not again.match(second).blocks


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_flush_waits_for_the_invalidation_on_each_drive(tmp_path: Path, stuck: int) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    assert box.store.flush(10.0)
    box.plans[stuck].add(Hang(), IoKind.WRITE)
    box.store.invalidate(LONG)
    assert not box.store.flush(5.0)
    box.plans[stuck].clear()
    box.devices[stuck].release()
    assert box.store.flush(5.0)
    again, _ = crashed(box, keep=False)
    assert not again.match(LONG).blocks


def test_a_flush_does_not_wait_for_an_invalidation_that_cannot_be_written(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    assert box.store.flush(10.0)
    box.plans[1].add(Fail(errno.ENOSPC), IoKind.WRITE)
    box.store.invalidate(LONG)
    assert not box.store.flush(None)
    box.plans[1].clear()
    box.step(6.0)
    assert box.store.flush(None)


def test_a_crash_that_left_an_invalidation_on_one_drive_is_mended(tmp_path: Path) -> None:
    """The drive with the tombstone keeps it only for as long as it has older segments itself."""
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    other, dead = chain_of(SMALL, [1, 2]), chain_of(SMALL, [3, 4])
    box.put_now(other)
    assert box.store.flush(10.0)
    box.put_now(dead)
    assert box.store.flush(10.0)
    assert drives_of(box, other) + drives_of(box, dead) == [0, 0, 1, 1]
    box.plans[1].add(Hang(), IoKind.WRITE)
    box.store.invalidate(dead)
    assert not box.store.flush(5.0)
    alone, _ = crashed(box, only=1, keep=False)
    assert alone.match(dead).blocks == 2, "the test is about a tombstone that is not on this drive"
    images = [box.devices[0].crash_image(lambda _: True), box.devices[1].crash_image(lambda _: False)]
    again = stored_on(box, images, [0, 1])
    assert not again.match(dead).blocks
    assert again.flush(10.0), "an invalidation that a restart found was not made durable"
    last = [image.crash_image(lambda _: False) for image in images]
    assert not stored_on(box, last, [0, 1]).match(dead).blocks
    assert not stored_on(box, last[1:], [1]).match(dead).blocks, "back, once the other drive's tombstone is gone"


# -- recovery ----------------------------------------------------------------------------------------------------------


def test_the_newest_record_of_a_key_counts_whichever_drive_it_is_on(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    chain = chain_of(SMALL, [1, 2])
    box.put_now(chain)
    assert box.store.flush(10.0)
    box.store.invalidate(chain)
    assert box.store.flush(10.0)
    filler = chain_of(SMALL, [3, 4])
    box.put_now(filler)
    box.put_now(chain)
    assert box.store.flush(10.0)
    wanted = int(box.store._core.ledger.table.put_seq[box.store._core.ledger.find(chain)][0])
    again, _ = crashed(box, keep=False)
    ids = again._core.ledger.find(chain)
    assert again.match(chain).blocks == 2
    assert int(again._core.ledger.table.put_seq[ids][0]) == wanted
    assert again._core.ledger.next_put_seq > wanted


def test_put_sequence_numbers_rise_over_all_drives(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    for number in range(4):
        box.put_now(chain_of(SMALL, [number, 1]))
        assert box.store.flush(10.0)
        seen = box.store._core.ledger.next_put_seq
        assert box.reopen()
        assert box.store._core.ledger.next_put_seq >= seen
        assert box.store.match(chain_of(SMALL, [0, 1])).blocks == 2


def test_segments_are_numbered_on_each_drive_by_itself(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.put_now(LONG)
    assert box.store.flush(10.0)
    names = [[path.name for path in device.snapshot()] for device in box.devices]
    assert names[0] == names[1] == [f"{number:08x}.seg" for number in range(1, len(names[0]) + 1)]


def test_a_drive_whose_numbers_are_used_up_leaves_the_writing_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.store._core.volumes[0].space.next_number = 1 << 24
    box.put_now(LONG)
    assert box.store.flush(10.0)
    box.step(100.0)
    assert set(drives_of(box, LONG)) == {1}
    assert [one.writable for one in box.store.stats().drives] == [False, True]
    assert len([one for one in caplog.records if "used up" in one.message]) == 1
    box.store.invalidate(LONG)
    assert box.store.flush(10.0)
    assert box.reopen()
    assert [one.writable for one in box.store.stats().drives] == [True, True]


def test_a_drive_with_high_segment_numbers_can_be_one_of_several(tmp_path: Path) -> None:
    """On a drive alone they may reach 2**31; among several, what counts is how far apart they are."""
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=1)
    box.store._core.ledger.spaces[0].next_number = 1 << 28
    box.put_now(LONG)
    assert box.store.flush(10.0)
    image = box.device.crash_image(lambda _: True)
    mine = box.store._drives[0][0]
    other = StoreDirectory.open(tmp_path / "other", "p", created_unix_s=0.0)
    pairs: list[Any] = [(mine, image), (other, FakeDevice(box.clock))]
    store = Store(
        dram_nbytes=box.dram_nbytes,
        ssd_nbytes=2 * box.cap_nbytes,
        directory=None,
        engine=FakeDevice(box.clock),
        more=pairs,
        clock=box.clock,
        segment_nbytes=SEGMENT_NBYTES,
        background=False,
    )
    get = Get(store, LONG)
    store.wait(get.transfer, 10.0)
    get.check()
    assert get.transfer.outcomes and all(isinstance(one, Hit) for one in get.transfer.outcomes)
    store.put(chain_of(SMALL, [9, 9]), contents(chain_of(SMALL, [9, 9])))
    assert store.flush(10.0)
    names = [path.name for path in image.snapshot()]
    assert names[0] == f"{1 << 28:08x}.seg" and all(int(name[:8], 16) >= 1 << 28 for name in names)
    assert np.unique(store._core.ledger.table.segment).max() < 1 << 25


def test_slow_writes_of_one_drive_leave_most_to_the_other(tmp_path: Path) -> None:
    box = Box(tmp_path, dram_blocks=80, segments=8, drives=2, batch_nbytes=2 * SMALL_NBYTES)
    box.plans[0].add(Slow(1.0), IoKind.WRITE)
    chain = chain_of(SMALL, range(40))
    box.put_now(chain)
    assert box.store.flush(100.0)
    share = Counter(drives_of(box, chain))
    assert share[1] > 3 * share[0] and share[0] + share[1] == 40
