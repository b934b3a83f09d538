"""Who turns the crank: takes results from the engine, lets the mover go on, and lets callers wait for what they
need.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvterrace.engine.mover import Mover
from kvterrace.io.several import Engines

__all__ = ["Driver"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Wait:
    """What somebody waits for. Once it was so, it counts, whatever comes after."""

    done: Callable[[], bool]
    over: bool = False

    def look(self) -> bool:
        """Whether it is so by now."""
        self.over = self.over or self.done()
        return self.over


class Driver:
    """Drives a mover, on a thread of its own after `start`, else on the thread of whoever waits.

    `lock` guards the mover, its ledger and everything in its core; the engine's threads never take it.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._engine = Engines(mover.core.engines)
        self._clock = mover.core.clock
        self.lock = threading.Condition(threading.RLock())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._waits: list[_Wait] = []

    def start(self, name: str) -> None:
        """Drive on a thread from now on."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, if there is one; waits for it for at most `timeout_s`."""
        self._stop.set()
        self._engine.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Something has changed that the thread may not know of while it sleeps."""
        self._engine.wake()

    def close_engines(self, timeout_s: float) -> bool:
        """Close every engine; False if one still hangs after `timeout_s`. Only after `stop`."""
        return self._engine.close(timeout_s)

    def turn(self) -> None:
        """Without a thread: take in what has finished by now. With one: nothing, it does so itself."""
        if self._thread is None:
            self._step(0.0)

    def wait_for(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `done()`, asked under the lock, on any thread; False after `timeout_s` (None: no limit) or if the
        mover has failed.
        """
        wait = _Wait(done)
        limit_s = None if timeout_s is None else self._clock.monotonic_s() + max(0.0, timeout_s)
        while True:
            with self.lock:
                if wait.look():
                    return True
                if self._mover.fault is not None:
                    return False
                left_s = 1.0 if limit_s is None else limit_s - self._clock.monotonic_s()
                if left_s <= 0:
                    return False
                if self._thread is not None:
                    self._waits.append(wait)
                    self.lock.wait(min(left_s, 1.0))
                    self._waits.remove(wait)
                    continue
                step_s = min(left_s, self._mover.timeout_s())
            self._step(step_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self.lock:
                    timeout_s = self._mover.timeout_s()
                self._step(timeout_s)
            except Exception as error:  # noqa: BLE001 - the thread must not die silently
                with self.lock:
                    self._mover.fail(error)
                    self.lock.notify_all()
                self._stop.wait(0.1)

    def _step(self, timeout_s: float) -> None:
        results = self._engine.poll(timeout_s)
        with self.lock:
            self._mover.handle(results)
            self._mover.pump()
            self._mover.follow()
            # Asked here, so that nobody is woken for a batch of which half has come: that costs the GIL each time.
            if self._mover.fault is not None or any(wait.look() for wait in self._waits):
                self.lock.notify_all()
