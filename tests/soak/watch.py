"""The watchdog: every operation has a bound; who is over it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

#: What a busy machine may add to any bound.
SLACK_S = 20.0
_TICK_S = 0.5


class Watchdog:
    """Looks every half second at who is inside what, and since when. On a hang: stacks to stderr, then `on_hang`."""

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._inside: dict[int, tuple[str, float, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watchdog", daemon=True)
        #: The longest that anything took, as a share of its bound.
        self.worst: tuple[float, str] = (0.0, "")
        self._lags: deque[float] = deque([0.0], maxlen=120)  # of a minute

    @property
    def lag_s(self) -> float:
        """How late a thread of this process was at most in the last minute, with nothing to do but to wake up."""
        return max(self._lags)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def op(self, what: str, bound_s: float) -> Iterator[None]:
        """The calling thread is inside `what`, which may take `bound_s` and the slack."""
        me, start_s = threading.get_ident(), time.monotonic()
        limit_s = start_s + bound_s + SLACK_S
        with self._lock:
            before = self._inside.get(me)
            self._inside[me] = (what, start_s, limit_s)
        try:
            yield
        finally:
            share = (time.monotonic() - start_s) / (bound_s + SLACK_S)
            with self._lock:
                if before is None:
                    del self._inside[me]
                else:
                    self._inside[me] = before
                self.worst = max(self.worst, (share, what))

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(_TICK_S):
            now_s = time.monotonic()
            self._lags.append(now_s - before_s - _TICK_S)
            before_s = now_s
            with self._lock:
                late = [(what, now_s - start_s) for what, start_s, limit_s in self._inside.values() if now_s > limit_s]
            if late:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._on_hang(", ".join(f"{what} has not ended after {taken_s:.1f} s" for what, taken_s in late))
                return
