"""The shipped conformance suite, run against each of our own engines."""

from __future__ import annotations

from kvterrace.clock import ManualClock
from kvterrace.io import IoEngine, PosixEngine
from kvterrace.io.fake import FakeDevice
from kvterrace.testing.conformance import EngineConformance
from kvterrace.testing.faults import FaultyEngine


class TestPosixEngine(EngineConformance):
    def make_engine(self) -> IoEngine:
        return PosixEngine(threads=4)

    def make_serial_engine(self) -> IoEngine:
        return PosixEngine(threads=1)


class TestPosixEngineOfOneThread(EngineConformance):
    def make_engine(self) -> IoEngine:
        return PosixEngine(threads=1)


class TestFakeDevice(EngineConformance):
    def make_engine(self) -> IoEngine:
        return FakeDevice(ManualClock())

    def make_serial_engine(self) -> IoEngine:
        return FakeDevice(ManualClock(), parallel=1)


class TestFaultyEngineWithoutFaults(EngineConformance):
    def make_engine(self) -> IoEngine:
        return FaultyEngine(PosixEngine(threads=4))

    def make_serial_engine(self) -> IoEngine:
        return FaultyEngine(PosixEngine(threads=1))


class TestFaultyFakeWithoutFaults(EngineConformance):
    def make_engine(self) -> IoEngine:
        clock = ManualClock()
        return FaultyEngine(FakeDevice(clock), clock=clock)
