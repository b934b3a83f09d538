"""How long what was written to the SSD stays there at least (R21): which segment goes, those written lately last.

Pure decisions, as `reclaim`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvterrace.engine import reclaim
from kvterrace.engine.blocks import Ids
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import Segment, SegmentSpace, SegmentState

__all__ = ["MIN_RESIDENCE_S", "choose"]

#: Since its last write, until a segment may be reclaimed while there is another that has been there for as long.
MIN_RESIDENCE_S = 300.0


def choose(
    ledger: Ledger, now_s: float, *, space: SegmentSpace | None = None, only: Callable[[Segment], bool] = lambda _: True
) -> tuple[Segment, Ids] | None:
    """As `reclaim.choose`, among the segments that have been there for long enough; if none of them can go, among
    all.
    """
    space = space or ledger.space
    assert space is not None

    def rested(segment: Segment) -> bool:
        return now_s - segment.written_s >= MIN_RESIDENCE_S

    sealed = space.in_state(SegmentState.SEALED)
    some = [rested(one) for one in sealed]
    if any(some) and not all(some):
        found = reclaim.choose(ledger, now_s, space=space, only=lambda one: rested(one) and only(one))
        if found is not None:
            return found
    return reclaim.choose(ledger, now_s, space=space, only=only)
