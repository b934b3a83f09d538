"""What is worth a write to the SSD, where writes are short. Decided for a run, from its first block on: never block by
block, which would leave holes in prefixes.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

__all__ = ["DAY_S", "Admission", "History", "WriteBudget", "default_daily_nbytes"]

DAY_S = 86400.0

#: Of the drive's size, what may be written each day unless somebody says otherwise. Consumer drives are rated 0.3 full
#: writes a day over five years (600 TB for each TB), data-centre drives for 1 or more: so no drive dies before its
#: time. Segments are written in sequence, so that the drive itself adds little.
_DAILY_SHARE = 0.3
#: But at least this: the smallest drives that are sold are rated 80 TB, 44 GB a day over five years.
_DAILY_LEAST_NBYTES = 40 << 30

#: Writes are short while less than this share of a day's budget is left.
_SHORT = 0.5
#: Places for judged parts of runs, by first, middle and last block of each; later ones take the place of others.
_REMEMBERED = 1 << 16
#: Blocks judged after which what was learned counts half.
_FADES_BLOCKS = 20_000.0

Keys = npt.NDArray[np.uint64]


def default_daily_nbytes(drive_nbytes: int) -> int:
    """Bytes a day for a drive of this size of which nothing else is known."""
    return max(_DAILY_LEAST_NBYTES, int(_DAILY_SHARE * drive_nbytes))


class WriteBudget:
    """Bytes that may be written: `daily_nbytes` in any day, what one hour spares the next may use, up to a day's worth.

    `left_nbytes` may fall below 0: what must be written (what reclaim carries over) is written, and counts.
    """

    def __init__(self, daily_nbytes: float, *, left_nbytes: float | None = None, day_s: float = DAY_S) -> None:
        """`left_nbytes` is from an earlier life; None: all. `day_s`: length of the day (simulation)."""
        self.daily_nbytes = float(daily_nbytes)
        self._left = self.daily_nbytes if left_nbytes is None else min(float(left_nbytes), self.daily_nbytes)
        self._day_s = day_s
        self._at_s: float | None = None

    def left_nbytes(self, now_s: float) -> float:
        """What may be written now."""
        if self._at_s is not None:
            self._left += max(0.0, now_s - self._at_s) * self.daily_nbytes / self._day_s
            self._left = min(self._left, self.daily_nbytes)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        return self._left

    def spend(self, nbytes: float, now_s: float) -> None:
        """So much is written."""
        self.left_nbytes(now_s)
        self._left -= nbytes


class History(enum.IntEnum):
    """What is known of the blocks that wait of a run, when they are judged."""

    SEEN = 0  # used in two turns
    GOES_ON = 1  # new, behind at least as much that was there before: a conversation goes on
    NEW = 2


class Admission:
    """Which histories are worth a write at the moment. Not thread-safe: the ledger's owner serialises.

    While writes are short, what was seen is admitted as long as there is any budget; of the two kinds of what is new,
    the one that is worth more while more than a third of what counts as short is left, the other above two thirds. So
    the budget itself finds how far down the list it reaches. What they are worth is learned: of parts of runs that were
    judged, written or not, it counts how often their blocks are asked for again when DRAM does not hold them. What was
    seen comes first whatever the counts say: a new end of a conversation is asked for as often, but is of use only
    where its beginning was written. 0.9 MB of memory.
    """

    def __init__(self, budget: WriteBudget | None) -> None:
        """`budget` of None: writes are never short."""
        self.budget = budget
        self._keys: Keys = np.zeros(_REMEMBERED, np.uint64)
        self._history = np.zeros(_REMEMBERED, np.uint8)
        self._weight = np.zeros(_REMEMBERED, np.float32)
        # Asked for again, of blocks judged; a first guess that counts for little: second touch before all else.
        self._asked = np.array([100.0, 50.0, 25.0])
        self._judged = np.full(3, 100.0)

    def is_short(self, now_s: float) -> bool:
        """Whether writes have to be chosen."""
        if self.budget is None:
            return False
        left_nbytes = self.budget.left_nbytes(now_s)
        return left_nbytes <= 0 or left_nbytes < _SHORT * self.budget.daily_nbytes

    @property
    def worth(self) -> npt.NDArray[np.float64]:
        """By history: how often a block is asked for again."""
        worth: npt.NDArray[np.float64] = self._asked / self._judged
        return worth

    def admits(self, history: History, now_s: float) -> bool:
        """Whether blocks with this history are worth a write now."""
        if self.budget is None:
            return True
        new = self.worth[History.GOES_ON :]
        rank = 0 if history is History.SEEN else 1 + int(np.count_nonzero(new > self.worth[history]))
        return self.budget.left_nbytes(now_s) > _SHORT * self.budget.daily_nbytes * rank / len(History)

    def judged(self, keys: Keys, history: History) -> None:
        """These blocks of one run, in order, are judged as of this history; once, while they are remembered."""
        ends = keys[sorted({0, len(keys) // 2, len(keys) - 1})]
        places = ends % np.uint64(_REMEMBERED)
        known = self._keys[places] == ends
        if known.all() and (self._history[places] == history).all():
            return
        self._keys[places], self._history[places] = ends, history
        self._weight[places] = len(keys) / len(ends)
        self._judged[history] += len(keys)
        if self._judged[history] > _FADES_BLOCKS:
            self._judged[history] /= 2
            self._asked[history] /= 2

    def seen(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether a block of it is remembered."""
        found: npt.NDArray[np.bool_] = self._keys[keys % np.uint64(_REMEMBERED)] == keys
        return found

    def asked(self, keys: Keys) -> None:
        """These blocks are asked for, and DRAM does not hold them."""
        places = keys[self.seen(keys)] % np.uint64(_REMEMBERED)
        np.add.at(self._asked, self._history[places], self._weight[places])
