"""Chains of blocks by number: each block follows on one other, so a chain is known by its last block."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError

__all__ = ["Chains", "IdChains", "named_prefix"]

_Int64s = npt.NDArray[np.int64]


def named_prefix(is_named: Callable[[int], bool], count: int) -> int:
    """How many blocks of a chain of `count` are named: always the first ones, as none is named before its parent."""
    if not count or is_named(count - 1):
        return count
    low, high = 0, count - 1  # block `high` is not named
    while low < high:
        middle = (low + high) // 2
        if is_named(middle):
            low = middle + 1
        else:
            high = middle
    return low


class Chains:
    """Blocks numbered from 0 in the order they were added, in pieces that each follow on one block. 8 B a block."""

    def __init__(self) -> None:
        self._firsts: list[int] = []  # by piece: number of its first block,
        self._ups: list[int] = []  # the piece that it follows on, -1: the root,
        self._up_counts: list[int] = []  # the blocks of that one up to there,
        self._depths: list[int] = []  # place of its first block in its chain,
        self._ids: list[_Int64s] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, after: int, ids: _Int64s) -> int:
        """Consecutive blocks with these ids, behind the block `after` (-1: at the root); returns the last's number.

        Raises:
            IndexError: there is no block `after`.
        """
        up, count = self._place(after)
        if len(ids):
            self._firsts.append(self._count)
            self._ups.append(up)
            self._up_counts.append(count)
            self._depths.append(self._depths[up] + count if count else 0)
            self._ids.append(ids)
            self._count += len(ids)
        return self._count - 1 if len(ids) else after

    def _place(self, number: int) -> tuple[int, int]:
        """The piece of a block, and the blocks of that piece up to it; -1 and 0 for -1, the root."""
        if number == -1:
            return -1, 0
        if not 0 <= number < self._count:
            raise IndexError(f"block {number}, of {self._count}")
        piece = bisect_right(self._firsts, number) - 1
        return piece, number - self._firsts[piece] + 1

    def depth(self, number: int) -> int:
        """Place of a block in its chain, from 0; of -1, the root, -1."""
        piece, count = self._place(number)
        return self._depths[piece] + count - 1 if count else -1

    def id_at(self, tip: int, depth: int) -> int:
        """Id of the block at `depth` of the chain that ends in `tip`."""
        piece, _ = self._place(tip)
        while self._depths[piece] > depth:
            piece = self._ups[piece]
        return int(self._ids[piece][depth - self._depths[piece]])

    def ids(self, tip: int) -> _Int64s:
        """Ids of the chain that ends in `tip`, from the root on; none for -1. Not to be changed."""
        return _joined([self._ids[piece][:count] for piece, count in self._along(tip)])

    def numbers(self, tip: int) -> _Int64s:
        """The same as numbers."""
        return _joined([np.arange(self._firsts[one], self._firsts[one] + count) for one, count in self._along(tip)])

    def _along(self, tip: int) -> list[tuple[int, int]]:
        """The pieces of the chain that ends in `tip`, from the root on, and how many blocks of each are of it."""
        piece, count = self._place(tip)
        parts = []
        while count:
            parts.append((piece, count))
            piece, count = self._ups[piece], self._up_counts[piece]
        return parts[::-1]


def _joined(parts: list[_Int64s]) -> _Int64s:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class IdChains(Chains):
    """Chains of a trace that names blocks by ids, numbered in the order of first sight. About 110 B a block."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Hashable, int] = {}

    def number_of(self, block_id: int) -> int:
        """Number of a block by its id. Raises KeyError: it is not known."""
        return self._numbers[block_id]

    def enter(self, ids: _Int64s) -> tuple[int, int]:
        """Number of the last block of a chain, and how many of its blocks were known before (all others are new).

        Raises:
            ConfigError: an id follows on another than before, or comes twice in one chain.
        """
        numbers = self._numbers
        known = named_prefix(lambda at: int(ids[at]) in numbers, len(ids))
        tip = numbers[int(ids[known - 1])] if known else -1
        if not np.array_equal(self.ids(tip), ids[:known]):
            raise ConfigError(
                f"the id {ids[known - 1]} follows on another chain than before; an id stands for a prefix"
            )
        fresh = ids[known:].tolist()
        if len(fresh):
            first = len(self)
            numbers.update(zip(fresh, range(first, first + len(fresh)), strict=True))
            tip = self.add(tip, ids[known:].copy())
            if len(numbers) != len(self):
                raise ConfigError("an id comes twice in a chain, or follows on two others; an id stands for a prefix")
        return tip, known
