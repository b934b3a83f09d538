"""Reads straight into the caller's memory, past DRAM: no slot, no copy.

For blocks that DRAM is not to keep, of a caller who set no deadline and whose memory lies in pages; they are verified
where they land. What is found wrong there is no evidence against the drive: the memory is the caller's, who may have
written to it meanwhile. So such a block is read again, into a slot, and what is found there counts.

What a drive has been given cannot be called back: until its answer, such a block is not settled, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvterrace.engine.core import Core
from kvterrace.engine.landing import Landing, NewLanding, Want
from kvterrace.engine.waiting import Line
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.tiers.segments import aligned_pages
from kvterrace.types import GetOutcome, Hit

__all__ = ["StraightReads"]


class StraightReads:
    """Called under the store's lock."""

    def __init__(
        self,
        core: Core,
        *,
        landing: NewLanding,
        answer: Callable[[Want, GetOutcome], None],
        again: Callable[[Want], None],
    ) -> None:
        """
        Args:
            landing: makes the landing of a want.
            answer: ends a want.
            again: sends a want where its block is now.
        """
        self._core = core
        self._landing = landing
        self._answer = answer
        self._again = again
        self._under_way: set[int] = set()  # blocks; who else comes for one of these shares a read into a slot

    def take(self, line: Line, wants: list[Want]) -> tuple[list[Want], list[Landing]]:
        """Take those of `wants`, the first in `line`, out that go past DRAM. Returns the others, and their landings."""
        able = [
            one
            for one in wants
            if one.transfer.direct and not one.staged and one.block not in self._under_way and line.is_alone(one)
        ]
        if not able:
            return wants, []
        ledger = self._core.ledger
        slot_nbytes = ledger.geometry_of(able[0].block).record_nbytes
        keeps = ledger.dram.keeps(np.array([one.block for one in able], np.int32), slot_nbytes).tolist()
        past = [one for one, kept in zip(able, keeps, strict=True) if not kept]
        for one in past:
            line.remove(one)
        gone = set(past)
        self._under_way.update(one.block for one in past)
        return [one for one in wants if one not in gone], [self._straight(one) for one in past]

    def _straight(self, want: Want) -> Landing:
        transfer = want.transfer
        mine = transfer.begin_copy(want.index)
        assert mine and transfer.buffers is not None, "a block in line is open"
        header_nbytes = self._core.entry_of(want.block).geometry.header_nbytes
        one = self._landing(want, aligned_pages(header_nbytes // PAGE_NBYTES))
        one.runs = transfer.buffers.runs(want.index - transfer.start)
        return one

    def landed(self, one: Landing, outcome: GetOutcome) -> None:
        """A read into the caller's memory has ended."""
        want, transfer = one.want, one.want.transfer
        self._under_way.remove(want.block)
        if isinstance(outcome, Hit):
            transfer.end_copy(want.index)
            self._answer(want, outcome)
            return
        transfer.abandon_copy(want.index)
        want.staged = True
        self._again(want)
