"""Least recently used first, but for what clients have said: what is over goes before, what stays is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvterrace.policy.eviction import LruTailFirst

__all__ = ["HintedLru", "TakesHints"]


@runtime_checkable
class TakesHints(Protocol):
    """A policy that makes its own use of hints, as the return-index directory does."""

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        """What is known of the sequence that ends in the block `key` (the first 8 bytes of its key, little-endian).

        `kind` is the value of a `Hint`; `seconds` until it returns, or for how long the hint holds. Unknown keys are
        ignored.
        """
        ...


class HintedLru(LruTailFirst):
    """As `LruTailFirst`. `spares` is asked of a run whose turn it is; what it answers with is passed over: that run and
    all that it hangs on, leaf first; nothing if it may go.
    """

    name = "lru"

    def __init__(self, spares: Callable[[int], Sequence[int]]) -> None:
        super().__init__()
        self._spares = spares

    def first(self, runs: Iterable[int]) -> None:
        """These runs, leaf first, are the next to go. Runs that are not in the tier are ignored."""
        for run in reversed(list(runs)):
            if self._has(run):
                self._unlink(run + 1)
                self._link_before(run + 1, self._next[self._END])

    def victims(self) -> Iterator[int]:
        """As `order`; what is passed over comes last, now and in the next calls."""
        passed: set[int] = set()
        gone: set[int] = set()
        before = self._END
        while (at := self._next[before]) != self._END:
            run = at - 1
            spared = () if run in passed else self._spares(run)
            if not spared:
                gone.add(run)
                yield run
                before = at
                continue
            passed.add(run)
            moving = [one for one in spared if one not in gone]
            passed.update(moving)
            self.touch(moving)
