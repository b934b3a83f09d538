"""The shipped conformance suite of ladders, on real files by way of the extension module's engines."""

from __future__ import annotations

import pytest

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from tests.unit import test_ladder_contract as ladders

from kvterrace.clock import Clock, SystemClock
from kvterrace.io import IoEngine
from kvterrace.io.native import NativePosixEngine, UringEngine
from kvterrace.io.probe import why_not_uring


@pytest.mark.skipif(why_not_uring() is not None, reason=f"no io_uring here: {why_not_uring()}")
class TestSsdByUring(ladders.TestSsdOnFiles):
    def engine(self) -> tuple[IoEngine, Clock]:
        return UringEngine(), SystemClock()


class TestSsdByNativeThreads(ladders.TestSsdOnFiles):
    def engine(self) -> tuple[IoEngine, Clock]:
        return NativePosixEngine(), SystemClock()
