"""A drive of known speed, in real time, under the store's own native scheduler: what it can do at best is arithmetic.

`parallel` pieces are in the drive at once. Each takes `latency_s`; then its bytes pass a link of `bytes_per_s` that all
share, in order of start. The bytes are really moved, from and to files (on tmpfs). A thread of Python plays the drive:
it is as punctual as the machine lets it be, and that it is late is not made worse by what follows: a place in the drive
that became free at some moment is taken from that moment on by what waited for it.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from benchmarks.pairs import Skip

from kvterrace.io.base import IoKind, IoRequest
from kvterrace.io.probe import why_not_native

__all__ = ["paced_drive"]

#: Smaller pieces are moved by the extension module, which is quicker but keeps the GIL meanwhile.
_SMALL_NBYTES = 128 << 10


def paced_drive(*, latency_s: float, parallel: int, bytes_per_s: float = math.inf) -> Any:
    """An `IoEngine`. Raises `Skip` without the extension module."""
    missing = why_not_native()
    if missing is not None:
        raise Skip(missing)
    from kvterrace.io.native import NativeEngine

    class PacedDrive(NativeEngine):
        def __init__(self) -> None:
            super().__init__("manual", "paced", depth=parallel, workers=4)
            self._rung = threading.Event()
            self._submitted_s = 0.0
            self._over = False
            self._link_free_s = 0.0
            self._drive = threading.Thread(target=self._play, name="paced-drive", daemon=True)
            self._drive.start()

        def submit(self, requests: Sequence[IoRequest]) -> None:
            super().submit(requests)
            self._submitted_s = time.monotonic()
            self._rung.set()

        def close(self, timeout_s: float) -> bool:
            ended = super().close(timeout_s)
            self._over = True
            self._rung.set()
            self._drive.join()
            return ended

        def _play(self) -> None:
            running: list[tuple[float, int, int, int, int]] = []  # a heap: due, piece, operation, place, bytes
            while not self._over:
                self._rung.clear()
                now_s = time.monotonic()
                self._core.set_now(now_s)
                free_s = [now_s] * (parallel - len(running))
                while running and running[0][0] <= now_s:
                    due_s, *piece = heapq.heappop(running)
                    self._carry_out(*piece)
                    free_s.append(due_s)
                heapq.heapify(free_s)
                while (pulled := self._core.pull()) is not None:
                    number, operation, place, nbytes, _ = pulled
                    start_s = max(heapq.heappop(free_s), min(self._submitted_s, now_s))
                    done_s = start_s + latency_s
                    if bytes_per_s < math.inf:
                        done_s = self._link_free_s = max(done_s, self._link_free_s) + nbytes / bytes_per_s
                    heapq.heappush(running, (done_s, number, operation, place, nbytes))
                self._rung.wait(max(0.0, running[0][0] - time.monotonic()) if running else None)

        def _carry_out(self, number: int, operation: int, place: int, nbytes: int) -> None:
            request = self._requests[operation][0]
            if nbytes < _SMALL_NBYTES or request.kind is IoKind.SYNC:
                self._core.perform(number)
                return
            file = cast("Any", request.file)
            with file.using() as fd:
                move = os.preadv if request.kind is IoKind.READ else os.pwritev
                views = _cut([one.data for one in request.buffers], place - request.offset, nbytes)
                moved = 0
                while moved < nbytes and (more := move(fd, views, place + moved)):
                    moved += more
                    views = _cut(views, more, nbytes - moved)
            self._core.answer(number, moved)

    return PacedDrive()


def _cut(views: Sequence[memoryview], start: int, nbytes: int) -> list[memoryview]:
    """The `nbytes` from `start` on of `views`, seen end to end."""
    cut = []
    for view in views:
        piece = view[start : start + nbytes]
        start = max(0, start - view.nbytes)
        nbytes -= piece.nbytes
        if piece.nbytes:
            cut.append(piece)
    return cut
