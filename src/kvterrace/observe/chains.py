"""How live blocks hang together: chains and runs, over whole tables at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.format.lineage import parent_rows

__all__ = ["Chains"]


class Chains:
    """Who hangs on whom among live entries, by row.

    Attributes:
        rooted: whether the whole prefix is there. head: row of the first block of the run that a row belongs to.
    """

    def __init__(self, entries: npt.NDArray[Any]) -> None:
        count = len(entries)
        itself = np.arange(count)
        parent = parent_rows(entries)
        linked = parent >= 0
        up = np.where(linked, parent, itself)
        self.rooted: npt.NDArray[np.bool_] = entries["depth"][_last(up)] == 0
        children = np.bincount(parent[linked], minlength=count)
        goes_on = linked & (children[up] == 1) & (entries["sequence"] == entries["sequence"][up])
        self.head: npt.NDArray[np.int64] = _last(np.where(goes_on, parent, itself))


def _last(up: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each row ends if it goes up and up: by doubling. There is no circle: depth falls with each step."""
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further
