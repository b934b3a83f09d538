"""One completion at a time, in an order that the test chooses: every race of a store can be written as a plain test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.clock import ManualClock
from kvterrace.errors import StoreClosedError
from kvterrace.io.base import FileInfo, IoEngine, IoFile, IoRequest, IoResult

__all__ = ["Stepper"]


class Stepper:
    """An `IoEngine` over another (a `FakeDevice`, as a rule) that completes a request only when told to.

    What is submitted waits in `pending`. `step(n)` carries out the n-th of these: its data moves, its `finish` runs,
    and the next `poll` hands out the result. With `choose`, a `poll` that has nothing to hand out asks it which one to
    carry out, so that `Store.wait` and `flush` go on by themselves, in any order that e.g. Hypothesis draws.

    Classes of urgency mean nothing here: the order is the chosen one. Not thread-safe: for stores with
    `background=False`.
    """

    def __init__(
        self,
        inner: IoEngine,
        clock: ManualClock,
        choose: Callable[[Sequence[IoRequest]], int] | None = None,
    ) -> None:
        """`clock` is moved by a `poll` that finds nothing: by its whole timeout. `choose` gets what is pending, not
        empty, in order of submission, and returns an index.
        """
        self.name = f"stepped {inner.name}"
        self.pending: list[IoRequest] = []
        self.choose = choose
        self._inner = inner
        self._clock = clock
        self._done: list[IoResult] = []
        self._woken = self._closed = False

    def step(self, index: int = 0) -> IoRequest:
        """Carry out the pending request of this index, all of it; returns it. Raises IndexError."""
        request = self.pending.pop(index)
        self._inner.submit([request])
        done = self._inner.poll(3600.0) or self._inner.poll(3600.0)  # the first may end by an old `wake`
        assert done, f"{self._inner.name} does not complete {request}"
        self._done += done
        return request

    def step_all(self) -> int:
        """Carry out what is pending now, in order of submission; returns how many."""
        count = len(self.pending)
        for _ in range(count):
            self.step()
        return count

    # IoEngine

    def submit(self, requests: Sequence[IoRequest]) -> None:
        if self._closed:
            raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")
        self.pending += requests

    def poll(self, timeout_s: float) -> list[IoResult]:
        if not self._done and not self._woken:
            if self.pending and self.choose is not None:
                self.step(self.choose(tuple(self.pending)))
            else:
                self._clock.advance(max(0.0, timeout_s))
        self._woken = False
        done, self._done = self._done, []
        return done

    def wake(self) -> None:
        self._woken = True

    def subscribe(self, on_result: Callable[[], None]) -> bool:  # noqa: ARG002 - results come into being in poll
        return False

    @property
    def in_flight(self) -> int:
        return len(self.pending) + len(self._done)

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`. With `choose`, what is pending is carried out first; without, it hangs: False."""
        self._closed = True
        if self.choose is None and self.pending:
            return False
        while self.pending and self.choose is not None:
            self.step(self.choose(tuple(self.pending)))
        return self._inner.close(timeout_s)

    def create(self, path: Path, nbytes: int) -> IoFile:
        return self._inner.create(path, nbytes)

    def open(self, path: Path) -> IoFile:
        return self._inner.open(path)

    def reopen(self, path: Path) -> IoFile:
        return self._inner.reopen(path)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        return self._inner.read_now(file, offset, buffer)

    def truncate(self, file: IoFile, nbytes: int) -> None:
        self._inner.truncate(file, nbytes)

    def close_file(self, file: IoFile) -> None:
        self._inner.close_file(file)

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)

    def list(self, folder: Path) -> Sequence[FileInfo]:
        return self._inner.list(folder)

    def sync_folder(self, folder: Path) -> None:
        self._inner.sync_folder(folder)

    def free_nbytes(self, folder: Path) -> int:
        return self._inner.free_nbytes(folder)
