"""Deadlines of requests, for the engines of Python. Sans-I/O; not thread-safe: used under its engine's lock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvterrace.io.base import IoKind, IoRequest, IoResult

__all__ = ["Deadlines", "Given"]


@dataclass(slots=True, eq=False)
class Given:
    """A request and how far it is. `started_s`: when the device got it; None while it waits."""

    request: IoRequest
    deadline_s: float = math.inf
    number: int = 0
    started_s: float | None = None
    ended: bool = False

    def lent(self, now_s: float) -> IoResult:
        """The answer at its deadline, while the device has it."""
        assert self.started_s is not None
        return IoResult(self.request, started_s=self.started_s, ended_s=now_s, expired=True, lent=True)

    def unsent(self, now_s: float) -> IoResult:
        """Its result, if the device never got it. `finish` has yet to run."""
        return IoResult(self.request, started_s=now_s, ended_s=now_s, expired=True)


class Deadlines:
    """Which of the requests that have not ended is due when."""

    def __init__(self) -> None:
        self._given: dict[int, Given] = {}  # one that ends is not kept alive until its deadline
        self._heap: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)

    def give(self, request: IoRequest, now_s: float) -> Given:
        """A request was submitted."""
        if request.deadline_s is None or request.kind is IoKind.CALL:
            return Given(request)
        given = Given(request, now_s + request.deadline_s, next(self._numbers))
        self._given[given.number] = given
        heapq.heappush(self._heap, (given.deadline_s, given.number))
        return given

    def ended(self, given: Given) -> None:
        """It has its last result, or is about to."""
        given.ended = True
        self._given.pop(given.number, None)

    @property
    def next_s(self) -> float:
        """When the next one is due; infinity if none will be."""
        while self._heap and self._heap[0][1] not in self._given:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now_s: float) -> Iterator[Given]:
        """Those that are due and have not ended, each once, in order."""
        while self.next_s <= now_s:
            yield self._given.pop(heapq.heappop(self._heap)[1])
