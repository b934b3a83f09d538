"""Several engines polled as one: a store with more than one drive has an engine for each, and one driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvterrace.io.base import IoEngine, IoResult

__all__ = ["Engines"]

#: How long an engine is polled that cannot call when it has something, while others may.
_SLICE_S = 0.001


class Engines:
    """Engines that are polled, woken and closed together. `poll` is for one thread at a time; the rest for any."""

    def __init__(self, engines: Sequence[IoEngine]) -> None:
        self._engines = list(engines)
        self._bell = threading.Condition()
        self._rung = False
        self._silent = [engine for engine in self._engines if not engine.subscribe(self._ring)]

    def poll(self, timeout_s: float) -> list[IoResult]:
        """Results of any engine; waits up to `timeout_s` for the first, or until `wake`."""
        if len(self._engines) == 1:
            return self._engines[0].poll(timeout_s)
        limit_s = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            with self._bell:
                rung, self._rung = self._rung, False
            results = [result for engine in self._engines for result in engine.poll(0.0)]
            if results or rung or left_s <= 0:
                return results
            if self._silent:
                # their time may be a clock that only moves while they are polled
                slice_s = min(left_s, _SLICE_S)
                results = [result for engine in self._silent for result in engine.poll(slice_s)]
                left_s -= slice_s
                if results:
                    return results
                continue
            with self._bell:
                if not self._rung:
                    self._bell.wait(left_s)
            left_s = limit_s - time.monotonic()

    def wake(self) -> None:
        """Make a waiting `poll` return; if none waits, the next one returns at once."""
        self._ring()
        self._engines[0].wake()

    @property
    def in_flight(self) -> int:
        """Requests submitted to any engine and not yet returned by `poll`."""
        return sum(engine.in_flight for engine in self._engines)

    def close(self, timeout_s: float) -> bool:
        """Close every engine; False if one still hangs after `timeout_s` for all of them together."""
        limit_s = time.monotonic() + timeout_s
        ended = True
        for engine in self._engines:
            ended &= engine.close(max(0.05, limit_s - time.monotonic()))
        return ended

    def _ring(self) -> None:
        with self._bell:
            self._rung = True
            self._bell.notify()
