"""Which segments hold writes that a crash may undo, and the SYNCs that end that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.space import Segment
from kvterrace.engine.volume import Volume
from kvterrace.engine.write_gate import WriteGate
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult

__all__ = ["Syncing"]


class Syncing:
    """Keeps count of writes by segment. Used under the store's lock."""

    def __init__(
        self,
        core: Core,
        volume: Volume,
        gate: WriteGate,
        *,
        lost: Callable[[Segment], None],
        over: Callable[[Segment], bool],
    ) -> None:
        """
        Args:
            lost: told of a segment of which a SYNC has failed: what was written to it may be gone.
            over: whether nothing in a segment matters any more, so that a failed SYNC of it does not either.
        """
        self._core = core
        self._gate = gate
        self._waiting: list[tuple[IoRequest, OnResult]] = []  # until the drive takes them
        self._lost = lost
        self._over = over
        self._files = volume.files
        self._space = volume.space
        # segment -> count of writes when it was last written; synced leaves. A footer found at open says: synced
        scanned = self._files.scanned
        self._unsynced: dict[int, int] = {
            number: 0 for number, one in self._space.segments.items() if one.records and number in scanned
        }
        self._writes = 0

    def wrote(self, segment: Segment) -> None:
        """A write to `segment` has ended well."""
        self._writes += 1
        segment.written_s = self._core.clock.monotonic_s()
        self._unsynced[segment.number] = self._writes

    def forget(self, number: int) -> None:
        """Segment `number` needs no SYNC: it is durable as it is, or given up."""
        self._unsynced.pop(number, None)

    def sync(self, on_end: Callable[[bool], None]) -> int:
        """Make durable what was written up to now; `on_end` is called as often as the number returned says, each time
        with whether that went well.
        """
        unsynced = list(self._unsynced.items())
        for number, writes in unsynced:
            request = IoRequest(IoKind.SYNC, IoClass.DEMOTION, self._files.file(number))
            self._waiting.append((request, partial(self._on_synced, number, writes, on_end)))
        self.pump()
        return len(unsynced)

    def pump(self) -> None:
        """Send SYNCs that waited; where nothing is written, they have failed."""
        waiting, self._waiting = self._waiting, []
        for request, on_result in waiting:
            if self._gate.submit(request, on_result):
                continue
            if self._gate.takes_writes:
                self._waiting.append((request, on_result))
            else:
                on_result(IoResult(IoRequest(IoKind.CALL, IoClass.DEMOTION), crash=OSError("nothing is written")))

    def _on_synced(self, number: int, writes: int, on_end: Callable[[bool], None], result: IoResult) -> None:
        segment = self._space.segments.get(number)
        over = segment is None or self._over(segment)
        asked = result.request.kind is IoKind.SYNC
        synced = asked and result.complete
        if synced:
            if self._unsynced.get(number) == writes:
                del self._unsynced[number]
        elif asked and segment is not None and not over:
            self.failed(segment, result)
        on_end(synced or over)

    def failed(self, segment: Segment, result: IoResult) -> None:
        """A SYNC has failed, and a second one would not say so again."""
        self._lost(segment)
        self.forget(segment.number)
        self._gate.failed(segment, result)
