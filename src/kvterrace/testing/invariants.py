"""What must hold of a store between any two events: an integrity check that counts.

It looks at the books, not at the bytes: every slot, record, run and use is counted a second time, from the block table
alone, and compared with what the ledger keeps. Costs O(blocks); for tests and for a doctor, not for a hot path.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

import numpy as np

from kvterrace.engine.blocks import NOWHERE, DramState
from kvterrace.engine.core import Core
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.store import Store

__all__ = ["check_invariants", "check_ledger"]

#: How often, and how far apart in seconds, a store that is driven by a thread is looked at until it is at rest.
_TRIES = 100
_PAUSE_S = 0.02
_READABLE = frozenset(SegmentState) - {SegmentState.CREATING, SegmentState.STUCK}


def check_invariants(store: Store) -> None:
    """Raise AssertionError, with what does not add up, if a store's books are not in order.

    Holds the store's lock. May be called at any time, also with transfers in flight or after `close`.
    """
    core, mover, driver = store._core, store._mover, store._driver  # noqa: SLF001 - it looks inside
    for tries_left in reversed(range(_TRIES)):
        with driver.lock:
            assert mover.fault is None, f"the store has failed: {mover.fault}"
            check_ledger(core.ledger)
            _check_counts(core)
            if mover.active or any(engine.in_flight for engine in core.engines):
                return
            try:
                _check_rest(core.ledger)
                return
            except AssertionError:
                # results that a driver's thread has taken from the engine, and waits for the lock to handle
                if driver._thread is None or not tries_left:  # noqa: SLF001
                    raise
        threading.Event().wait(_PAUSE_S)


def _check_rest(ledger: Ledger) -> None:
    table, allocator = ledger.table, ledger.dram.allocator
    used = np.flatnonzero(table.users)
    assert not len(used), f"nothing is in flight, and blocks {used[:5].tolist()} are in use"
    doomed = list(ledger.doomed_blocks)
    assert not doomed or table.pins[doomed].all(), "doomed for nothing"
    staging = allocator.used_nbytes - _slots_nbytes(ledger)
    assert staging == 0, f"nothing is in flight, and {staging} B of staging are taken"


def check_ledger(ledger: Ledger) -> None:
    """The part of `check_invariants` that needs a ledger alone."""
    _check_tree(ledger)
    _check_dram(ledger)
    _check_dirty(ledger)
    _check_use(ledger)
    for number, space in enumerate(ledger.spaces):
        _check_ssd(ledger, space, number)


def _check_tree(ledger: Ledger) -> None:
    tree, table = ledger.tree, ledger.table
    seen: list[int] = []
    for run in tree:
        assert len(run), f"{run!r} is empty"
        assert tree.run(run.number) is run, f"{run!r} is not the run of its number"
        assert (table.run[run.ids] == run.number).all(), f"{run!r} has blocks of another run"
        seen += run.ids.tolist()
        place = 0
        if run.parent is not None:
            assert run in run.parent.children, f"{run!r} is nobody's child"
            assert tree.run(run.parent.number) is run.parent, f"the parent of {run!r} does not exist"
            place = run.parent.depth + len(run.parent)
            assert tree.used_s[run.parent.number] >= tree.used_s[run.number], f"{run!r} was used after its parent"
            assert run.parent.namespace == run.namespace, f"{run!r} hangs on another namespace"
        assert run.depth == place, f"{run!r} should begin at {place}"
        for child in run.children:
            assert child.parent is run, f"{child!r} has another parent than {run!r}"
        if not run.children:
            last = int(run.ids[-1])
            kept = (table.slot[last] != NOWHERE) | (table.segment[last] != NOWHERE)
            kept |= bool(table.users[last] or table.pins[last])
            assert kept, f"{run!r} ends in a block that is nowhere and that nobody uses"
    counts = Counter(seen)
    assert len(counts) == len(seen), f"blocks in two runs: {[one for one, n in counts.items() if n > 1][:5]}"
    assert len(seen) == table.used, f"{table.used} ids are taken, {len(seen)} are in runs"
    in_runs = np.flatnonzero(table.run != NOWHERE)
    assert set(in_runs.tolist()) == counts.keys(), "the table and the runs disagree about which blocks there are"


def _slots_nbytes(ledger: Ledger) -> int:
    return sum(ledger.geometry_of(block).record_nbytes for block in np.flatnonzero(ledger.table.slot >= 0).tolist())


def _check_dram(ledger: Ledger) -> None:
    table, dram = ledger.table, ledger.dram
    dram.allocator.check()
    with_slot = np.flatnonzero(table.slot != NOWHERE)
    for block in with_slot.tolist():
        taken, wanted = dram.allocator.size_of(dram.offset(block)), ledger.geometry_of(block).record_nbytes
        assert taken == wanted, f"block {block} has a slot of {taken} B and needs {wanted} B"
    assert len(set(table.slot[with_slot].tolist())) == len(with_slot), "two blocks share a slot"
    assert ((table.state != DramState.EMPTY) == (table.slot != NOWHERE)).all(), "a state without a slot, or the reverse"
    assert dram.allocator.used_nbytes >= _slots_nbytes(ledger), "slots take more than what is taken"
    in_ready = np.flatnonzero(table.state == DramState.READY).tolist()
    ready = sum(ledger.geometry_of(block).record_nbytes for block in in_ready)
    assert dram.ready_nbytes == ready, f"{ready} B of slots are ready, {dram.ready_nbytes} B are counted"
    leaving = dram.line.ids()
    assert sorted(leaving.tolist()) == np.flatnonzero(table.leaving).tolist(), "the line is not that of the table"
    assert (table.slot[leaving] != NOWHERE).all(), "a block leaves that is not here"
    inside = dram.wants(with_slot.astype(np.int32))
    assert (inside ^ table.leaving[with_slot]).all(), "a block is neither inside nor leaving, or both"
    assert not table.marked.any(), "scratch was left behind"
    awaited = np.flatnonzero(table.awaited)
    assert sorted(dram._awaited) == awaited.tolist(), "the list of what was prefetched is not that of the table"  # noqa: SLF001
    assert (table.state[awaited] == DramState.READY).all(), "a block is awaited that is not in DRAM"


def _check_dirty(ledger: Ledger) -> None:
    table = ledger.table
    dirty = np.flatnonzero((table.state == DramState.READY) & (table.segment == NOWHERE) & ~table.spent).tolist()
    nbytes = sum(ledger.geometry_of(block).record_nbytes for block in dirty)
    assert ledger.dirty.nbytes == nbytes, f"{nbytes} B have no copy below, the ledger says {ledger.dirty.nbytes} B"
    runs = {int(table.run[block]) for block in dirty}
    counts = Counter(table.run[dirty].tolist())
    assert ledger.dirty._counts == counts, "dirty blocks by run"  # noqa: SLF001
    listed = set(ledger.dirty.since_s)
    assert listed == runs, f"runs listed as dirty {sorted(listed)[:5]}, dirty {sorted(runs)[:5]}"
    for number in ledger.attention.runs:
        ledger.tree.run(number)


def _check_use(ledger: Ledger) -> None:
    table = ledger.table
    assert (table.users >= 0).all() and (table.pins >= 0).all(), "let go more often than held"
    moving = (table.state == DramState.FILLING) | (table.state == DramState.READING) | table.writing
    assert (table.users[moving] > 0).all(), "a slot is being filled or written for nobody"
    writing = table.writing
    assert (table.state[writing] == DramState.READY).all(), "a slot is written that holds no block"
    assert (table.segment[writing] == NOWHERE).all(), "a block is written twice"
    for block in ledger.doomed_blocks:
        assert table.run[block] != NOWHERE, f"block {block} is doomed and does not exist"
        assert table.users[block] or table.pins[block], f"block {block} is doomed, unused, and still there"


def _check_ssd(ledger: Ledger, space: SegmentSpace, volume: int) -> None:
    table = ledger.table
    assert space.file_nbytes <= space.cap_nbytes, (
        f"{space.file_nbytes} B in files, over the cap of {space.cap_nbytes} B"
    )
    live: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    used_us: Counter[int] = Counter()
    ends: dict[int, list[tuple[int, int]]] = {}
    mine = table.segment != NOWHERE
    if len(ledger.spaces) > 1:
        mine &= table.segment >> 24 == volume
        assert {number >> 24 for number in space.segments} <= {volume}, "a segment of another volume"
    for block in np.flatnonzero(mine).tolist():
        number, offset = int(table.segment[block]), int(table.page[block]) * PAGE_NBYTES
        nbytes = ledger.geometry_of(block).record_nbytes
        assert space.segments[number].state in _READABLE, f"block {block} lies in {space.segments[number]!r}"
        live[number] += nbytes
        blocks[number] += 1
        kept[number] += int(table.kept[block])
        used_us[number] += math.floor(float(ledger.tree.used_s[table.run[block]]) * 1e6)
        ends.setdefault(number, []).append((offset, offset + nbytes))
    by_state = {state: {segment.number for segment in space.in_state(state)} for state in SegmentState}
    for number, segment in space.segments.items():
        assert segment.live_nbytes == live[number], f"{segment!r}: {live[number]} B are live"
        assert segment.writers >= 0
        place = PAGE_NBYTES
        for start, end in sorted(ends.get(number, [])):
            assert start >= place, f"{segment!r}: records overlap at {start}"
            place = end
        assert place <= segment.used_nbytes, f"{segment!r}: a record ends at {place}, behind what is used"
        ids = set(segment.live_ids(table).tolist())
        assert ids == set(np.flatnonzero(table.segment == number).tolist()), f"{segment!r} does not know its blocks"
        row = {name: int(getattr(space.columns, name)[segment.row]) for name in space.columns.NAMES}
        assert row == {
            "number": number,
            "sealed": segment.state is SegmentState.SEALED,
            "file_nbytes": segment.file_nbytes,
            "live_nbytes": live[number],
            "live_blocks": blocks[number],
            "kept_blocks": kept[number],
            "used_us": used_us[number],
        }, f"{segment!r}: {row}, but {blocks[number]} blocks, used at {used_us[number]}"
        assert number in by_state[segment.state], f"{segment!r} is not among those in its state"
    assert list(space.segments) == sorted(space.segments), "segments are not in rising order"
    listed = sum(map(len, by_state.values()))
    assert listed == len(space.segments), f"{len(space.segments)} segments, {listed} by state"
    files = sum(segment.file_nbytes for segment in space.segments.values())
    assert space.file_nbytes == files + space.other_nbytes, f"{files} B in segments, counted {space.file_nbytes} B"
    assert space.live_nbytes == live.total(), f"{live.total()} B are live, counted {space.live_nbytes} B"
    assert len(np.flatnonzero(space.columns.number)) == len(space.segments), "rows of segments that are no more"
    if space.open is not None:
        assert space.open.state is SegmentState.OPEN and space.segments[space.open.number] is space.open


def _check_counts(core: Core) -> None:
    stats = core.snapshot()
    for name in stats.__slots__:
        if name != "drives":
            assert getattr(stats, name) >= 0, f"{name} is {getattr(stats, name)}"
    assert stats.dram_used_nbytes <= stats.dram_nbytes
