"""Which blocks DRAM keeps of those that are read from below."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["PromotionRule", "SecondTouch"]

_LONG_AGO = -(2**62)


class PromotionRule(Protocol):
    """Asked once for each block that can be read without a slot. Not thread-safe: the ledger's owner serialises."""

    def keeps(self, blocks: npt.NDArray[np.int32], slot_nbytes: int, free_nbytes: int) -> npt.NDArray[np.bool_]:
        """For each of `blocks` (ids, read now, in this order), whether DRAM keeps it. What it does not keep has passed:
        the rule may remember that. What it keeps it may be asked of again, if there is no slot for it yet.

        Args:
            slot_nbytes: what each takes in DRAM.
            free_nbytes: what is free there, before any of these.
        """
        ...


class SecondTouch:
    """While DRAM has free room: every block. While it is full: those that passed before, no longer ago than it takes
    to fill DRAM once with what passes. So what is read once pushes nothing out. 8 B for each block id.
    """

    def __init__(self, dram_nbytes: int) -> None:
        self._window_nbytes = dram_nbytes
        self._passed_nbytes = 0
        self._at_nbytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # by block: `_passed_nbytes` when it passed

    def keeps(self, blocks: npt.NDArray[np.int32], slot_nbytes: int, free_nbytes: int) -> npt.NDArray[np.bool_]:
        keeps: npt.NDArray[np.bool_] = np.ones(len(blocks), np.bool_)
        fit = free_nbytes // slot_nbytes
        if fit >= len(blocks):
            return keeps
        rest = blocks[fit:]
        more = int(rest.max()) + 1 - len(self._at_nbytes)
        if more > 0:
            self._at_nbytes = np.concatenate([self._at_nbytes, np.full(more + len(self._at_nbytes) // 4, _LONG_AGO)])
        keeps[fit:] = self._passed_nbytes - self._at_nbytes[rest] <= self._window_nbytes
        passed = blocks[~keeps]
        self._at_nbytes[passed] = self._passed_nbytes + slot_nbytes * np.arange(1, len(passed) + 1)
        self._passed_nbytes += slot_nbytes * len(passed)
        return keeps
