"""The shipped conformance suite, run against the engines of the extension module, on a disk and in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from kvterrace.io import IoEngine
from kvterrace.io.native import NativePosixEngine, UringEngine
from kvterrace.io.probe import why_not_uring
from kvterrace.testing.conformance import EngineConformance
from kvterrace.testing.faults import FaultyEngine

needs_uring = pytest.mark.skipif(why_not_uring() is not None, reason=f"no io_uring here: {why_not_uring()}")
_SHM = Path("/dev/shm")
needs_shm = pytest.mark.skipif(not os.access(_SHM, os.W_OK), reason="no /dev/shm to write to")


class _InMemory(EngineConformance):
    def setup_method(self) -> None:
        super().setup_method()
        self._temporary.cleanup()
        self._temporary = tempfile.TemporaryDirectory(prefix="kvterrace-", dir=_SHM)
        self.folder = Path(self._temporary.name)


@needs_uring
class TestUringEngine(EngineConformance):
    def make_engine(self) -> IoEngine:
        return UringEngine()

    def make_serial_engine(self) -> IoEngine:
        return UringEngine(workers=1)


@needs_uring
class TestUringEngineOfDepthOne(EngineConformance):
    def make_engine(self) -> IoEngine:
        return UringEngine(depth=1, workers=1)


@needs_uring
@needs_shm
class TestUringEngineInMemory(_InMemory):
    def make_engine(self) -> IoEngine:
        return UringEngine()


class TestNativePosixEngine(EngineConformance):
    def make_engine(self) -> IoEngine:
        return NativePosixEngine()

    def make_serial_engine(self) -> IoEngine:
        return NativePosixEngine(workers=1)


class TestNativePosixEngineOfOneThread(EngineConformance):
    def make_engine(self) -> IoEngine:
        return NativePosixEngine(threads=1, workers=1)


@needs_shm
class TestNativePosixEngineInMemory(_InMemory):
    def make_engine(self) -> IoEngine:
        return NativePosixEngine()


@needs_uring
class TestFaultyUringEngineWithoutFaults(EngineConformance):
    def make_engine(self) -> IoEngine:
        return FaultyEngine(UringEngine())

    def make_serial_engine(self) -> IoEngine:
        return FaultyEngine(UringEngine(workers=1))
