"""Prefetch reads of one drive that have a slot and wait their turn, so that a demand read can still overtake them."""

from __future__ import annotations

from kvterrace.engine.landing import Landing

__all__ = ["HeldBack"]

#: Prefetch reads that a drive is given at once; the others wait here.
_AT_ONCE_NBYTES = 16 << 20


class HeldBack:
    """The line of one drive. Used under the store's lock. What waits in it counts as a reader of its segment: the file
    stays open. Who takes it out lets go of that once it counts as one that is under way.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Landing] = {}  # by block, in the order they go
        self._under_way_nbytes = 0

    def add(self, landings: list[Landing]) -> None:
        """Put reads in line, in order of their places."""
        landings.sort(key=lambda one: (one.segment.number, one.offset))
        for one in landings:
            one.segment.readers += 1
            self._waiting[one.want.block] = one

    def due(self) -> list[Landing]:
        """Reads that may go now, while few enough are under way; they count as such from now on."""
        landings: list[Landing] = []
        while self._waiting and self._under_way_nbytes < _AT_ONCE_NBYTES:
            one = self._waiting.pop(next(iter(self._waiting)))
            self.started(one)
            landings.append(one)
        return landings

    def take(self, block: int) -> Landing | None:
        """Take a read out of the line, if it is there: somebody waits for it."""
        return self._waiting.pop(block, None)

    def started(self, one: Landing) -> None:
        """A prefetch read is under way."""
        self._under_way_nbytes += one.memory.nbytes

    def ended(self, one: Landing) -> None:
        """A prefetch read has ended."""
        self._under_way_nbytes -= one.memory.nbytes
