"""One race or case at a time, stepped in virtual time on a fake drive."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import LARGE, SMALL, SMALL_NBYTES, Box, Get, chain_of, contents, kinds

from kvterrace.engine import prefetching
from kvterrace.engine.blocks import DramState
from kvterrace.errors import ConfigError
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail, FlipBit, Hang, PretendDone, Short, Slow
from kvterrace.keys import KeyChain
from kvterrace.types import Busy, Expired, Hit, Miss, Present, Stored, Tier

FOUR = chain_of(SMALL, [0] * 4)
LONG = chain_of(SMALL, [0] * 16)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "store", dram_blocks=32, segments=16)


def cold(box: Box, chain: Any = FOUR) -> None:
    """`chain` on the drive alone."""
    assert set(kinds(box.put_now(chain))) <= {"Stored", "Present"}
    box.cool()
    assert set(box.store.match(chain).tiers) == {Tier.SSD}
    box.reads.clear()


def test_a_chain_with_a_key_twice_is_refused_and_the_store_goes_on(box: Box) -> None:
    key = FOUR.key(0)
    for keys in (key * 2, key + FOUR.key(1) + key):
        chain = KeyChain(SMALL, FOUR.root, keys)
        with pytest.raises(ConfigError, match="comes twice"):
            box.store.put(chain, bytes(len(chain) * SMALL.layout.block_nbytes))
    assert kinds(box.put_now(FOUR)) == ["Stored"] * 4
    box.check()


# -- reads that share, and what becomes of them ------------------------------------------------------------------------


def test_two_gets_of_the_same_cold_blocks_share_one_read(box: Box) -> None:
    cold(box)
    gets = [Get(box.store, FOUR) for _ in range(3)]
    box.rest()
    for get in gets:
        get.check()
        assert get.transfer.outcomes == [Hit(Tier.SSD)] * 4
    assert box.reads == [("00000001.seg", 4096, 4 * SMALL_NBYTES)]
    box.check()


def test_cold_blocks_read_ten_times_cost_one_read_of_the_drive(tmp_path: Path) -> None:
    """C19."""
    box = Box(tmp_path / "store", dram_blocks=80, segments=24)
    chain = chain_of(SMALL, [0] * 64)
    cold(box, chain)
    tiers = [box.get_now(chain)[0].tier for _ in range(10)]
    assert tiers == [Tier.SSD] + [Tier.DRAM] * 9
    assert sum(nbytes for _, _, nbytes in box.reads) == 64 * SMALL_NBYTES


def test_restoring_many_blocks_is_one_batch_with_many_reads_in_flight(tmp_path: Path) -> None:
    """C16: everything is submitted at once, and what lies together is read together."""
    box = Box(tmp_path / "store", dram_blocks=80, segments=24, parallel=4)
    chain = chain_of(SMALL, [0] * 64)
    cold(box, chain)
    get = Get(box.store, chain)
    segments = {name for name, _, _ in box.reads}
    assert len(box.reads) == len(segments) > 8  # one merged request for each segment of six blocks
    assert box.device.in_flight >= len(box.reads)
    assert len(box.device._running) == 4
    box.rest()
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 64


def test_the_drive_works_on_the_first_blocks_of_a_batch_while_the_rest_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "store", dram_blocks=80, segments=24, parallel=4)
    chain = chain_of(SMALL, [0] * 64)
    cold(box, chain)
    submit, table = box.device.submit, box.store._core.ledger.table
    planned: list[tuple[int, int]] = []  # blocks with a slot to read into, and those of them sent, at each call

    def watched(requests: Any) -> None:
        sent = sum(len(one.buffers) for one in requests if one.kind is IoKind.READ)
        planned.append((int((table.state == DramState.READING).sum()), sent))
        submit(requests)

    monkeypatch.setattr(box.device, "submit", watched)
    get = Get(box.store, chain)
    assert sum(sent for _, sent in planned) == 64
    assert planned[0][0] == 24 and planned[0][1] > 0  # of rounds of 8 and 16 blocks
    assert planned[-1][0] == 64
    box.rest()
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 64


def test_copies_of_a_long_batch_begin_while_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "store", dram_blocks=160, segments=24)
    chain = chain_of(SMALL, [0] * 100)
    box.put_now(chain)
    calls: list[int] = []
    submit = box.device.submit

    def watched(requests: Any) -> None:
        calls.append(sum(one.kind is IoKind.CALL for one in requests))
        submit(requests)

    monkeypatch.setattr(box.device, "submit", watched)
    get = Get(box.store, chain)
    assert calls == [4, 4, 4, 1]  # 32 + 32 + 32 + 4 blocks, 8 to a call
    box.rest()
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.DRAM)] * 100


def test_shared_reads_that_fail_fail_for_all_and_the_block_can_be_put_again(box: Box) -> None:
    cold(box)
    box.faults.add(FlipBit(4100), IoKind.READ, nth=1)
    gets = [Get(box.store, FOUR) for _ in range(2)]
    box.rest()
    for get in gets:
        get.check()
        assert kinds(get.transfer.outcomes) == ["Corrupt", "Hit", "Hit", "Hit"]
    assert box.store.match(FOUR).blocks == 0
    assert box.put_now(FOUR) == [Stored(Tier.DRAM), *[Present(Tier.DRAM)] * 3]
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    box.check()


def test_one_bad_place_in_a_merged_read_costs_one_block(box: Box) -> None:
    """C3. The merged request fails whole; read one by one, three of four blocks are fine."""
    cold(box)
    bad_at = 4096 + 2 * SMALL_NBYTES
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda op: op.offset <= bad_at < op.offset + op.nbytes)
    outcomes = box.get_now(FOUR)
    assert kinds(outcomes) == ["Hit", "Hit", "DeviceFailed", "Hit"]
    assert f"@{bad_at}" in outcomes[2].where
    assert box.store.match(FOUR).blocks == 2
    box.check()


def test_a_failed_place_is_not_asked_again(box: Box) -> None:
    """R34."""
    cold(box, FOUR[:1])
    box.faults.add(Fail(errno.EIO), IoKind.READ)
    assert kinds(box.get_now(FOUR[:1])) == ["DeviceFailed"]
    box.reads.clear()
    assert box.get_now(FOUR[:1]) == [Miss()]
    assert box.reads == []
    assert box.put_now(FOUR[:1]) == [Stored(Tier.DRAM)]


def test_a_short_read_brings_the_blocks_that_arrived(box: Box) -> None:
    """C2, C3."""
    cold(box)
    box.faults.add(Short(2 * SMALL_NBYTES + 4096), IoKind.READ)
    outcomes = box.get_now(FOUR)
    # read again one by one, each whole record fits what the drive hands over
    assert outcomes == [Hit(Tier.SSD)] * 4
    assert len(box.reads) == 1 + 2


def test_a_read_that_moved_nothing_finds_no_old_block_in_its_slot(box: Box) -> None:
    """C2: the slot held this very record before."""
    cold(box, FOUR[:1])
    assert box.get_now(FOUR[:1]) == [Hit(Tier.SSD)]
    box.store._core.ledger.evict_idle()
    box.faults.add(PretendDone(), IoKind.READ)
    assert kinds(box.get_now(FOUR[:1])) == ["Corrupt"]
    box.check()


def test_a_late_fault_does_not_take_a_newer_copy_along(box: Box) -> None:
    """Two reads of single layers at one block. The first finds it corrupt, it is put and written again; what the second
    finds is about the old copy.
    """
    cold(box, FOUR[:1])
    box.faults.add(FlipBit(100), IoKind.READ, nth=1)  # the header, for the first
    box.faults.add(Hang(), IoKind.READ, nth=2)
    box.faults.add(FlipBit(100), IoKind.READ, nth=3)
    box.faults.add(Hang(), IoKind.READ, nth=4)
    first, second = (Get(box.store, FOUR[:1], layers=range(1)) for _ in range(2))
    box.step(0.01)
    of_first, of_second = sorted(box.device._hung, key=lambda one: one.number)
    box.device._hung = [of_first]
    box.device.release()
    box.device._hung = [of_second]
    box.step(0.01)
    box.step(0.01)
    assert first.transfer.done and not second.transfer.done
    assert kinds(first.transfer.outcomes) == ["Corrupt"]
    assert box.put_now(FOUR[:1]) == [Stored(Tier.DRAM)]
    for _ in range(40):
        box.step(0.1)
    assert box.store.stats().dirty_nbytes == 0  # written again
    box.device.release()
    box.rest()
    assert kinds(second.transfer.outcomes) == ["Corrupt"]
    first.check()
    second.check()
    box.store._core.ledger.evict_idle()
    assert box.get_now(FOUR[:1]) == [Hit(Tier.SSD)]
    box.check()


# -- single layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2, 3), range(3), range(1, 3)])
def test_single_layers_are_read_alone_and_do_not_promote(box: Box, layers: range) -> None:
    """R16."""
    chain = chain_of(LARGE, [0, 0])
    cold(box, chain)
    assert box.get_now(chain, layers=layers) == [Hit(Tier.SSD)] * 2
    assert sum(nbytes for _, _, nbytes in box.reads) <= 2 * (4096 + (len(layers) + 1) * 4096)
    assert set(box.store.match(chain).tiers) == {Tier.SSD}
    box.check()


# -- invalidation ------------------------------------------------------------------------------------------------------


def test_invalidating_what_is_being_read_gives_it_up_when_the_read_ends(box: Box) -> None:
    cold(box)
    get = Get(box.store, FOUR)
    box.store.invalidate(FOUR, start=2)
    assert box.store.match(FOUR).blocks == 2
    late = Get(box.store, FOUR)
    assert kinds(late.transfer.outcomes) == ["Pending", "Pending", "Miss", "Miss"]
    box.rest()
    get.check()
    late.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 4  # asked for before
    assert box.store.match(FOUR).tiers == (Tier.DRAM, Tier.DRAM)
    assert box.put_now(FOUR) == [*[Present(Tier.DRAM)] * 2, *[Stored(Tier.DRAM)] * 2]
    box.check()


def test_what_is_invalidated_while_a_put_fills_it_is_not_answered_as_stored(box: Box) -> None:
    put = box.put(FOUR)
    box.store.invalidate(FOUR, start=1)
    again = box.put(FOUR)
    box.rest()
    assert kinds(put.outcomes) == ["Stored", "Busy", "Busy", "Busy"]
    assert kinds(again.outcomes) == ["Present", "Busy", "Busy", "Busy"]
    assert box.store.match(FOUR).blocks == 1
    box.check()


def test_a_put_that_waits_for_room_does_not_bring_back_what_is_invalidated_meanwhile(tmp_path: Path) -> None:
    """It was submitted before, and holds what is not wanted any more."""
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    other = chain_of(SMALL, [1] * 4)
    box.faults.add(Slow(1.0), IoKind.WRITE)
    first, second, third = box.put(LONG), box.put(other), box.put(chain_of(SMALL, [1, 0]))
    box.step()
    assert (first.done_blocks, second.done_blocks) == (4, 0)
    box.store.invalidate(other, start=1)
    box.store.invalidate(LONG, start=9)
    for put in (first, second, third):
        box.wait(put)
    assert kinds(first.outcomes) == ["Stored"] * 9 + ["Busy"] * 7
    assert kinds(second.outcomes) == ["Stored"] + ["Busy"] * 3
    assert kinds(third.outcomes) == ["Present", "Stored"]
    assert box.store.match(other).blocks == 1
    box.check()


def test_a_put_with_no_time_at_all_takes_what_there_is_room_for(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    put = box.put(LONG, deadline_s=0.0)
    box.wait(put)
    assert kinds(put.outcomes) == ["Stored"] * 4 + ["Busy"] * 12


def test_a_pinned_block_that_was_invalidated_goes_with_the_pin(box: Box) -> None:
    box.put_now(FOUR)
    pin = box.store.pin(FOUR)
    box.store.invalidate(FOUR)
    assert box.store.match(FOUR).blocks == 0
    assert box.get_now(FOUR) == [Miss()] * 4
    assert box.put_now(LONG) == [Busy()] * 16  # nothing may hang on what is about to go
    assert box.store.stats().dram_used_nbytes == 4 * SMALL_NBYTES
    box.check()
    pin.release()
    box.check()
    assert box.store.stats().dram_used_nbytes == 0
    assert box.put_now(LONG) == [Stored(Tier.DRAM)] * 16


def test_an_invalidated_block_stays_away_after_a_restart_also_if_the_index_had_let_go_of_it(box: Box) -> None:
    """Its record is still in a segment, whole."""
    cold(box)
    box.store._core.ledger.forget(int(box.store._core.ledger.find(FOUR)[1]))
    assert box.store.match(FOUR).blocks == 1
    box.store.invalidate(FOUR, start=1)
    box.reopen()
    assert box.store.match(FOUR).blocks == 1
    box.check()


def test_invalidating_a_namespace_that_the_store_never_saw_does_nothing(box: Box) -> None:
    box.store.invalidate(FOUR)
    assert box.store.flush(10.0)
    assert box.writes == []
    box.check()


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_read_that_expires_leaves_the_buffer_alone_and_later_readers_profit(box: Box) -> None:
    """C20."""
    cold(box)
    box.faults.add(Slow(1.0), IoKind.READ, nth=1)
    get = Get(box.store, FOUR, deadline_s=0.5)
    box.step(0.6)
    assert get.transfer.outcomes == [Expired()] * 4
    get.check()
    later = Get(box.store, FOUR)
    box.rest()
    later.check()
    get.check()
    assert later.transfer.outcomes == [Hit(Tier.SSD)] * 4
    assert len(box.reads) == 1
    box.check()


def test_a_read_of_a_drive_that_hangs_expires_and_the_store_goes_on(box: Box) -> None:
    cold(box)
    box.faults.add(Hang(), IoKind.READ, nth=1)
    get = Get(box.store, FOUR, deadline_s=0.5)
    box.wait(get.transfer)
    assert get.transfer.outcomes == [Expired()] * 4
    other = chain_of(SMALL, [1] * 4)
    assert box.put_now(other) == [Stored(Tier.DRAM)] * 4
    assert box.get_now(other) == [Hit(Tier.DRAM)] * 4
    box.device.release()
    box.rest()
    get.check()
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    box.check()


def queued_behind_a_hang(box: Box) -> list[Any]:
    """The drive is given no more until `release`."""
    chains = chains_on_the_drive(box, box.device._parallel + 1)
    box.faults.add(Hang(), IoKind.READ)
    for chain in chains[:-1]:
        Get(box.store, chain)
    box.step(0.01)
    assert len(box.device._hung) == box.device._parallel
    return chains


def test_a_read_that_expires_in_line_is_not_sent_to_the_drive(box: Box) -> None:
    *_, chain = queued_behind_a_hang(box)
    get = Get(box.store, chain, deadline_s=0.5)
    box.step(0.6)
    assert get.transfer.outcomes == [Expired()]
    box.reads.clear()
    box.faults.clear()
    box.device.release()
    box.rest()
    assert len(box.reads) == 0
    get.check()
    assert box.get_now(chain) == [Hit(Tier.SSD)]
    box.check()


def test_who_wants_a_block_whose_read_expired_in_line_has_it_read(box: Box) -> None:
    *_, chain = queued_behind_a_hang(box)
    soon = Get(box.store, chain, deadline_s=0.5)
    patient = Get(box.store, chain)
    box.step(0.6)
    assert soon.transfer.outcomes == [Expired()]
    assert not patient.transfer.done
    box.faults.clear()
    box.device.release()
    box.rest()
    soon.check()
    patient.check()
    assert patient.transfer.outcomes == [Hit(Tier.SSD)]
    box.check()


def test_layers_that_expire_in_line_are_not_read_and_the_block_is_fine(box: Box) -> None:
    *_, chain = queued_behind_a_hang(box)
    get = Get(box.store, chain, layers=range(1), deadline_s=0.5)
    box.step(0.6)
    assert get.transfer.outcomes == [Expired()]
    box.faults.clear()
    box.device.release()
    box.rest()
    get.check()
    assert box.get_now(chain) == [Hit(Tier.SSD)]
    box.check()


def chains_on_the_drive(box: Box, count: int) -> list[Any]:
    chains = [chain_of(SMALL, [way]) for way in range(10, 10 + count)]
    for chain in chains:
        assert box.put_now(chain) == [Stored(Tier.DRAM)]
    box.cool()
    box.reads.clear()
    return chains


def test_a_drive_that_answers_with_errors_is_left_alone_and_tried_again(box: Box) -> None:
    """Five errors in a row; no sixth read; after a second one read at a time, and three good ones end it."""
    chains = chains_on_the_drive(box, 12)
    box.faults.add(Fail(errno.ENXIO), IoKind.READ)
    for chain in chains[:8]:
        assert kinds(box.get_now(chain)) == ["DeviceFailed"]
    assert len(box.reads) == 5
    assert box.put_now(FOUR) == [Stored(Tier.DRAM)] * 4
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    box.faults.clear()
    box.step(1.1)
    for chain in chains:  # no copy was given up: the drive was to blame, not the places
        assert box.get_now(chain) == [Hit(Tier.SSD)]
    assert len(box.reads) == 5 + 12
    box.check()


def test_a_drive_that_hangs_is_not_given_more_reads(box: Box) -> None:
    """C20."""
    chains = chains_on_the_drive(box, 3)
    box.faults.add(Hang(), IoKind.READ, nth=1)
    hanging = Get(box.store, chains[0])
    for _ in range(21):
        box.step(0.5)
    assert not hanging.transfer.done
    assert kinds(box.get_now(chains[1])) == ["DeviceFailed"]
    assert len(box.reads) == 1
    box.step(1.0)
    for chain in chains[1:]:  # tried again, one at a time
        assert box.get_now(chain) == [Hit(Tier.SSD)]
    assert not hanging.transfer.done
    box.device.release()
    box.rest()
    assert hanging.transfer.outcomes == [Hit(Tier.SSD)]
    hanging.check()
    box.check()


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_put_into_a_full_dram_tier_waits_for_writes(tmp_path: Path) -> None:
    """C14."""
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    put = box.put(LONG)
    box.step()
    assert put.done_blocks == 4
    box.rest()
    assert put.outcomes == [Stored(Tier.DRAM)] * 16
    assert box.store.match(LONG).blocks == 16
    assert box.get_now(LONG) == [Hit(Tier.SSD)] * 12 + [Hit(Tier.DRAM)] * 4 or box.store.match(LONG).blocks == 16
    box.check()


def test_a_put_answers_busy_when_nothing_is_written_in_time(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16, busy_after_s=5.0)
    box.faults.add(Hang(), IoKind.WRITE)
    put = box.put(LONG)
    box.wait(put)
    assert put.outcomes == [Stored(Tier.DRAM)] * 4 + [Busy()] * 12
    assert box.clock.monotonic_s() == pytest.approx(1005.0, abs=0.1)
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    box.faults.clear()
    box.device.release()
    box.step(1.0)
    assert kinds(box.put_now(LONG)) == ["Present"] * 4 + ["Stored"] * 12
    box.check()


@pytest.mark.parametrize(("first_s", "second_s"), [(None, 0.1), (20.0, 0.1), (None, 0.0)])
def test_a_put_with_a_deadline_is_answered_in_time_also_behind_another(
    tmp_path: Path, first_s: float | None, second_s: float
) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    box.faults.add(Hang(), IoKind.WRITE)
    first = box.put(LONG, deadline_s=first_s)
    second = box.put(chain_of(SMALL, [1] * 4), deadline_s=second_s)
    box.wait(second)
    assert second.outcomes == [Busy()] * 4
    assert box.clock.monotonic_s() < 1000.2
    box.wait(first)
    assert box.clock.monotonic_s() == pytest.approx(1000.0 + (first_s or 5.0), abs=0.1)
    assert kinds(first.outcomes) == ["Stored"] * 4 + ["Busy"] * 12
    box.faults.clear()
    box.device.release()
    box.rest()
    box.check()


def test_a_burst_into_a_tiny_dram_tier_loses_nothing_while_the_drive_has_room(tmp_path: Path) -> None:
    """C14: 512 blocks at once, DRAM for 8."""
    box = Box(tmp_path / "store", dram_blocks=8, segments=140, batch_nbytes=4 * SMALL_NBYTES)
    chains = [chain_of(SMALL, [way] * 32) for way in range(16)]
    puts = [box.put(chain) for chain in chains]
    for put in puts:
        box.wait(put)
    assert [outcome for put in puts for outcome in put.outcomes] == [Stored(Tier.DRAM)] * 512
    assert [box.store.match(chain).blocks for chain in chains] == [32] * 16
    assert box.store.stats().dropped_blocks == 0
    for chain in chains:
        assert {type(outcome) for outcome in box.get_now(chain)} == {Hit}
    box.check()


def test_without_a_drive_a_chain_longer_than_dram_keeps_its_beginning() -> None:
    """Room for its end is not made at the cost of what it hangs on."""
    box = Box(None, dram_blocks=8)
    old = chain_of(SMALL, [1] * 6)
    box.put_now(old)
    outcomes = box.put_now(LONG)
    assert outcomes == [Stored(Tier.DRAM)] * 8 + [Busy()] * 8
    assert box.store.match(LONG).blocks == 8
    assert box.store.match(old).blocks == 0
    assert box.get_now(LONG) == [Hit(Tier.DRAM)] * 8 + [Miss()] * 8
    box.check()


def test_a_chain_longer_than_the_drive_keeps_its_beginning(tmp_path: Path) -> None:
    """Reclaiming its oldest segment would drop all of it."""
    box = Box(tmp_path / "store", dram_blocks=12, segments=6)
    chain = chain_of(LARGE, [0] * 30)
    outcomes = kinds(box.put_now(chain))
    kept = box.store.match(chain).blocks
    assert kept >= 12  # of 18 that fit
    assert outcomes[:kept] == ["Stored"] * kept
    assert outcomes[-1] != "Stored"
    box.check()


def test_nothing_is_written_again_and_again_on_a_full_drive(tmp_path: Path) -> None:
    """DRAM as large as the drive, everything warm: reclaim must come to an end."""
    box = Box(tmp_path / "store", dram_blocks=40, segments=5)
    for way in range(8):
        box.put_now(chain_of(SMALL, [way] * 5))
        box.step(0.5)
    for _ in range(100):
        box.step(0.5)
    written = box.store.stats().ssd_written_nbytes
    for _ in range(100):
        box.step(0.5)
    assert box.store.stats().ssd_written_nbytes == written
    box.check()


def test_a_put_behind_a_gap_is_rejected_and_what_is_there_is_present(box: Box) -> None:
    cold(box)
    box.faults.add(FlipBit(SMALL_NBYTES + 4100), IoKind.READ, nth=1)
    assert kinds(box.get_now(FOUR)) == ["Hit", "Corrupt", "Hit", "Hit"]
    six = chain_of(SMALL, [0] * 6)
    outcomes = box.put_now(six, 2)
    assert kinds(outcomes) == ["Present", "Present", "Rejected", "Rejected"]
    assert "block 1" in outcomes[2].reason
    assert kinds(box.put_now(six)) == ["Present", "Stored", "Present", "Present", "Stored", "Stored"]
    assert box.store.match(six).blocks == 6
    assert kinds(box.put_now(chain_of(SMALL, [0] * 12), 9)) == ["Rejected"] * 3
    box.check()


@pytest.mark.usefixtures("python_passes")  # the native ones know addresses only: nothing there can raise
def test_a_caller_buffer_that_breaks_costs_nobody_else_the_block(box: Box) -> None:
    cold(box)
    bad = Get(box.store, FOUR)
    good = Get(box.store, FOUR)

    class Broken:
        parts = range(SMALL.layout.parts)

        def copy_out(self, *_: object) -> None:
            raise MemoryError("gone")

    bad.transfer.buffers = Broken()  # type: ignore[assignment]
    box.rest()
    assert kinds(bad.transfer.outcomes) == ["DeviceFailed"] * 4
    good.check()
    assert good.transfer.outcomes == [Hit(Tier.SSD)] * 4
    assert box.store.match(FOUR).blocks == 4
    assert box.store.flush(10.0)
    box.store._core.ledger.evict_idle()
    assert set(box.store.match(FOUR).tiers) == {Tier.SSD}  # the copy was not given up
    box.check()


# -- pins and splits ---------------------------------------------------------------------------------------------------


def test_a_run_is_split_while_its_blocks_are_pinned_and_written(box: Box) -> None:
    box.put_now(LONG)
    pin = box.store.pin(LONG)
    box.faults.add(Slow(1.0), IoKind.WRITE)
    for _ in range(30):
        if (box.store._core.ledger.table.writing).any():
            break
        box.step(0.2)
    assert box.store._core.ledger.table.writing.any()
    fork = chain_of(SMALL, [0] * 7 + [1] * 3)
    box.put_now(fork)
    assert len(box.store._core.ledger.tree) == 3
    box.check()
    assert box.store.flush(100.0)
    box.check()
    pin.release()
    box.store._core.ledger.evict_idle()
    assert box.get_now(LONG) == [Hit(Tier.SSD)] * 16
    assert box.get_now(fork) == [Hit(Tier.DRAM)] * 7 + [Hit(Tier.SSD)] * 3
    box.check()


def test_a_pinned_block_that_loses_its_copy_leaves_the_index_with_its_pin(box: Box) -> None:
    cold(box, FOUR[:1])
    pin = box.store.pin(FOUR[:1])
    box.faults.add(Fail(errno.EIO), IoKind.READ)
    assert kinds(box.get_now(FOUR[:1])) == ["DeviceFailed"]
    assert box.store._core.ledger.table.used == 1
    pin.release()
    assert box.store._core.ledger.table.used == 0
    box.check()


def test_reclaim_waits_for_reads_of_its_segment(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=5)
    cold(box)
    box.faults.add(Hang(), IoKind.READ)
    get = Get(box.store, FOUR)
    for way in range(1, 8):  # five times what the drive holds
        box.put(chain_of(SMALL, [way] * 6))
        for _ in range(20):  # no longer than a read may take: while reads are stopped, nothing is written
            box.step(0.05)
    assert (tmp_path / "store" / "partitions" / box.partition / "00000001.seg") in box.device.snapshot()
    assert box.store.stats().reclaimed_segments > 0
    box.check()
    box.faults.clear()
    box.device.release()
    box.rest()
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 4
    box.check()


# -- prefetch ----------------------------------------------------------------------------------------------------------


def test_a_prefetch_promotes_and_the_next_get_reads_nothing(box: Box) -> None:
    cold(box)
    transfer = box.store.prefetch(FOUR)
    box.wait(transfer)
    assert transfer.outcomes == [Hit(Tier.SSD)] * 4
    box.reads.clear()
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    assert box.reads == []


def test_a_prefetch_never_displaces_pinned_or_last_copies_and_answers_busy_at_once(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    cold(box)
    pinned = chain_of(SMALL, [1] * 3)
    box.put_now(pinned)
    pin = box.store.pin(pinned)
    transfer = box.store.prefetch(FOUR)
    assert kinds(transfer.outcomes) == ["Pending", "Busy", "Busy", "Busy"]
    box.rest()
    assert box.store.match(pinned).tiers == (Tier.DRAM,) * 3
    pin.release()
    # a drive that takes no writes: the only copies there are stay, whatever somebody might want soon
    box.faults.add(Fail(errno.ENOSPC), IoKind.WRITE)
    box.store.flush(1.0)
    other = chain_of(SMALL, [2])
    assert kinds(box.put_now(other)) == ["Stored"]
    assert box.store.stats().ssd_writable is False
    transfer = box.store.prefetch(FOUR)
    assert Tier.DRAM in box.store.match(other).tiers
    box.rest()
    box.check()


def test_demand_reads_go_before_prefetches_that_wait(tmp_path: Path) -> None:
    """C17, R20: also where the prefetch came first, and for a block that is itself being prefetched."""
    box = Box(tmp_path / "store", dram_blocks=60, segments=24, parallel=1)
    ahead = chain_of(SMALL, [0] * 24)
    wanted = chain_of(SMALL, [1] * 4)
    for chain in (ahead, wanted):
        box.put_now(chain)
    box.cool()
    prefetch = box.store.prefetch(ahead)
    get = Get(box.store, wanted)
    box.wait(get.transfer)
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 4
    assert prefetch.done_blocks <= 6  # the one request that was under way
    get.check()
    box.rest()
    assert prefetch.outcomes == [Hit(Tier.SSD)] * 24


def test_a_get_overtakes_the_prefetch_of_its_own_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_AT_ONCE_NBYTES", 2 * SMALL_NBYTES)
    box = Box(tmp_path / "store", dram_blocks=60, segments=24, parallel=1)
    chain = chain_of(SMALL, [0] * 24)
    cold(box, chain)
    prefetch = box.store.prefetch(chain)
    assert sum(nbytes for _, _, nbytes in box.reads) == 2 * SMALL_NBYTES
    get = Get(box.store, chain, 20, 21)
    box.wait(get.transfer)
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)]
    assert prefetch.done_blocks <= 5
    box.rest()
    assert prefetch.outcomes == [Hit(Tier.SSD)] * 24
    assert sum(nbytes for _, _, nbytes in box.reads) == 24 * SMALL_NBYTES
    box.check()


# -- other -------------------------------------------------------------------------------------------------------------


def test_the_drive_is_full_and_stores_stop_while_loads_go_on(tmp_path: Path) -> None:
    """C11."""
    box = Box(tmp_path / "store", dram_blocks=8, segments=16)
    cold(box)
    box.faults.add(Fail(errno.ENOSPC), "create")
    box.faults.add(Fail(errno.ENOSPC), IoKind.WRITE)
    others = [chain_of(SMALL, [way] * 3) for way in range(1, 8)]
    for chain in others:
        assert kinds(box.put_now(chain)) == ["Stored"] * 3
    assert box.store.stats().ssd_writable is False
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4
    assert box.get_now(others[-1])[0] == Hit(Tier.DRAM)
    box.faults.clear()
    for _ in range(100):
        box.step(0.1)
    assert box.store.flush(10.0)
    assert box.store.stats().ssd_writable is True
    box.check()


def test_a_partial_write_is_not_in_the_index(box: Box) -> None:
    """C4."""
    box.put_now(FOUR)
    box.faults.add(Short(2 * SMALL_NBYTES), IoKind.WRITE, when=lambda op: op.offset > 0)
    box.store.flush(1.0)
    assert set(box.store.match(FOUR).tiers) == {Tier.DRAM}
    assert not (box.store._core.ledger.table.segment >= 0).any()
    box.check()
    box.faults.clear()
    box.step(6.0)
    box.cool()
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4


def test_more_holders_than_sixteen_bits_count(box: Box) -> None:
    box.put_now(FOUR[:1])
    pins = [box.store.pin(FOUR[:1]) for _ in range(40_000)]
    box.check()
    for pin in pins:
        pin.release()
    box.check()


def test_hot_reads_of_a_dirty_chain_do_not_starve_its_write(tmp_path: Path) -> None:
    """Write-behind waits until a run is idle; a run next to it that is, is written."""
    box = Box(tmp_path / "store", dram_blocks=32, segments=16, after_s=2.0)
    idle = chain_of(SMALL, [1] * 4)
    box.put_now(FOUR)
    box.put_now(idle)
    for _ in range(8):
        box.step(0.5)
        box.store.touch(FOUR)
    tiers = box.store._core.ledger.table.segment[box.store._core.ledger.find(idle)]
    assert (tiers >= 0).all()
    assert (box.store._core.ledger.table.segment[box.store._core.ledger.find(FOUR)] < 0).all()
    box.check()


def test_equal_keys_of_two_namespaces_are_two_blocks(box: Box) -> None:
    """C7. Keys of an engine's own may be alike in two models: the namespace of the chain decides, not the key alone."""
    other = KeyChain(replace(SMALL, model="another"), FOUR.root, FOUR.data)
    narrow = KeyChain(LARGE, FOUR.root, FOUR.data)
    box.put_now(FOUR)
    for chain in (other, narrow):
        assert box.store.match(chain).blocks == 0
        out = np.zeros((4, chain.namespace.layout.block_nbytes), np.uint8)
        transfer = box.store.get(chain, out)
        box.wait(transfer)
        assert transfer.outcomes == [Miss()] * 4
        assert not out.any()
    theirs = np.full((4, SMALL.layout.block_nbytes), 7, np.uint8)
    put = box.store.put(other, theirs)
    box.wait(put)
    assert put.outcomes == [Stored(Tier.DRAM)] * 4
    out = np.zeros_like(theirs)
    box.wait(box.store.get(other, out))
    assert (out == theirs).all()
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4


def test_the_harness_knows_blocks_apart() -> None:
    whole = contents(FOUR)
    assert len({bytes(whole[at : at + 256]) for at in range(0, 4 * 256, 256)}) == 4
    assert len(whole) == 4 * 256
