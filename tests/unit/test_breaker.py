"""The circuit breaker: what opens it, how it heals, and what never opens it."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvterrace.clock import ManualClock
from kvterrace.health import breaker as module
from kvterrace.health.breaker import HANG_S, Breaker, BreakerState, Fault, Side, Ticket, Transition, fault_of

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
READ, WRITE = Side.READ, Side.WRITE


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.seen: list[Transition] = []
        self.breaker = Breaker(self.clock, "nvme0", self.seen.append)

    def admit(self, side: Side = READ) -> Ticket:
        ticket = self.breaker.admit(side)
        assert ticket is not None
        return ticket

    def good(self, count: int = 1, side: Side = READ, latency_s: float = 0.001) -> None:
        for _ in range(count):
            self.breaker.succeeded(self.admit(side), latency_s)

    def bad(self, count: int = 1, side: Side = READ, fault: Fault = Fault.DEVICE) -> None:
        for _ in range(count):
            self.breaker.failed(self.admit(side), fault, "it broke")

    def states(self) -> tuple[BreakerState, BreakerState]:
        return self.breaker.state(READ), self.breaker.state(WRITE)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_in_a_row_open_it_for_a_second(bench: Bench) -> None:
    bench.good(40)
    bench.bad(4)
    bench.good()
    bench.bad(4)
    assert bench.breaker.state(READ) is CLOSED
    bench.bad()
    assert bench.breaker.state(READ) is OPEN
    assert not bench.breaker.allows_reads()
    assert bench.breaker.admit(READ) is None
    assert bench.breaker.retry_in_s(READ) == 1.0
    bench.clock.advance(0.999)
    assert not bench.breaker.allows_reads()
    bench.clock.advance(0.001)
    assert bench.breaker.allows_reads() and bench.breaker.probe_due(READ)
    (change,) = bench.seen
    assert str(change) == (
        "nvme0: reads closed -> open: 5 failures in a row, the last: device error: it broke; "
        "nothing is asked of it for 1 s"
    )


def test_a_share_of_failures_opens_it(bench: Bench) -> None:
    for _ in range(7):
        bench.good(3)
        bench.bad()
    assert bench.breaker.state(READ) is CLOSED
    bench.bad()
    assert bench.breaker.state(READ) is OPEN


def test_a_few_failures_among_many_do_not(bench: Bench) -> None:
    for _ in range(200):
        bench.good(9)
        bench.bad(fault=Fault.MEDIA)
    assert bench.seen == []


def test_old_failures_are_forgotten(bench: Bench) -> None:
    for _ in range(20):
        bench.bad()
        bench.clock.advance(5.0)
        bench.good()
    assert bench.seen == []


def test_half_open_lets_one_probe_through_and_three_good_ones_close_it(bench: Bench) -> None:
    bench.bad(5)
    bench.clock.advance(1.0)
    for n in range(3):
        probe = bench.admit()
        assert bench.breaker.state(READ) is HALF_OPEN
        assert bench.breaker.admit(READ) is None
        assert not bench.breaker.probe_due(READ)
        bench.breaker.succeeded(probe, 0.001)
        bench.breaker.succeeded(probe, 0.001)  # says nothing the second time
        assert bench.breaker.state(READ) is (CLOSED if n == 2 else HALF_OPEN)
    assert [(one.before, one.after, one.is_news) for one in bench.seen] == [
        (CLOSED, OPEN, True),
        (OPEN, HALF_OPEN, False),
        (HALF_OPEN, CLOSED, True),
    ]


def test_the_open_time_doubles_to_a_minute_and_starts_anew_after_good_times(bench: Bench) -> None:
    bench.bad(5)
    times = []
    for _ in range(9):
        times.append(bench.breaker.retry_in_s(READ))
        bench.clock.advance(times[-1])
        bench.bad()
    assert times == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    bench.clock.advance(60)
    bench.good(3)
    bench.bad(5)  # it has not held
    assert bench.breaker.retry_in_s(READ) == 60
    bench.clock.advance(60)
    bench.good(3)
    bench.clock.advance(60)
    bench.bad(5)
    assert bench.breaker.retry_in_s(READ) == 1


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.READ_ONLY])
def test_a_drive_that_takes_no_writes_goes_on_reading(bench: Bench, fault: Fault) -> None:
    bench.bad(side=WRITE, fault=fault)
    assert bench.states() == (CLOSED, OPEN)
    assert bench.breaker.allows_reads() and not bench.breaker.allows_writes()
    for _ in range(3):
        bench.clock.advance(bench.breaker.retry_in_s(WRITE))
        bench.bad(side=WRITE, fault=fault)
    assert [one.is_news for one in bench.seen].count(True) == 1  # one warning, however often it is tried
    bench.clock.advance(bench.breaker.retry_in_s(WRITE))
    bench.good(3, WRITE)
    assert bench.states() == (CLOSED, CLOSED)


def test_a_drive_that_cannot_be_read_is_not_written(bench: Bench) -> None:
    bench.bad(5)
    assert bench.states() == (OPEN, CLOSED)
    assert not bench.breaker.allows_writes() and bench.breaker.admit(WRITE) is None
    assert not bench.breaker.probe_due(WRITE)
    bench.clock.advance(1.0)
    bench.good(2)
    assert not bench.breaker.allows_writes()
    bench.good()
    assert bench.breaker.allows_writes()


def test_one_hang_opens_it_and_its_late_end_changes_nothing(bench: Bench) -> None:
    bench.good(100)
    ticket, other = bench.admit(), bench.admit()
    bench.clock.advance(HANG_S)
    bench.breaker.hung(ticket)
    assert bench.breaker.state(READ) is OPEN
    bench.clock.advance(1.0)
    probe = bench.admit()
    for late in (ticket, other):
        bench.breaker.succeeded(late, 11.0)
        bench.breaker.failed(late, Fault.DEVICE)
        bench.breaker.hung(late)
    assert bench.breaker.state(READ) is HALF_OPEN
    assert bench.breaker.admit(READ) is None  # the probe is still out
    bench.breaker.succeeded(probe, 0.001)
    assert bench.breaker.allows_reads()


def test_a_probe_that_nobody_reports_on_counts_as_hung(bench: Bench) -> None:
    bench.bad(5)
    bench.clock.advance(1.0)
    bench.admit()
    bench.clock.advance(HANG_S)
    assert not bench.breaker.allows_reads()
    assert bench.breaker.state(READ) is OPEN
    assert bench.breaker.retry_in_s(READ) == 2.0


def test_a_probe_that_was_not_sent_leaves_room_for_another(bench: Bench) -> None:
    bench.bad(5)
    bench.clock.advance(1.0)
    bench.breaker.unused(bench.admit())
    assert bench.breaker.probe_due(READ)
    bench.good(3)
    assert bench.breaker.state(READ) is CLOSED


def test_it_opens_when_most_requests_are_far_slower_than_usual(bench: Bench) -> None:
    bench.good(200, latency_s=0.05)
    bench.good(7, latency_s=1.5)
    assert bench.breaker.state(READ) is CLOSED  # outliers
    bench.good(2, latency_s=1.5)
    assert bench.breaker.state(READ) is OPEN
    bench.clock.advance(1.0)
    bench.good(latency_s=1.5)  # still slow
    assert bench.breaker.state(READ) is OPEN
    bench.clock.advance(2.0)
    bench.good(3, latency_s=0.05)
    assert bench.breaker.state(READ) is CLOSED


def test_slow_in_proportion_but_quick_in_seconds_is_no_trouble(bench: Bench) -> None:
    bench.good(200, latency_s=0.0001)
    bench.good(200, latency_s=0.4)
    assert bench.seen == []


def test_a_drive_that_has_always_been_slow_is_what_it_is(bench: Bench) -> None:
    bench.good(1000, latency_s=3.0)
    assert bench.seen == []


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, Fault.FULL),
        (errno.EDQUOT, Fault.FULL),
        (errno.EROFS, Fault.READ_ONLY),
        (errno.EIO, Fault.MEDIA),
        (errno.ENODATA, Fault.MEDIA),
        (errno.EILSEQ, Fault.MEDIA),
        (errno.ENODEV, Fault.DEVICE),
        (errno.ETIMEDOUT, Fault.DEVICE),
    ],
)
def test_errors_have_kinds(number: int, fault: Fault) -> None:
    assert fault_of(OSError(number, "x")) is fault
    assert fault_of(None) is Fault.MEDIA


@settings(max_examples=50)
@given(
    st.floats(1e-6, 30.0),
    st.lists(st.tuples(st.floats(1.0, 10.0), st.sampled_from(Side), st.floats(0.0, 100.0)), max_size=500),
    st.integers(1, 3),
)
def test_a_good_history_never_opens_it(least_s: float, history: list[tuple[float, Side, float]], times: int) -> None:
    bench = Bench()
    for spread, side, pause_s in history * times:
        bench.clock.advance(pause_s)
        bench.good(side=side, latency_s=least_s * spread)
    assert bench.seen == []


class BreakerMachine(RuleBasedStateMachine):
    """Anything may happen, in any order: results, hangs, lost tickets, time."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.tickets: list[tuple[Ticket, bool]] = []  # and whether it was a probe

    @rule(side=st.sampled_from(Side))
    def ask(self, side: Side) -> None:
        breaker = self.bench.breaker
        allowed = breaker.allows_reads() if side is READ else breaker.allows_writes()
        ticket = breaker.admit(side)
        assert (ticket is not None) == allowed
        if ticket is not None:
            self.tickets.append((ticket, breaker.state(side) is HALF_OPEN))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), end=st.sampled_from(["good", "slow", "hung", "unused", *Fault]))
    def end(self, data: st.DataObject, end: str | Fault) -> None:
        ticket, _ = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        breaker = self.bench.breaker
        match end:
            case "good":
                breaker.succeeded(ticket, 0.001)
            case "slow":
                breaker.succeeded(ticket, 2.0)
            case "hung":
                breaker.hung(ticket)
            case "unused":
                breaker.unused(ticket)
            case Fault():
                breaker.failed(ticket, end)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @invariant()
    def at_most_one_probe_is_out(self) -> None:
        for side in Side:
            current = [
                ticket
                for ticket, probe in self.tickets
                if probe and ticket.side is side and ticket.epoch == self.bench.breaker._circuits[side]._epoch
            ]
            assert len(current) <= 1
            if current and self.bench.breaker.state(side) is HALF_OPEN:
                hung = self.bench.clock.monotonic_s() - current[0].admitted_s >= HANG_S
                assert hung or not self.bench.breaker._circuits[side].allows()

    @invariant()
    def open_times_are_bounded(self) -> None:
        assert all(self.bench.breaker.retry_in_s(side) <= module.MAX_OPEN_S for side in Side)

    @invariant()
    def transitions_are_a_chain(self) -> None:
        for side in Side:
            states = [CLOSED]
            for one in self.bench.seen:
                if one.side is side:
                    assert (one.before, one.before != one.after) == (states[-1], True)
                    assert (one.open_s > 0) == (one.after is OPEN)
                    states.append(one.after)
            assert states[-1] is self.bench.breaker.state(side)

    def teardown(self) -> None:
        """Whatever has happened: once all probes are good, it closes."""
        self.bench.clock.advance(module.MAX_OPEN_S)
        for side in (READ, WRITE):  # an outstanding probe is found to hang, and opens the circuit once more
            self.bench.breaker.allows_reads()
            self.bench.breaker.allows_writes()
            self.bench.clock.advance(module.MAX_OPEN_S)
            for _ in range(module.PROBES):
                ticket = self.bench.breaker.admit(side)
                assert ticket is not None
                self.bench.breaker.succeeded(ticket, 0.001)
            assert self.bench.breaker.state(side) is CLOSED


BreakerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestBreakerMachine = BreakerMachine.TestCase
