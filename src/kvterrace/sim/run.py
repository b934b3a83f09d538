"""One replay with what went into it."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.sim.columns import TraceColumns
from kvterrace.sim.outcome import Outcome, Saving
from kvterrace.sim.sizes import LadderSize

__all__ = ["Run"]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A trace, a ladder, a policy, and what came of it. `elapsed_s`: how long the replay took."""

    trace: TraceColumns
    ladder: LadderSize
    outcome: Outcome
    saving: Saving
    elapsed_s: float
