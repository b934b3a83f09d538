"""All segments of a volume at a glance: one array for each fact, so that reclaim compares thousands of them at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SegmentColumns", "whole_us"]

_ROWS = 64


def whole_us(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Times in whole microseconds: sums of these are exact, in whatever order they are made."""
    return np.floor(seconds * 1e6).astype(np.int64)


class SegmentColumns:
    """What is known of every segment, one row each, so that reclaim need not look at them one by one; and the sums.

    Columns:
        number: of the segment; 0 in a row that is free.
        sealed: whether its state is SEALED.
        file_nbytes, live_nbytes: as in `Segment`.
        live_blocks: blocks that the index has in it.
        kept_blocks: those of these that are `kept` (`BlockTable`).
        used_us: sum over these blocks of when their run was last used (`whole_us` of `RunTree.used_s`).
    """

    NAMES = ("number", "sealed", "file_nbytes", "live_nbytes", "live_blocks", "kept_blocks", "used_us")

    number: npt.NDArray[np.int64]
    sealed: npt.NDArray[np.int64]
    file_nbytes: npt.NDArray[np.int64]
    live_nbytes: npt.NDArray[np.int64]
    live_blocks: npt.NDArray[np.int64]
    kept_blocks: npt.NDArray[np.int64]
    used_us: npt.NDArray[np.int64]

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, np.zeros(0, np.int64))
        self._free: list[int] = []
        #: Sums over all rows.
        self.files_nbytes = 0
        self.lives_nbytes = 0

    def take(self, number: int) -> int:
        """A row for segment `number`, all else 0."""
        if not self._free:
            old = len(self.number)
            new = old + max(_ROWS, old // 4)
            for name in self.NAMES:
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(new - old, np.int64)]))
            self._free = list(range(new - 1, old - 1, -1))
        row = self._free.pop()
        self.number[row] = number
        return row

    def give_back(self, row: int) -> None:
        """The segment of `row` is no more."""
        self.files_nbytes -= int(self.file_nbytes[row])
        self.lives_nbytes -= int(self.live_nbytes[row])
        for name in self.NAMES:
            getattr(self, name)[row] = 0
        self._free.append(row)

    def count(self, row: int, blocks: int, kept: int, nbytes: int, used_us: int) -> None:
        """`blocks` more (less, if negative) are live, so many of them kept, of `nbytes` together and of this sum of
        times.
        """
        self.live_blocks[row] += blocks
        self.kept_blocks[row] += kept
        self.live_nbytes[row] += nbytes
        self.used_us[row] += used_us
        self.lives_nbytes += nbytes
