"""Time, injected. The ledger, its policies and the fake device never ask the operating system for it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """What the store needs of time. Thread-safe."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back. For ages, deadlines and recency."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970 (UTC); may jump. Written down for people to read; compared only for how
        much of a day has passed since the write budget was written down, no more than one at most."""
        ...


class SystemClock:
    """The operating system's clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves when told to: for tests, replay and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
