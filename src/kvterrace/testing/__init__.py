"""Shipped for third parties: what their engine or ladder must do (`conformance`), with what going wrong (`faults`), in
which order (`scheduler`). Needs no test framework; pytest collects the suites as they are. See
docs/guide/testing-a-tier.md.
"""

from __future__ import annotations

from kvterrace.testing.clock_jump import ClockJump
from kvterrace.testing.conformance import EngineConformance, LadderConformance
from kvterrace.testing.faults import FaultPlan, FaultyEngine
from kvterrace.testing.scheduler import Stepper

__all__ = ["ClockJump", "EngineConformance", "FaultPlan", "FaultyEngine", "LadderConformance", "Stepper"]
