"""Which runs go first. A policy orders runs; the ledger decides how much of them goes, from their tails on."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Protocol

__all__ = ["EvictionPolicy", "LruTailFirst"]


class EvictionPolicy(Protocol):
    """The order of eviction in one tier, over run numbers. Not thread-safe: the ledger's owner serialises.

    The ledger tells a policy of each run that has blocks in its tier, and takes it out when the last has left.
    """

    name: str

    def insert(self, run: int) -> None:
        """`run` has its first block in this tier. It counts as just used."""
        ...

    def touch(self, runs: Iterable[int]) -> None:
        """These runs were used, leaf first. Runs that are not in the tier are ignored."""
        ...

    def split(self, head: int, tail: int) -> None:
        """`tail` was cut off `head` and shares its history; both stay in the tier."""
        ...

    def remove(self, run: int) -> None:
        """`run` has left the tier. Unknown runs are ignored."""
        ...

    def order(self) -> Iterator[int]:
        """Runs, the first to go first. The policy may be changed only after the caller has let go of the iterator."""
        ...

    def victims(self) -> Iterator[int]:
        """The same, for who gives up the first of them."""
        ...


class LruTailFirst:
    """Least recently used first; of one chain the tail before the head.

    A touch goes from leaf to root, so that a run is always younger than what hangs on it: evicting the oldest run
    first, from its
    tail on, keeps every prefix whole. A doubly linked list in two arrays by run number (8 B for each); every call is
    O(1) for each run.
    """

    name = "lru"
    _OUT = -1  # not in the list
    _END = 0  # both ends of it; run n has place n + 1

    def __init__(self) -> None:
        self._next = array("i", (self._END,))
        self._prev = array("i", (self._END,))

    def insert(self, run: int) -> None:
        if self._has(run):
            self._unlink(run + 1)
        self._link_before(run + 1, self._END)

    def touch(self, runs: Iterable[int]) -> None:
        for run in runs:
            if self._has(run):
                self._unlink(run + 1)
                self._link_before(run + 1, self._END)

    def split(self, head: int, tail: int) -> None:
        self._link_before(tail + 1, head + 1)

    def remove(self, run: int) -> None:
        if self._has(run):
            self._unlink(run + 1)

    def order(self) -> Iterator[int]:
        at = self._next[self._END]
        while at != self._END:
            yield at - 1
            at = self._next[at]

    def victims(self) -> Iterator[int]:
        return self.order()

    def _has(self, run: int) -> bool:
        return run + 1 < len(self._next) and self._next[run + 1] != self._OUT

    def _link_before(self, place: int, after: int) -> None:
        if place >= len(self._next):
            more = array("i", (self._OUT,)) * (place + 1 - len(self._next) + len(self._next) // 4)
            self._next.extend(more)
            self._prev.extend(more)
        before = self._prev[after]
        self._next[before] = self._prev[after] = place
        self._prev[place], self._next[place] = before, after

    def _unlink(self, place: int) -> None:
        before, after = self._prev[place], self._next[place]
        self._next[before], self._prev[after] = after, before
        self._next[place] = self._OUT
