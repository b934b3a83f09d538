"""Making room on the SSD, a whole segment at a time: which one goes, what is carried over, what that means for the
index.

Pure decisions over a ledger, as the ledger's own: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.format.record import tombstone_nbytes_for
from kvterrace.format.segment import TOMBSTONE_DTYPE

__all__ = ["CARRY_SHARE", "choose", "fitting", "give_up", "holds_up", "take_back"]

#: At most this share of a segment's records survives it (more would wear the drive for little room), and all active KV.
CARRY_SHARE = 0.25
#: A segment of which more than this is active KV, or tombstones that are still needed, stays: reclaiming it would write
#: nearly all of it again.
_KEPT_SHARE = 0.5
#: Segments count as about as old within one of these steps to the doubling of an age: 4 %.
_AGE_STEPS = 16


def choose(
    ledger: Ledger, now_s: float, *, only: Callable[[Segment], bool] | None = None
) -> tuple[Segment, Ids] | None:
    """The sealed segment that is worth least, and its blocks that are worth carrying over; None if all are in use.

    The oldest goes first, by the mean age of what lives in it, and the sooner the less of it lives. Of segments about
    as old, the one goes with which least is lost: its blocks, and all that hangs on them, wherever that lies. So of one
    long chain the end goes before the beginning, which would take all the rest along. Active KV comes last.

    Carried over is what was used more recently than the average block of the tier, the youngest first, into DRAM; what
    is there already counts, too. What hangs on a block was never used later than the block itself, so a prefix of
    something warm is warm; active KV always goes along. `only`: which segments may go; None: any.
    """
    assert ledger.space is not None
    table, used_s = ledger.table, ledger.tree.used_s
    candidates: list[tuple[bool, float, int, Ids]] = []
    ages: list[npt.NDArray[np.float64]] = []
    for segment in ledger.space.in_state(SegmentState.SEALED):
        ids = segment.live_ids(table)
        if segment.readers or (table.users[ids] > 0).any() or _is_mostly_tombstones(ledger, segment):
            continue
        ages.append(now_s - used_s[table.run[ids]])
        if not len(ids):
            candidates.append((False, -math.inf, segment.number, ids))
            continue
        active = int(np.count_nonzero(table.pins[ids]))
        if active * segment.live_nbytes > _KEPT_SHARE * segment.file_nbytes * len(ids):
            continue
        age_s = float(ages[-1].mean()) * segment.file_nbytes / segment.live_nbytes
        youth = -round(_AGE_STEPS * math.log2(age_s + 1e-9))
        candidates.append((active > 0, youth, segment.number, ids))
    if only is not None:
        candidates = [one for one in candidates if only(ledger.space.segments[one[2]])]
    if not candidates:
        return None
    first = min(one[:2] for one in candidates)
    equals = [(number, ids) for active, youth, number, ids in candidates if (active, youth) == first]
    number, ids = equals[0]
    if len(equals) > 1:
        stakes = _Stakes(ledger, now_s)
        number, ids = min(equals, key=lambda one: (stakes.of(one[1]), one[0]))
    segment = ledger.space.segments[number]
    everything = np.concatenate(ages)
    average_s = float(everything.mean()) if len(everything) else 0.0
    warm = ids[(now_s - used_s[table.run[ids]] < average_s) | (table.pins[ids] > 0)]
    return segment, _survivors(ledger, segment, warm)


def _is_mostly_tombstones(ledger: Ledger, segment: Segment) -> bool:
    """Whether too much of the segment would have to be written again because of its tombstones. Those of the oldest
    segment are not needed any more: what they kill lay in older ones.
    """
    assert ledger.space is not None
    if not segment.tombstones or segment.number == min(ledger.space.segments):
        return False
    records = Counter((namespace, put_seq) for namespace, _, put_seq in segment.tombstones)
    nbytes = len(segment.tombstones) * TOMBSTONE_DTYPE.itemsize + sum(map(tombstone_nbytes_for, records.values()))
    return nbytes > _KEPT_SHARE * segment.file_nbytes


def _survivors(ledger: Ledger, segment: Segment, ids: Ids) -> Ids:
    """Which of `ids` outlive `segment`: active KV, then the youngest, as many as `CARRY_SHARE` allows."""
    table = ledger.table
    pinned = table.pins[ids] > 0
    order = np.lexsort((table.page[ids], -ledger.tree.used_s[table.run[ids]], ~pinned))
    limit = max(int(np.count_nonzero(pinned)), round(CARRY_SHARE * segment.records))
    return ids[order[:limit]]


class _Stakes:
    """What is lost with a block: the rest of its run, and every run that hangs on it."""

    def __init__(self, ledger: Ledger, now_s: float) -> None:
        self._table, self._tree = ledger.table, ledger.tree
        self._place = np.zeros(ledger.table.capacity, np.int32)  # of a block in its run
        self._weight: dict[int, float] = {}  # run number -> of one of its blocks
        self._below: dict[int, float] = {}  # run number -> of all that hangs on it
        for run in self._tree:
            self._place[run.ids] = np.arange(len(run), dtype=np.int32)
            self._weight[run.number] = 1.0 / (1.0 + max(0.0, now_s - float(self._tree.used_s[run.number])))
            self._below.setdefault(run.number, 0.0)
        for run in sorted(self._tree, key=lambda one: -one.depth):
            if run.parent is not None:
                mine = self._below[run.number] + self._weight[run.number] * len(run)
                self._below[run.parent.number] += mine

    def of(self, ids: Ids) -> float:
        """What is lost with all of `ids`."""
        first: dict[int, int] = {}
        for number, place in zip(self._table.run[ids].tolist(), self._place[ids].tolist(), strict=True):
            first[number] = min(place, first.get(number, place))
        total = 0.0
        for number, place in first.items():
            run = self._tree.run(number)
            if not any(above.number in first for above in self._tree.lineage(run)[1:]):  # else counted there
                total += self._below[number] + self._weight[number] * (len(run) - place)
        return total


def holds_up(ledger: Ledger, segment: Segment, block: int) -> bool:
    """Whether something hangs on `block` that would outlive `segment`: the block must not be lost with it."""
    table, run = ledger.table, ledger.run_of(block)
    at = int(np.flatnonzero(run.ids == block)[0])
    todo, ids = list(run.children or ()), run.ids[at + 1 :]
    while True:
        elsewhere = (table.segment[ids] != NOWHERE) & (table.segment[ids] != segment.number)
        if (elsewhere | ((table.state[ids] != DramState.EMPTY) & ~table.spent[ids])).any():
            return True
        if not todo:
            return False
        child = todo.pop()
        todo.extend(child.children or ())
        ids = child.ids


def give_up(ledger: Ledger, segment: Segment, carried: Ids, now_s: float) -> Ids:
    """The copies in `segment` count no longer. What is `carried`, and in DRAM by now, is written anew; what DRAM holds
    besides stays there as long as it can; the rest is dropped, with all below it.

    Returns what is to be written anew. None of its blocks may be in use. The segment keeps its share of the capacity
    until its file is gone.
    """
    table = ledger.table
    ids = segment.live_ids(table)
    anew = np.isin(ids, carried) | (table.pins[ids] > 0)
    kept: list[int] = []
    for block, again in zip(ids.tolist(), anew.tolist(), strict=True):
        if table.segment[block] != segment.number:
            continue  # gone with one that it hung on
        if table.state[block] == DramState.EMPTY and not table.pins[block]:
            ledger.forget(block)
        elif again:
            ledger.lost(block, now_s)
            kept.append(block)
        else:
            ledger.spend(block)
    return np.array([block for block in kept if table.state[block] == DramState.READY], np.int32)


def fitting(ledger: Ledger, ids: Ids, nbytes: int) -> Ids:
    """As many of `ids`, from the first on, as `nbytes` of records hold."""
    sizes = [ledger.geometry_of(block).record_nbytes for block in ids.tolist()]
    return ids[np.cumsum(np.array(sizes, np.int64)) <= nbytes]


def take_back(ledger: Ledger, segment: Segment, ids: Ids, pages: Ids) -> None:
    """Undo `give_up` for blocks that still wait to be written anew: their copies at `pages` of `segment` count
    again.
    """
    table, dirty = ledger.table, ledger.dirty
    table.segment[ids], table.page[ids] = segment.number, pages
    for block in ids.tolist():
        nbytes = ledger.geometry_of(block).record_nbytes
        segment.live_nbytes += nbytes
        dirty.nbytes -= nbytes
    segment.note(ids)
    for number in set(table.run[ids].tolist()):
        dirty.settle(ledger.tree.run(number))
