"""Blocks that the eviction policy has let go of and that are still in their tier, the first to go first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import BlockTable, Ids

__all__ = ["LeavingLine"]

#: Entries that are looked at first; twice as many each time that these were not enough.
_FIRST = 64


_Choice = Callable[[Ids], npt.NDArray[np.bool_]]


class LeavingLine:
    """The line at the exit; who stands in it is `leaving` in the block table. 4 B to 12 B for each.

    Not thread-safe: the ledger's owner serialises.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._line: Ids = np.zeros(_FIRST, np.int32)
        self._start = self._stop = 0
        self._left = False  # whether some stepped out: what is in the line and not `leaving` is not in it

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return self._line.nbytes

    def __len__(self) -> int:
        """How many there are, or somewhat fewer."""
        return self._stop - self._start

    def ids(self) -> Ids:
        """All of them, in order."""
        self._close_up()
        return self._line[self._start : self._stop].copy()

    def add(self, ids: Ids) -> None:
        """These, which are not in the line, stand at its end."""
        if not len(ids):
            return
        self._close_up()
        if self._stop + len(ids) > len(self._line):
            kept = self._line[self._start : self._stop]
            self._line = np.zeros(max(_FIRST, 2 * (len(kept) + len(ids))), np.int32)
            self._line[: len(kept)] = kept
            self._start, self._stop = 0, len(kept)
        self._line[self._stop : self._stop + len(ids)] = ids
        self._stop += len(ids)
        self._table.leaving[ids] = True

    def step_out(self, ids: Ids) -> None:
        """These are in the line no longer. Others are ignored."""
        leaving = self._table.leaving
        if self._start < self._stop and leaving[ids].any():
            leaving[ids] = False
            self._left = True

    def take(
        self, nbytes: int, sizes: Callable[[Ids], npt.NDArray[np.int64]], may_go: _Choice, *, count: int = _FIRST
    ) -> tuple[Ids, int]:
        """Take out the first that may go, for `nbytes` together or somewhat more; and what is missing of that. `count`:
        how many that will be.
        """
        self._close_up()
        found: list[Ids] = []
        passed: list[Ids] = []
        at, width = self._start, max(_FIRST, count)
        while nbytes > 0 and at < self._stop:
            some = self._line[at : min(at + width, self._stop)]
            goes = may_go(some)
            chosen = some[goes]
            if len(chosen):
                room = np.cumsum(sizes(chosen))
                if room[-1] > nbytes:
                    count = int(np.searchsorted(room, nbytes)) + 1
                    some = some[: int(np.flatnonzero(goes)[count - 1]) + 1]
                    goes, chosen = goes[: len(some)], chosen[:count]
                nbytes -= int(room[len(chosen) - 1])
                found.append(chosen)
            passed.append(some[~goes])
            at += len(some)
            width *= 2
        if not found:
            return np.zeros(0, np.int32), nbytes
        taken = np.concatenate(found)
        stay = np.concatenate(passed)
        self._line[at - len(stay) : at] = stay  # before those that were not looked at
        self._start = at - len(stay)
        self._table.leaving[taken] = False
        return taken, nbytes

    def _close_up(self) -> None:
        if not self._left:
            return
        self._left = False
        line = self._line[self._start : self._stop]
        line = line[self._table.leaving[line]]
        if len(line):  # who stepped out and came back stands where he came last
            last = len(line) - 1 - np.unique(line[::-1], return_index=True)[1]
            line = line[np.sort(last)]
        self._line[: len(line)] = line
        self._start, self._stop = 0, len(line)
