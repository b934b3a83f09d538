"""Which runs go first. A policy orders runs; the ledger decides how much of them goes, from their tails on."""

from __future__ import annotations

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


class LruTailFirst:
    """Least recently used first; of one chain the tail before the head.

    A touch goes from leaf to root, so that a run is always younger than what hangs on it: evicting the oldest run
    first, from its
    tail on, keeps every prefix whole. A doubly linked list in two dicts; every call is O(1) for each run.
    """

    name = "lru"
    _END = -1

    def __init__(self) -> None:
        self._next: dict[int, int] = {self._END: self._END}
        self._prev: dict[int, int] = {self._END: self._END}

    def insert(self, run: int) -> None:
        if run in self._next:
            self._unlink(run)
        self._link_before(run, self._END)

    def touch(self, runs: Iterable[int]) -> None:
        for run in runs:
            if run in self._next:
                self.insert(run)

    def split(self, head: int, tail: int) -> None:
        self._link_before(tail, head)

    def remove(self, run: int) -> None:
        if run in self._next:
            self._unlink(run)

    def order(self) -> Iterator[int]:
        run = self._next[self._END]
        while run != self._END:
            yield run
            run = self._next[run]

    def _link_before(self, run: int, after: int) -> None:
        before = self._prev[after]
        self._next[before] = self._prev[after] = run
        self._prev[run], self._next[run] = before, after

    def _unlink(self, run: int) -> None:
        before, after = self._prev.pop(run), self._next.pop(run)
        self._next[before], self._prev[after] = after, before
