"""How live blocks hang together, over whole tables of entries at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["highest_above", "parent_rows"]


def highest_above(parent: npt.NDArray[np.int64], values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each row, the highest of its own value and those of all rows that it hangs on. `parent`: as `parent_rows`
    answers. By doubling: each step looks twice as far up.
    """
    up = np.where(parent >= 0, parent, np.arange(len(parent)))
    while True:
        values = np.maximum(values, values[up])
        further = up[up]
        if np.array_equal(further, up):
            return values
        up = further


def parent_rows(entries: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
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
