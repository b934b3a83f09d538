"""What every I/O engine and every ladder must do, as suites to subclass. See docs/guide/testing-a-tier.md."""

from __future__ import annotations

from kvterrace.testing.engine_suite import EngineConformance
from kvterrace.testing.ladder_suite import LadderConformance

__all__ = ["EngineConformance", "LadderConformance"]
