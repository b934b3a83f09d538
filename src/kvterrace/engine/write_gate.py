"""Writes, SYNCs and new files of a drive, let through by its breaker."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.space import Segment
from kvterrace.engine.volume import Volume
from kvterrace.health.breaker import HANG_S, BreakerState, Fault, Side, Ticket, fault_of
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.tiers.segments import aligned_pages

__all__ = ["WriteGate"]

_log = logging.getLogger(__name__)

#: Reads go first: while some are under way, a write may wait this many times as long before it counts as hanging.
_BEHIND_READS = 3
#: Most time between two looks that counts as waiting for the drive: who drives a store looks once a second.
_WATCH_S = 2.0
#: Writes that may hang at once. The device holds memory of each, and an engine a thread.
_MOST_HUNG = 4
#: Where reads are stopped nothing is written either; if nobody tries a read for this long, the store does.
_PROBE_AFTER_S = 5.0
#: A failure this long after the one before it is worth a warning of its own.
_EPISODE_S = 60.0


class WriteGate:
    """What is asked of a drive besides reads, and how it answers. Used under the store's lock.

    A full or read-only drive, errors, and hangs stop writes for a while; then one at a time tries it. While reads are
    stopped nothing is written either. The breaker says when trouble begins and when it has ended.
    """

    def __init__(self, core: Core, volume: Volume) -> None:
        self._core = core
        self._engine = volume.engine
        self._reads = volume.gate
        self._breaker = volume.gate.breaker
        self._files = volume.files
        self._space = volume.space
        self._used_up = False
        self._under_way: dict[IoRequest, Ticket] = {}  # oldest first
        self._hung: set[IoRequest] = set()
        self._silent_s = 0.0  # watched since a write last ended, or the first of those under way was sent
        self._watched_s = core.clock.monotonic_s()
        self._read_due_s: float | None = None  # since when a read is wanted to try the drive
        self._quiet_until_s = float("-inf")

    @property
    def takes_writes(self) -> bool:
        """Whether the drive takes writes as far as is known: also one at a time, also if the last failure is long
        enough ago.
        """
        breaker = self._breaker
        if self._used_up or breaker.state(Side.READ) is not BreakerState.CLOSED:
            return False
        return breaker.state(Side.WRITE) is not BreakerState.OPEN or breaker.retry_in_s(Side.WRITE) <= 0

    @property
    def is_open(self) -> bool:
        """Whether a request would be let through now."""
        return len(self._hung) < _MOST_HUNG and self._breaker.allows_writes()

    def stop(self) -> None:
        """No segment can be made any more before the store is opened anew."""
        if not self._used_up:
            folder = self._files.folder
            _log.warning("every segment number of %s is used up; open the store again to go on writing", folder)
        self._used_up = True
        self._space.can_write = False

    @property
    def hung(self) -> int:
        """Requests that the device has not answered and is not expected to."""
        return len(self._hung)

    def submit(
        self,
        request: IoRequest,
        on_result: OnResult,
        *,
        proof: bool = True,
        excuse: Callable[[IoResult], bool] = lambda _: False,
    ) -> bool:
        """Send a request, if the drive is fit for it; `on_result` becomes its tag. False: it was not sent.

        `proof`: whether its success says that blocks can be written, so that failures of those are not in a row.
        `excuse`: whether a failure is to be kept from the breaker, since the caller has an answer to it.
        """
        if not self.is_open:
            return False
        ticket = self._breaker.admit(Side.WRITE)
        if ticket is None:
            return False
        if not self._under_way:
            self._silent_s = 0.0
        self._under_way[request] = ticket

        def on_end(result: IoResult) -> None:
            self._ended(result, excuse, proof=proof)
            on_result(result)

        request.tag = on_end
        self._engine.submit([request])
        return True

    def _ended(self, result: IoResult, excuse: Callable[[IoResult], bool], *, proof: bool) -> None:
        request, now_s = result.request, self._core.clock.monotonic_s()
        ticket = self._under_way.pop(request)
        self._hung.discard(request)
        self._silent_s = 0.0
        fault = result.error or result.crash
        if fault is None and result.complete and not proof and self._breaker.state(Side.WRITE) is BreakerState.CLOSED:
            self._breaker.unused(ticket)
        elif fault is None and result.complete:
            # what a CALL takes is not in its result, which knows of I/O alone
            took_s = now_s - ticket.admitted_s if request.kind is IoKind.CALL else result.ended_s - result.started_s
            self._breaker.succeeded(ticket, took_s)
        elif isinstance(fault, FileExistsError | FileNotFoundError):
            self._breaker.unused(ticket)
        elif excuse(result):
            self._breaker.unused(ticket)
            self._quiet_until_s = now_s + _EPISODE_S  # told already
        elif fault is None or isinstance(fault, OSError):
            self._breaker.failed(ticket, fault_of(fault), _why(result))
        else:
            self._breaker.failed(ticket, Fault.DEVICE, repr(fault))

    def failed(self, segment: Segment | None, result: IoResult) -> None:
        """A request that was let through did not succeed: it is counted, and never is anything written into this
        segment again. Warned of once in each episode, unless the breaker has.
        """
        self._core.stats.ssd_write_failures += 1
        now_s = self._core.clock.monotonic_s()
        if now_s >= self._quiet_until_s and self._breaker.state(Side.WRITE) is BreakerState.CLOSED:
            _log.warning("writing to %s failed: %s; tried again elsewhere", self._files.folder, _why(result))
        self._quiet_until_s = now_s + _EPISODE_S
        if segment is not None and segment is self._space.open:
            self._space.shut()

    def pump(self, now_s: float, *, wanted: bool) -> None:
        """To be called now and then: finds out what hangs; `wanted`: something waits to be written."""
        # a process that was stopped, or busy elsewhere, has not looked: what ended meanwhile is about to be told
        self._silent_s += min(now_s - self._watched_s, _WATCH_S)
        self._watched_s = now_s
        limit_s = HANG_S * (_BEHIND_READS if self._reads.busy else 1)
        if len(self._under_way) > len(self._hung) and self._silent_s >= limit_s:
            for request, ticket in self._under_way.items():
                if request not in self._hung:
                    self._hung.add(request)
                    self._breaker.hung(ticket)
            self._silent_s = 0.0
        self._space.can_write = self.takes_writes
        if not wanted or not self._breaker.probe_due(Side.READ):
            self._read_due_s = None
        elif self._read_due_s is None:
            self._read_due_s = now_s
        elif now_s - self._read_due_s >= _PROBE_AFTER_S:
            self._read_due_s = None
            self._try_read()

    def _try_read(self) -> None:
        """Read a header page, to find out whether the drive can be read."""
        number = next((one for one in self._space.segments if self._files.is_open(one)), None)
        if number is None:
            return
        segment = self._space.segments[number]
        request = IoRequest(IoKind.READ, IoClass.DEMAND, self._files.file(number), 0, [aligned_pages()])
        if not self._reads.admit(request):
            return
        segment.readers += 1

        def on_result(result: IoResult) -> None:
            segment.readers -= 1
            self._reads.ended(result)

        request.tag = on_result
        self._engine.submit([request])


def _why(result: IoResult) -> str:
    fault = result.error or result.crash
    if fault is not None:
        return str(fault)
    return f"short write: {result.nbytes} of {result.wanted_nbytes} B"
