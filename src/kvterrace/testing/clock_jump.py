"""A clock that leaps, for whoever depends on time."""

from __future__ import annotations

from kvterrace.clock import Clock, ManualClock

__all__ = ["ClockJump"]


class ClockJump(ManualClock):
    """A clock that leaps: over another clock, or standing still by itself. A `FakeDevice` moves it as any ManualClock.

    Monotonic time can only leap forward (a machine that was suspended); `unix_s` goes both ways (NTP, an operator).
    """

    def __init__(self, base: Clock | None = None) -> None:
        super().__init__()
        self._base = base
        self._unix_offset_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + (self._base.monotonic_s() if self._base is not None else 0.0)

    def unix_s(self) -> float:
        base_s = self._base.unix_s() if self._base is not None else 0.0
        return super().unix_s() + base_s + self._unix_offset_s

    def leap(self, seconds: float) -> None:
        """Both times leap forward by `seconds`, as after a suspend."""
        self.advance(seconds)

    def set_back(self, seconds: float) -> None:
        """`unix_s` alone goes back by `seconds`; forward, if negative."""
        self._unix_offset_s -= seconds
