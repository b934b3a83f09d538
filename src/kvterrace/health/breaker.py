"""When to stop asking a drive, and when to try again. Sans-I/O: it is told how requests ended, and time is injected.

Reads and writes are two circuits: a drive that is full or has become read-only goes on serving. The other way round
there is no use: while reads are stopped, nothing is written either, since nobody could read it back.

A circuit is CLOSED (all may pass), OPEN (nothing may, for a while) or HALF_OPEN (one request at a time may, a probe).
It opens
  - at once on a fact: no space, read-only, or a request that hangs;
  - on `CONSECUTIVE` failures in a row;
  - when `SHARE` of the recent outcomes are failures;
  - when the recent median of the service time is far above what this drive used to take.
It closes after `PROBES` good probes. The open time doubles with each opening up to `MAX_OPEN_S`, without jitter (one
process writes a partition: there is no herd to spread), and starts anew once the circuit has held for that long.

Who asks gets a `Ticket` and gives it back with the result. What was let through before the last transition says nothing
about the drive as it is now: such a ticket is taken back and ignored. So a late completion never passes as a probe.
"""

from __future__ import annotations

import enum
import errno
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvterrace.clock import Clock

__all__ = ["HANG_S", "Breaker", "BreakerState", "Fault", "Side", "Ticket", "Transition", "fault_of"]

#: A request that has not ended this long after the device got it hangs. Garbage collection and read recovery inside a
#: drive stay under a few seconds; Linux resets an NVMe controller after 30 s (`nvme_core.io_timeout`).
HANG_S = 10.0
#: Failures in a row that open a circuit. One bad place is met by a run of retries and neighbours, not by five requests.
CONSECUTIVE = 5
#: Share of failures that opens a circuit, among outcomes of the last `WINDOW_S`, `WINDOW` at most, and
#: `SHARE_FAILURES` at least: every fourth read failing costs more in recomputation than the other three save.
SHARE = 0.25
SHARE_FAILURES = 8
WINDOW = 64
WINDOW_S = 30.0
#: A drive is slow when the median of its last `RECENT` service times is more than `SLOW_FACTOR` times the median of the
#: `REFERENCE` before them, and above `SLOW_FLOOR_S`. A median of 16 is moved by nine slow requests, never by one. The
#: natural spread of small and large requests is about 10; below half a second a restore still beats recomputing.
RECENT = 16
REFERENCE = 256
MIN_REFERENCE = 32
SLOW_FACTOR = 20.0
SLOW_FLOOR_S = 0.5
#: Good probes that close a circuit.
PROBES = 3
#: First and longest open time. A minute bounds how late a repaired drive is noticed.
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 60.0


class Side(enum.Enum):
    """What a request needs of the drive. A SYNC is on the WRITE side."""

    READ = "read"
    WRITE = "write"


class BreakerState(enum.Enum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Fault(enum.Enum):
    """How a request failed."""

    #: No space, or a quota reached. Says nothing against reads.
    FULL = "the drive is full"
    #: The file system has become read-only.
    READ_ONLY = "the drive is read-only"
    #: These bytes could not be read or written, or came back wrong: the place is bad, the drive perhaps not.
    MEDIA = "bad place"
    #: Anything else.
    DEVICE = "device error"


# What Linux makes of block-layer statuses (block/blk-core.c, `blk_errors`): medium ENODATA, protection EILSEQ, other
# EIO.
_FAULTS = {
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EROFS: Fault.READ_ONLY,
    errno.EIO: Fault.MEDIA,
    errno.ENODATA: Fault.MEDIA,
    errno.EILSEQ: Fault.MEDIA,
}


def fault_of(error: OSError | None) -> Fault:
    """The kind of an I/O error; None stands for a transfer that was short without one, or for wrong bytes."""
    if error is None:
        return Fault.MEDIA
    return _FAULTS.get(error.errno or 0, Fault.DEVICE)


@dataclass(frozen=True, slots=True)
class Transition:
    """A circuit has changed. Reported once.

    Attributes:
        reason: why, fit for a log line.
        open_s: for how long nothing passes now; 0 unless `after` is OPEN.
    """

    drive: str
    side: Side
    before: BreakerState
    after: BreakerState
    reason: str
    at_s: float
    open_s: float = 0.0

    @property
    def is_news(self) -> bool:
        """Whether a person should hear of it: trouble begins, or has ended. Not each probe in between."""
        return BreakerState.CLOSED in (self.before, self.after)

    def __str__(self) -> str:
        until = f"; nothing is asked of it for {self.open_s:.0f} s" if self.after is BreakerState.OPEN else ""
        return f"{self.drive}: {self.side.value}s {self.before.value} -> {self.after.value}: {self.reason}{until}"


@dataclass(slots=True, eq=False)
class Ticket:
    """Leave to send one request. Given back once, by `succeeded`, `failed`, `hung` or `unused`; what comes after is
    ignored.
    """

    side: Side
    epoch: int
    admitted_s: float


class Breaker:
    """Two circuits of one drive. Not thread-safe: used under the store's lock, does not block."""

    def __init__(self, clock: Clock, drive: str, on_change: Callable[[Transition], None] | None = None) -> None:
        """`drive` names it in reports. `on_change` is called at each transition; it must not call back."""
        self._circuits = {side: _Circuit(clock, drive, side, on_change) for side in Side}

    def state(self, side: Side) -> BreakerState:
        """The state of one circuit. An OPEN one stays so after its time until somebody is admitted."""
        return self._circuits[side].state

    def allows_reads(self) -> bool:
        """Whether `admit(Side.READ)` would let a request through now."""
        return self._allows(Side.READ)

    def allows_writes(self) -> bool:
        """Whether `admit(Side.WRITE)` would let a request through now."""
        return self._allows(Side.WRITE)

    def probe_due(self, side: Side) -> bool:
        """Whether a circuit that is not closed waits for a request to try: if nobody wants one, send one of your
        own.
        """
        return self._circuits[side].state is not BreakerState.CLOSED and self._allows(side)

    def retry_in_s(self, side: Side) -> float:
        """Seconds until `probe_due` can become true; 0 if the circuit is closed or a probe may go, or is under way."""
        return self._circuits[side].retry_in_s()

    def admit(self, side: Side) -> Ticket | None:
        """A ticket for one request, or None: do not send it. In HALF_OPEN there is one ticket at a time."""
        if not self._allows(side):
            return None
        return self._circuits[side].admit()

    def succeeded(self, ticket: Ticket, latency_s: float) -> None:
        """The request ended well. `latency_s`: from when the device got it, without the time in a queue."""
        self._circuits[ticket.side].succeeded(ticket, latency_s)

    def failed(self, ticket: Ticket, fault: Fault, reason: str = "") -> None:
        """The request ended badly. `reason` is for the report."""
        self._circuits[ticket.side].failed(ticket, fault, reason)

    def hung(self, ticket: Ticket) -> None:
        """The device has had the request for `HANG_S` and more. A late end of it changes nothing any more."""
        self._circuits[ticket.side].hung(ticket)

    def unused(self, ticket: Ticket) -> None:
        """The request was not sent, or its end says nothing about the drive (a bad argument, a closed file)."""
        self._circuits[ticket.side].unused(ticket)

    def _allows(self, side: Side) -> bool:
        if side is Side.WRITE and self._circuits[Side.READ].state is not BreakerState.CLOSED:
            return False
        return self._circuits[side].allows()


class _Circuit:
    def __init__(self, clock: Clock, drive: str, side: Side, on_change: Callable[[Transition], None] | None) -> None:
        self._clock, self._drive, self._side, self._on_change = clock, drive, side, on_change
        self.state = BreakerState.CLOSED
        self._epoch = 0  # counts transitions: a ticket of another epoch is ignored
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self._failures_in_row = 0
        self._latency = _Latency()
        self._probe: Ticket | None = None
        self._good_probes = 0
        self._open_s = 0.0  # of the last opening
        self._until_s = 0.0
        self._closed_at_s = clock.monotonic_s()

    def retry_in_s(self) -> float:
        if self.state is not BreakerState.OPEN:
            return 0.0
        return max(0.0, self._until_s - self._clock.monotonic_s())

    def allows(self) -> bool:
        self._expire_probe()
        match self.state:
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return self._clock.monotonic_s() >= self._until_s
            case BreakerState.HALF_OPEN:
                return self._probe is None

    def admit(self) -> Ticket:
        if self.state is BreakerState.OPEN:
            self._good_probes = 0
            self._change(BreakerState.HALF_OPEN, "time to try it again")
        ticket = Ticket(self._side, self._epoch, self._clock.monotonic_s())
        if self.state is BreakerState.HALF_OPEN:
            self._probe = ticket
        return ticket

    def succeeded(self, ticket: Ticket, latency_s: float) -> None:
        if not self._take_back(ticket):
            return
        if self.state is BreakerState.HALF_OPEN:
            if self._latency.is_slow(latency_s):
                self._open(f"a probe took {latency_s:.3g} s, usual are {self._latency.usual_s:.3g} s")
                return
            self._good_probes += 1
            if self._good_probes >= PROBES:
                self._close()
            return
        self._failures_in_row = 0
        self._outcomes.append((self._clock.monotonic_s(), True))
        self._latency.add(latency_s)
        if self._latency.slow:
            self._open(f"requests take {self._latency.recent_s:.3g} s, usual are {self._latency.usual_s:.3g} s")

    def failed(self, ticket: Ticket, fault: Fault, reason: str) -> None:
        if not self._take_back(ticket):
            return
        text = f"{fault.value}: {reason}" if reason else fault.value
        if self.state is BreakerState.HALF_OPEN:
            self._open(text)
            return
        now_s = self._clock.monotonic_s()
        self._failures_in_row += 1
        self._outcomes.append((now_s, False))
        while self._outcomes[0][0] < now_s - WINDOW_S:
            self._outcomes.popleft()
        failures = sum(not fine for _, fine in self._outcomes)
        if fault in (Fault.FULL, Fault.READ_ONLY) and self._side is Side.WRITE:
            self._open(text)
        elif self._failures_in_row >= CONSECUTIVE:
            self._open(f"{self._failures_in_row} failures in a row, the last: {text}")
        elif failures >= SHARE_FAILURES and failures >= SHARE * len(self._outcomes):
            self._open(f"{failures} of the last {len(self._outcomes)} failed, the last: {text}")

    def hung(self, ticket: Ticket) -> None:
        # One is enough: what hangs holds a thread and memory and cannot be called back, and the next would, too.
        if self._take_back(ticket):
            self._open(f"a request has hung for {self._clock.monotonic_s() - ticket.admitted_s:.1f} s")

    def unused(self, ticket: Ticket) -> None:
        self._take_back(ticket)

    def _take_back(self, ticket: Ticket) -> bool:
        """Whether the end of this ticket still says something. It does so once."""
        current = ticket.epoch == self._epoch
        ticket.epoch = -1
        if ticket is self._probe:
            self._probe = None
        return current

    def _expire_probe(self) -> None:
        """A probe whose end nobody reports must not keep the circuit half-open for good."""
        if self._probe is not None and self._clock.monotonic_s() - self._probe.admitted_s >= HANG_S:
            self.hung(self._probe)

    def _open(self, reason: str) -> None:
        now_s = self._clock.monotonic_s()
        held = self.state is BreakerState.CLOSED and now_s - self._closed_at_s >= MAX_OPEN_S
        self._open_s = FIRST_OPEN_S if held or not self._open_s else min(MAX_OPEN_S, 2 * self._open_s)
        self._until_s = now_s + self._open_s
        self._change(BreakerState.OPEN, reason)

    def _close(self) -> None:
        self._outcomes.clear()
        self._failures_in_row = 0
        self._latency.forget_recent()
        self._closed_at_s = self._clock.monotonic_s()
        self._change(BreakerState.CLOSED, f"{PROBES} requests ended well")

    def _change(self, after: BreakerState, reason: str) -> None:
        before, self.state = self.state, after
        self._epoch += 1
        self._probe = None
        if self._on_change is not None:
            open_s = self._open_s if after is BreakerState.OPEN else 0.0
            now_s = self._clock.monotonic_s()
            self._on_change(Transition(self._drive, self._side, before, after, reason, now_s, open_s))


class _Latency:
    """Service times: the last few against those before them. One that turns bad is not yet part of what is usual."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._reference: deque[float] = deque(maxlen=REFERENCE)
        self._since_usual = 0
        self.usual_s = 0.0
        self.recent_s = 0.0

    def add(self, latency_s: float) -> None:
        self._recent.append(latency_s)
        if len(self._recent) > RECENT:
            self._reference.append(self._recent.popleft())
            self._since_usual += 1
            if self._since_usual >= RECENT or len(self._reference) == MIN_REFERENCE:
                self._since_usual = 0
                self.usual_s = _median(self._reference)
        # The median rises only with a slow one: no need to sort while the drive is quick.
        self.recent_s = _median(self._recent) if latency_s > SLOW_FLOOR_S else 0.0

    @property
    def slow(self) -> bool:
        """Whether the recent ones are far above the usual."""
        return len(self._recent) == RECENT and self.is_slow(self.recent_s)

    def is_slow(self, latency_s: float) -> bool:
        """Whether one service time is far above the usual. A drive that is not known yet has no usual."""
        known = len(self._reference) >= MIN_REFERENCE
        return known and latency_s > SLOW_FLOOR_S and latency_s > SLOW_FACTOR * self.usual_s

    def forget_recent(self) -> None:
        """What was measured in bad times is no reference for good ones."""
        self._recent.clear()


def _median(values: Iterable[float]) -> float:
    # not `statistics.median`: importing that costs as much as a fifth of our own import
    line = sorted(values)
    return (line[(len(line) - 1) // 2] + line[len(line) // 2]) / 2
