"""What is read before anybody asks for it, how much of that, and whether it was worth it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.counters import StoreStats
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.transfers import Transfer

__all__ = ["Foresight"]

#: R20: at least 2 to 3 token times of the drive's bandwidth, at 20 ms a token; at most so much of DRAM at a time.
_WINDOW_S = 0.06
_MOST_SHARE = 0.25
#: Until the drive was seen to do better.
_LEAST_BANDWIDTH = 1e9
#: The drive's bandwidth is the most that was read within one of these times; a better one is forgotten slowly.
_RATE_S, _RATE_FADES = 0.05, 0.98
#: A strategy is judged by its last outcomes, of at least this many blocks.
_JUDGED_BLOCKS = 32
#: One that has wasted more than it saved rests this long, each time twice as long, an hour at most.
_REST_S, _MOST_REST_S = 30.0, 3600.0
#: How often it is looked for what has left DRAM unused.
_SWEEP_S = 1.0


class _Trial:
    """Whether a strategy is on. Counts bytes: what came in time, half of what came late, against what was wasted."""

    def __init__(self) -> None:
        self._good = self._bad = 0.0
        self._blocks = 0
        self._rest_s = _REST_S
        self._until_s = float("-inf")

    def is_on(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def ended(self, good: float, bad: float, now_s: float) -> None:
        """A block of it was used, or left unused."""
        self._good += good
        self._bad += bad
        self._blocks += 1
        if self._blocks < _JUDGED_BLOCKS:
            return
        if self._bad > self._good:
            self._until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
            self._good = self._bad = 0.0
        else:
            self._rest_s = _REST_S
            self._good, self._bad = self._good / 2, self._bad / 2
        self._blocks = 0


@dataclass(frozen=True, slots=True)
class _Brought:
    """A block that a prefetch has brought: which put of it, bytes of its record, whether it was the store's idea."""

    put_seq: int
    nbytes: int
    ours: bool


class Foresight:
    """Follows every block that a prefetch has brought until it is used or has left. Used under the store's lock.

    One strategy is the store's own: a read that goes to the drive brings what lies behind its end, up to the next fork.
    It rests while it wastes more than it saves. What callers prefetch is followed, too, and never refused for that.
    """

    def __init__(self, ledger: Ledger, stats: StoreStats) -> None:
        self._ledger = ledger
        self._stats = stats
        self._there: dict[int, _Brought] = {}  # by block
        self._ours_nbytes = 0  # of these, what was the store's idea and is awaited still; looked at with each sweep
        self._under_way: dict[Transfer, int] = {}  # of the store's own; bytes of a record
        self._trial = _Trial()
        self._swept_s = 0.0
        self._landed: deque[tuple[float, int]] = deque()
        self._landed_nbytes = 0
        self._bandwidth = _LEAST_BANDWIDTH

    def neighbours(self, ids: Ids, now_s: float) -> Ids:
        """Blocks to bring along with a read that goes to the drive, of a chain that ends with the block `ids[-1]`."""
        table, ledger = self._ledger.table, self._ledger
        if not self._trial.is_on(now_s):
            return ids[:0]
        last = int(ids[-1])
        limit = self._room_nbytes // ledger.geometry_of(last).record_nbytes
        run = ledger.run_of(last)
        behind = [run.ids[int(np.flatnonzero(run.ids == last)[0]) + 1 :]]
        while sum(map(len, behind)) < limit and len(run.children) == 1:  # cut where this read ends, or earlier ones did
            (run,) = run.children
            behind.append(run.ids)
        rest: Ids = np.concatenate(behind)
        cold = (table.state[rest] == DramState.EMPTY) & (table.segment[rest] != NOWHERE) & ~ledger.doomed(rest)
        return rest[: min(limit, len(rest) if cold.all() else int(np.argmin(cold)))]

    @property
    def _room_nbytes(self) -> int:
        """How much may be brought now of the store's own accord: a window of the drive's bandwidth, and of DRAM."""
        for transfer in [one for one in self._under_way if one.done]:
            del self._under_way[transfer]
        taken = self._ours_nbytes
        taken += sum((one.total_blocks - one.done_blocks) * nbytes for one, nbytes in self._under_way.items())
        return max(0, int(min(_MOST_SHARE * self._ledger.dram.nbytes, _WINDOW_S * self._bandwidth)) - taken)

    def bringing(self, transfer: Transfer, record_nbytes: int) -> None:
        """A prefetch of the store's own begins."""
        self._under_way[transfer] = record_nbytes

    def brought(self, block: int, transfer: Transfer, now_s: float, *, joined: bool) -> None:
        """A prefetch has brought a block. `joined`: somebody waited for it already."""
        ours = transfer in self._under_way
        nbytes = self._ledger.geometry_of(block).record_nbytes
        if joined:
            self._stats.prefetch_late_nbytes += nbytes
            if ours:
                self._trial.ended(nbytes / 2, 0.0, now_s)
            return
        self._left(block, now_s)  # an earlier time, if that was not noticed yet
        self._there[block] = _Brought(int(self._ledger.table.put_seq[block]), nbytes, ours)
        self._ours_nbytes += nbytes if ours else 0

    def used(self, ids: Ids, now_s: float) -> None:
        """A get asks for these blocks."""
        if not self._there:
            return
        for block in ids.tolist():
            known = self._there.get(block)
            if known is not None and self._is_there(block, known):
                self._forget(block, known)
                self._stats.prefetch_useful_nbytes += known.nbytes
                if known.ours:
                    self._trial.ended(known.nbytes, 0.0, now_s)

    def read(self, nbytes: int, now_s: float) -> None:
        """The drive has given so much."""
        self._landed.append((now_s, nbytes))
        self._landed_nbytes += nbytes
        while now_s - self._landed[0][0] > _RATE_S:
            self._landed_nbytes -= self._landed.popleft()[1]
        self._bandwidth = max(self._landed_nbytes / _RATE_S, _LEAST_BANDWIDTH, self._bandwidth * _RATE_FADES)

    def sweep(self, now_s: float) -> None:
        """Now and then: count what has left DRAM unused."""
        if now_s - self._swept_s < _SWEEP_S or not self._there:
            return
        self._swept_s = now_s
        for block, known in list(self._there.items()):
            if not self._is_there(block, known):
                self._left(block, now_s)
        awaited = self._ledger.table.awaited
        self._ours_nbytes = sum(one.nbytes for block, one in self._there.items() if one.ours and awaited[block])

    def _left(self, block: int, now_s: float) -> None:
        known = self._there.get(block)
        if known is None:
            return
        self._forget(block, known)
        self._stats.prefetch_wasted_nbytes += known.nbytes
        if known.ours:
            self._trial.ended(0.0, known.nbytes, now_s)

    def _forget(self, block: int, known: _Brought) -> None:
        del self._there[block]
        if known.ours:
            self._ours_nbytes = max(0, self._ours_nbytes - known.nbytes)

    def _is_there(self, block: int, known: _Brought) -> bool:
        table = self._ledger.table
        return bool(table.state[block] == DramState.READY and table.put_seq[block] == known.put_seq)
