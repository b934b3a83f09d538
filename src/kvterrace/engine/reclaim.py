"""Making room on the SSD, a whole segment at a time: which one goes, what is carried over, what that means for the
index.

Pure decisions over a ledger, as the ledger's own: no I/O, no clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, Ids
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import Segment, SegmentState

__all__ = ["CARRY_SHARE", "choose", "give_up"]

#: At most this share of a segment's records is carried over: more would wear the drive for little room.
CARRY_SHARE = 0.25


def choose(ledger: Ledger, now_s: float, *, only: Segment | None = None) -> tuple[Segment, Ids] | None:
    """The sealed segment that is worth least, and its blocks that are worth carrying over; None if all are in use.

    Worth is the share of a segment that is live, divided by the mean age of what lives in it. Carried over is what was
    used more recently than the average block of the tier, whether or not DRAM holds it too. What hangs on a block was
    never used later than the block itself, so a prefix of something warm is warm; active KV always goes along.
    `only`: this segment, or none.
    """
    assert ledger.space is not None
    table, used_s = ledger.table, ledger.tree.used_s
    candidates: list[tuple[float, int, Ids]] = []
    ages: list[npt.NDArray[np.float64]] = []
    for segment in ledger.space.in_state(SegmentState.SEALED):
        ids = segment.live_ids(table)
        if (table.users[ids] > 0).any():
            continue
        age_s = now_s - used_s[table.run[ids]]
        ages.append(age_s)
        live = segment.live_nbytes / max(1, segment.file_nbytes)  # a file may be empty
        worth = live / (1.0 + float(age_s.mean())) if len(ids) else 0.0
        candidates.append((worth, segment.number, ids))
    if only is not None:
        candidates = [one for one in candidates if one[1] == only.number]
    if not candidates:
        return None
    _, number, ids = min(candidates, key=lambda one: one[:2])
    segment = ledger.space.segments[number]
    everything = np.concatenate(ages)
    average_s = float(everything.mean()) if len(everything) else 0.0
    age_s = now_s - used_s[table.run[ids]]
    pinned = table.pins[ids] > 0
    keep = pinned | (age_s < average_s)
    order = np.lexsort((table.page[ids], age_s, ~pinned))
    order = order[keep[order]]
    limit = max(int(pinned.sum()), round(CARRY_SHARE * segment.records))
    return segment, ids[order[:limit]]


def give_up(ledger: Ledger, segment: Segment, carried: Ids, now_s: float) -> None:
    """The copies in `segment` count no longer. What is `carried`, and in DRAM by now, is written anew; what DRAM holds
    besides stays there as long as it can; the rest is dropped, with all below it.

    None of its blocks may be in use. The segment keeps its share of the capacity until its file is gone.
    """
    table = ledger.table
    ids = segment.live_ids(table)
    anew = np.isin(ids, carried) | (table.pins[ids] > 0)
    for block, again in zip(ids.tolist(), anew.tolist(), strict=True):
        if again:
            ledger.lost(block, now_s)
        else:
            ledger.spend(block)
    for block in ids.tolist():
        gone_already = table.run[block] == NOWHERE  # with one that it hung on
        if not gone_already and table.slot[block] == NOWHERE and table.segment[block] == NOWHERE:
            ledger.forget(block)
