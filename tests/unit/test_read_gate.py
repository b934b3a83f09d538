"""Reads given up at their deadline, as the gate of a drive sees them."""

from __future__ import annotations

from kvterrace.clock import ManualClock
from kvterrace.engine.gate import ReadGate
from kvterrace.health.breaker import HANG_S, BreakerState, Side
from kvterrace.io import IoClass, IoKind, IoRequest, IoResult


def given_up(gate: ReadGate, clock: ManualClock, after_s: float) -> None:
    request = IoRequest(IoKind.READ, IoClass.DEMAND)
    assert gate.admit(request)
    clock.advance(after_s)
    gate.watch(clock.monotonic_s())
    gate.ended(IoResult(request, expired=True))


def answered(gate: ReadGate) -> None:
    request = IoRequest(IoKind.READ, IoClass.DEMAND)
    assert gate.admit(request)
    gate.ended(IoResult(request))


def test_reads_given_up_one_after_the_other_add_up_to_a_hang() -> None:
    clock = ManualClock()
    gate = ReadGate(clock, "drive")
    for _ in range(9):
        given_up(gate, clock, HANG_S / 10)
        clock.advance(100.0)  # nobody asks: that says nothing
    assert gate.breaker.state(Side.READ) is BreakerState.CLOSED
    given_up(gate, clock, HANG_S / 10)
    assert gate.breaker.state(Side.READ) is BreakerState.OPEN


def test_an_answer_ends_the_silence() -> None:
    clock = ManualClock()
    gate = ReadGate(clock, "drive")
    for _ in range(40):
        given_up(gate, clock, HANG_S * 0.4)
        given_up(gate, clock, HANG_S * 0.4)
        answered(gate)
    assert gate.breaker.state(Side.READ) is BreakerState.CLOSED
