"""How live blocks hang together: chains and runs, over whole tables at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Chains"]


class Chains:
    """Who hangs on whom among live entries, by row.

    Attributes:
        rooted: whether the whole prefix is there. head: row of the first block of the run that a row belongs to.
    """

    def __init__(self, entries: npt.NDArray[Any]) -> None:
        count = len(entries)
        itself = np.arange(count)
        parent = _parents(entries)
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


def _parents(entries: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Row of each row's parent, -1 for none. Keys are unique: these are live entries."""
    keys = _first_words(entries["key"])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    wanted = _first_words(entries["parent"])
    parent = np.full(len(entries), -1, np.int64)
    at = np.searchsorted(keys, wanted)
    todo = np.flatnonzero((at < len(keys)) & (entries["depth"] > 0))
    while len(todo):  # more than once only where two keys share their first eight bytes
        todo = todo[at[todo] < len(keys)]
        todo = todo[keys[at[todo]] == wanted[todo]]
        row = order[at[todo]]
        same = entries["key"][row] == entries["parent"][todo]
        same &= entries["depth"][todo] == entries["depth"][row].astype(np.int64) + 1
        same &= entries["namespace"][todo] == entries["namespace"][row]
        parent[todo[same]] = row[same]
        todo = todo[~same]
        at[todo] += 1
    return parent


def _first_words(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view("<u8").reshape(-1, 4)[:, 0]
