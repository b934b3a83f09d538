"""Making room on the SSD, a whole segment at a time: which one goes, what is carried over, what that means for the
index.

Pure decisions over a ledger, as the ledger's own: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import Segment, SegmentSpace
from kvterrace.engine.tree import Run
from kvterrace.format.record import tombstone_nbytes_for
from kvterrace.format.segment import TOMBSTONE_DTYPE

__all__ = ["CARRY_SHARE", "choose", "fitting", "give_up", "holds_up", "take_back", "tombstones_nbytes"]

#: At most this share of a segment's records survives it (more would wear the drive for little room), and all active KV.
CARRY_SHARE = 0.25
#: A segment of which more than this is active KV, or tombstones that are still needed, stays: reclaiming it would write
#: nearly all of it again.
_KEPT_SHARE = 0.5
#: Segments count as about as old within one of these steps to the doubling of an age: 4 %.
_AGE_STEPS = 16
#: A live block that the order of the tier would not keep counts as this much of one that it would.
_UNKEPT_WORTH = 0.3
#: Segments of about one age that are compared by what is lost with them, from both ends of these by number: shared
#: prefixes are mostly in the first, ends of long chains in the last.
_TRIED = 16
#: Runs below a segment's blocks that are looked at for that, at most. What has more below it is worth at least these.
_MOST_BELOW = 500


def choose(
    ledger: Ledger,
    now_s: float,
    *,
    space: SegmentSpace | None = None,
    only: Callable[[Segment], bool] | None = None,
) -> tuple[Segment, Ids] | None:
    """The sealed segment that is worth least, and its blocks that are worth carrying over; None if all are in use.

    The oldest goes first, by the mean age of what lives in it, and the sooner the less of it lives. Of segments about
    as old (`_TRIED` of them at most), the one goes with which least is lost: its blocks, and all that hangs on them,
    wherever that lies. So of one long chain the end goes before the beginning, which would take all the rest along.
    Active KV comes last.

    Carried over is what was used more recently than the average block of the tier, the youngest first, into DRAM; what
    is there already counts, too. What hangs on a block was never used later than the block itself, so a prefix of
    something warm is warm; active KV always goes along.

    Where the tier has an order of its own (`Ledger.ssd_order`), a segment counts as the older the less of it that would
    keep, and what it would keep is carried over.

    Costs array operations over all segments and over what is pinned or in use, and Python for the few that are tried.

    Args:
        space: of which volume; None: of the only one.
        only: which segments may go; None: any.
    """
    space = space or ledger.space
    assert space is not None
    table = ledger.table
    columns = space.columns
    rows = np.flatnonzero(columns.sealed)
    if not len(rows):
        return None
    numbers, blocks = columns.number[rows], columns.live_blocks[rows]
    live = np.maximum(blocks, 1)
    age_s = np.maximum(now_s - columns.used_us[rows] / 1e6 / live, 0.0)
    live_nbytes = columns.live_nbytes[rows].astype(np.float64)
    if ledger.ssd_order is not None:
        kept = columns.kept_blocks[rows] / live
        live_nbytes = live_nbytes * (kept + _UNKEPT_WORTH * (1.0 - kept))
    age_s *= columns.file_nbytes[rows] / np.maximum(live_nbytes, 1)
    age_s[blocks == 0] = np.inf
    youth = -np.round(_AGE_STEPS * np.log2(age_s + 1e-9))
    at_rest = _counts(table.segment[np.flatnonzero(table.users)], numbers) == 0
    pinned = _counts(table.segment[np.flatnonzero(table.pins)], numbers)
    mostly_active = pinned * columns.live_nbytes[rows] > _KEPT_SHARE * columns.file_nbytes[rows] * live
    stays = mostly_active | ~at_rest
    active = pinned > 0
    stakes = _Stakes(ledger, now_s)
    equals: list[Segment] = []
    order = np.lexsort((numbers, youth, active))
    order = order[~stays[order]]
    kinds = np.stack([active[order], youth[order]])
    starts = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(axis=0)))[: len(order)].tolist()
    for start, stop in pairwise([*starts, len(order)]):
        for number in _from_both_ends(numbers[order[start:stop]]):
            segment = space.segments[number]
            if segment.readers or _is_mostly_tombstones(space, segment) or (only is not None and not only(segment)):
                continue
            equals.append(segment)
            if len(equals) == _TRIED:
                break
        if equals:
            break
    else:
        return None
    chosen = equals[0]
    if len(equals) > 1:
        chosen = min(equals, key=lambda one: (stakes.of(one), one.number))
    ids, used_s = chosen.live_ids(table), ledger.tree.used_s
    if ledger.ssd_order is not None:
        return chosen, _survivors(ledger, chosen, ids[table.kept[ids] | (table.pins[ids] > 0)])
    # of what could be chosen: what is in use at this moment says nothing about the rest
    average_s = now_s - int(columns.used_us[rows[at_rest]].sum()) / 1e6 / max(int(blocks[at_rest].sum()), 1)
    warm = ids[(now_s - used_s[table.run[ids]] < average_s) | (table.pins[ids] > 0)]
    return chosen, _survivors(ledger, chosen, warm)


def _from_both_ends(numbers: npt.NDArray[np.int64]) -> Iterator[int]:
    """All of `numbers`, the first, the last, the second, ..."""
    for at in range(len(numbers)):
        yield int(numbers[at // 2 if at % 2 == 0 else -1 - at // 2])


def _counts(found: Ids, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each of `numbers` is in `found`."""
    distinct, counts = np.unique(found, return_counts=True)
    if not len(distinct):
        return np.zeros(len(numbers), np.int64)
    at = np.minimum(np.searchsorted(distinct, numbers), len(distinct) - 1)
    return np.where(distinct[at] == numbers, counts[at], 0)


def _is_mostly_tombstones(space: SegmentSpace, segment: Segment) -> bool:
    """Whether too much of the segment would have to be written again because of its tombstones. Those of the oldest
    segment are not needed any more: what they kill lay in older ones.
    """
    if not segment.tombstones or segment.number == space.oldest:
        return False
    return tombstones_nbytes(segment) > _KEPT_SHARE * segment.file_nbytes


def tombstones_nbytes(segment: Segment) -> int:
    """What the tombstones of `segment` take of it."""
    records = Counter((namespace, put_seq) for namespace, _, put_seq in segment.tombstones)
    return len(segment.tombstones) * TOMBSTONE_DTYPE.itemsize + sum(map(tombstone_nbytes_for, records.values()))


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
        self._table, self._tree, self._now_s = ledger.table, ledger.tree, now_s

    def _weight(self, run: Run) -> float:
        """Of one block of a run."""
        return 1.0 / (1.0 + max(0.0, self._now_s - float(self._tree.used_s[run.number])))

    def of(self, segment: Segment) -> float:
        """What is lost with all that `segment` holds; of the runs below, `_MOST_BELOW` at most are counted."""
        table = self._table
        numbers = np.unique(table.run[segment.live_ids(table)]).tolist()
        mine = dict.fromkeys(numbers, True)  # run number -> whether it, or what it hangs on, is in the segment
        total, looks = 0.0, _MOST_BELOW
        for number in numbers:
            run = self._tree.run(number)
            if self._hangs_on(run, mine):
                continue  # counted there
            place = int(np.argmax(table.segment[run.ids] == segment.number))
            total += self._weight(run) * (len(run) - place)
            todo = list(islice(run.children, looks))
            while todo and looks:
                looks -= 1
                below = todo.pop()
                total += self._weight(below) * len(below)
                todo.extend(islice(below.children, looks))
        return total

    def _hangs_on(self, run: Run, known: dict[int, bool]) -> bool:
        """Whether `run` hangs on a run that `known` names as in the segment; fills `known` for those on the way."""
        way: list[int] = []
        at = run.parent
        while at is not None and at.number not in known:
            way.append(at.number)
            at = at.parent
        found = at is not None and known[at.number]
        known.update(dict.fromkeys(way, found))
        return found


def holds_up(ledger: Ledger, segment: Segment, block: int) -> bool:
    """Whether something hangs on `block` that would outlive `segment`: the block must not be lost with it."""
    table, run = ledger.table, ledger.run_of(block)
    at = int(np.flatnonzero(run.ids == block)[0])
    todo, ids = list(run.children), run.ids[at + 1 :]
    while True:
        elsewhere = (table.segment[ids] != NOWHERE) & (table.segment[ids] != segment.number)
        if (elsewhere | ((table.state[ids] != DramState.EMPTY) & ~table.spent[ids])).any():
            return True
        if not todo:
            return False
        child = todo.pop()
        todo.extend(child.children)
        ids = child.ids


def give_up(ledger: Ledger, segment: Segment, carried: Ids, now_s: float) -> Ids:
    """The copies in `segment` count no longer. What is `carried`, and in DRAM by now, is written anew; what DRAM holds
    besides stays there as long as it can; the rest is dropped, with all below it.

    Returns what is to be written anew. None of its blocks may be in use. The segment keeps its share of the capacity
    until its file is gone.
    """
    table = ledger.table
    ids = _in_chain_order(ledger, segment)
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


def _in_chain_order(ledger: Ledger, segment: Segment) -> Ids:
    """Blocks whose copy is in `segment`, the first of each chain first: with that goes what hangs on it."""
    table = ledger.table
    ids = [np.zeros(0, np.int32)]
    depths = [np.zeros(0, np.int64)]
    for number in np.unique(table.run[segment.live_ids(table)]).tolist():
        run = ledger.tree.run(number)
        places = np.flatnonzero(table.segment[run.ids] == segment.number)
        ids.append(run.ids[places])
        depths.append(run.depth + places)
    in_runs: Ids = np.concatenate(ids)
    return in_runs[np.argsort(np.concatenate(depths), kind="stable")]


def fitting(ledger: Ledger, ids: Ids, nbytes: int) -> Ids:
    """As many of `ids`, from the first on, as `nbytes` of records hold."""
    return ids[np.cumsum(ledger.sizes.of(ids)) <= nbytes]


def take_back(ledger: Ledger, segment: Segment, ids: Ids, pages: Ids) -> None:
    """Undo `give_up` for blocks that still wait to be written anew: their copies at `pages` of `segment` count
    again.
    """
    table, dirty = ledger.table, ledger.dirty
    dirty.remove(ids)
    space = ledger.space_of(segment.number)
    space.gain(table, segment, ids, ledger.sizes.total(ids), ledger.tree.used_s[table.run[ids]])
    table.page[ids] = pages
