"""Which of several drives takes a block: never none of those that can write."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.engine.blocks import Ids
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.testing.invariants import check_ledger

RECORD = 8192
SEGMENT = 10 * RECORD
A = chain_of(SMALL, [0, 1, 2, 3])


def make(volumes: int = 2) -> tuple[Ledger, Ids]:
    """A ledger whose volumes each have an open segment, and four blocks that wait to be written."""
    spaces = [
        SegmentSpace(4 * SEGMENT, SEGMENT, lambda records, namespaces: 4096, volume=number, alone=False)
        for number in range(volumes)
    ]
    ledger = Ledger(16 * RECORD, spaces, writes=WritePolicy())
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    ids, _ = ledger.begin_put(A, 0, 4, namespace=0, sequence=b"", now_s=0.0)
    for block in ids.tolist():
        ledger.filled(block, 0.0)
        ledger.let_go(block)
    return ledger, ids


def open_segment(space: SegmentSpace) -> None:
    segment = space.begin()
    segment.state = SegmentState.OPEN
    space.open = segment


def fails_on(space: SegmentSpace, *keys: bytes) -> None:
    space.may_store = lambda key: key not in keys


@pytest.mark.parametrize("volumes", [1, 2, 3])
def test_every_block_that_may_be_stored_is_taken_by_a_volume_that_can_write(volumes: int) -> None:
    ledger, ids = make(volumes)
    block = int(ids[0])
    states = itertools.product([True, False], repeat=2)
    for state in itertools.product([(*one, first) for one in states for first in (True, False)], repeat=volumes):
        for space, (can_write, may_store, first) in zip(ledger.spaces, state, strict=True):
            space.can_write = can_write
            space.may_store = (lambda _: True) if may_store else (lambda _: False)
            space.first = ids[:1] if first else ids[:0]
        if sum(first for _, _, first in state) > 1:
            continue  # one segment holds a block, and one reclaim carries it over
        writable = [space for space in ledger.spaces if space.can_write]
        taken = [not ledger.dealing.refused_by(space)(block) for space in writable]
        assert any(taken) or not writable, state
        can_have = [space.may_store(b"") for space in writable]
        if any(can_have):
            assert not any(took and not may for took, may in zip(taken, can_have, strict=True)), state


def test_what_reclaim_carries_over_goes_to_another_drive_if_it_failed_on_its_own() -> None:
    ledger, ids = make()
    here, there = ledger.spaces
    for space in ledger.spaces:
        open_segment(space)
    fails_on(here, ledger.key_of(int(ids[1])))
    here.first = ids
    batch = ledger.next_write(0.0, pressed=True, space=here)
    assert batch is not None and batch.ids.tolist() == ids[[0, 2, 3]].tolist()
    batch = ledger.next_write(0.0, pressed=True, space=there)
    assert batch is not None and batch.ids.tolist() == ids[[1]].tolist()


def test_a_block_that_no_other_drive_can_take_is_written_where_it_failed() -> None:
    ledger, ids = make()
    here, there = ledger.spaces
    open_segment(here)
    fails_on(here, ledger.key_of(int(ids[1])))
    here.first = ids
    there.can_write = False
    batch = ledger.next_write(0.0, pressed=True, space=here)
    assert batch is not None and batch.ids.tolist() == ids.tolist()
    check_ledger(ledger)


def test_no_segment_is_made_for_blocks_that_go_elsewhere() -> None:
    ledger, ids = make()
    here, there = ledger.spaces
    fails_on(here, *(ledger.key_of(block) for block in ids.tolist()))
    assert not ledger.needs_segment(here) and ledger.needs_segment(there)
    there.can_write = False
    assert ledger.needs_segment(here)
    there.can_write = True
    fails_on(here, ledger.key_of(int(ids[0])))
    assert ledger.needs_segment(here)


def test_a_drive_makes_no_room_for_blocks_that_go_to_another(tmp_path: Path) -> None:
    """It is full, and would give up a segment of what it has for an empty one."""
    box = Box(tmp_path, dram_blocks=24, segments=4, drives=2, batch_nbytes=2 * SMALL_NBYTES, after_s=0.0)
    for number in range(30):
        box.put_now(chain_of(SMALL, [1000 * number + at for at in range(4)]))
    assert box.store.flush(10.0)
    writers: Any = box.store._mover.writers
    writers.each[0].seal_open()
    box.step()
    box.rest()
    space = box.store._core.ledger.spaces[0]
    space.other_nbytes += space.most_nbytes - space.file_nbytes - space.segment_nbytes  # others' files
    assert space.open is None and space.room_for_carried() and not space.room_for_segment()
    before = sorted(space.segments)
    space.may_store = lambda _: False
    for number in range(30, 34):
        outcomes = box.put_now(chain_of(SMALL, [1000 * number + at for at in range(4)]))
        assert kinds(outcomes) == ["Stored"] * 4
    assert box.store.flush(10.0)
    assert sorted(space.segments) == before


def test_a_segment_is_not_waited_for_when_what_it_held_goes_to_another_drive(tmp_path: Path) -> None:
    """What reclaim carries over has failed on this drive. The other one has it, and hangs."""
    box = Box(tmp_path, dram_blocks=40, segments=8, drives=2, after_s=0.0)
    first, root = chain_of(SMALL, [1]), chain_of(SMALL, [2])
    for chain in (first, root):
        box.put_now(chain)
        box.cool()
    writers: Any = box.store._mover.writers
    ledger = box.store._core.ledger
    ids = ledger.find(root)
    assert (ledger.table.segment[ids] >> 24).tolist() == [1]
    writer, space = writers.each[1], ledger.spaces[1]
    writer.seal_open()
    box.step()
    box.rest()
    (segment,) = space.segments.values()
    space.may_store = lambda _: False
    writers.each[0].write_next = lambda *_, **__: False  # busy
    reclaimer = writer._reclaimer
    segment.state = SegmentState.RECLAIMING
    reclaimer._reclaiming, reclaimer._carried = segment, ids
    reclaimer._carry = reclaimer._reader.bring(ids, box.clock.monotonic_s())
    for _ in range(40):
        box.step(0.1)
    assert not reclaimer.busy and segment.number not in space.segments
    assert kinds(box.get_now(root)) == ["Hit"]
    del writers.each[0].write_next
    assert box.store.flush(10.0)
    assert (ledger.table.segment[ids] >> 24).tolist() == [0]
    box.check()
