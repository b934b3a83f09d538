"""Reads of a drive, let through by its breaker."""

from __future__ import annotations

import logging

from kvterrace.clock import Clock
from kvterrace.health.breaker import HANG_S, Breaker, Side, Ticket, Transition, fault_of
from kvterrace.io.base import IoRequest, IoResult

__all__ = ["ReadGate"]

_log = logging.getLogger(__name__)


class ReadGate:
    """What is asked of a drive in reads, and how it answers. Used under the store's lock.

    Errors, hangs and service times far above the drive's own close the gate for a while; then one read at a time tries
    it. Wrong bytes do not: the drive answered, and what it answered is discarded anyway.
    """

    def __init__(self, clock: Clock, drive: str) -> None:
        self.breaker = Breaker(clock, drive, self._changed)
        self._clock = clock
        self._under_way: dict[IoRequest, Ticket] = {}  # oldest first
        #: How long reads that were given up had waited, since one last ended by itself.
        self._silent_s = 0.0
        self._progress_s = clock.monotonic_s()  # when a read last ended, or the first of those under way was sent

    @property
    def is_open(self) -> bool:
        """Whether a read would be let through now."""
        return self.breaker.allows_reads()

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return bool(self._under_way)

    def admit(self, request: IoRequest) -> bool:
        """Let a read through, if the drive is fit for it; then `ended` must be told of its result."""
        ticket = self.breaker.admit(Side.READ)
        if ticket is None:
            return False
        if not self._under_way:
            self._progress_s = self._clock.monotonic_s()
        self._under_way[request] = ticket
        return True

    def ended(self, result: IoResult) -> None:
        """A read that was admitted has ended."""
        ticket = self._under_way.pop(result.request)
        now_s = self._clock.monotonic_s()
        if result.expired:  # perhaps it was never sent: no answer of the drive, but silence counts up to a hang
            if not self._under_way:
                self._silent_s += now_s - self._progress_s
            self.breaker.unused(ticket)
            return
        self._progress_s, self._silent_s = now_s, 0.0
        if isinstance(result.error, FileNotFoundError):  # somebody has removed it: the drive is none the worse
            self.breaker.unused(ticket)
        elif result.error is not None:
            self.breaker.failed(ticket, fault_of(result.error), str(result.error))
        elif result.complete:
            self.breaker.succeeded(ticket, result.ended_s - result.started_s)
        else:
            self.breaker.unused(ticket)

    def watch(self, now_s: float) -> None:
        """To be called now and then: reads of which none has ended for `HANG_S` hang."""
        if self._under_way and self._silent_s + now_s - self._progress_s >= HANG_S:
            self.breaker.hung(next(iter(self._under_way.values())))
            self._progress_s, self._silent_s = now_s, 0.0

    def _changed(self, change: Transition) -> None:
        if change.is_news:
            _log.warning("%s", change)
