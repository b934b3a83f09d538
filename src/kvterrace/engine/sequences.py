"""Which runs belong to a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvterrace.engine.tree import Run

__all__ = ["SequenceRuns"]


class SequenceRuns:
    """Runs by the sequence that put them. Runs of no named sequence are not listed. Bounded by the runs there are."""

    def __init__(self) -> None:
        self._runs: dict[bytes, Run | set[Run]] = {}  # a set only for several: of most sequences there is one

    def add(self, run: Run) -> None:
        """`run` is new."""
        if not any(run.sequence):
            return
        known = self._runs.get(run.sequence)
        if known is None:
            self._runs[run.sequence] = run
        elif isinstance(known, set):
            known.add(run)
        else:
            self._runs[run.sequence] = {known, run}

    def remove(self, run: Run) -> None:
        """`run` is no more."""
        known = self._runs.get(run.sequence)
        if known is run:
            del self._runs[run.sequence]
        elif isinstance(known, set):
            known.remove(run)
            if len(known) == 1:
                self._runs[run.sequence] = known.pop()

    def of(self, sequence: bytes) -> list[Run]:
        """The runs of a sequence, those deepest in their chains first."""
        known = self._runs.get(sequence)
        if known is None:
            return []
        return sorted(known, key=lambda run: (-run.depth, run.number)) if isinstance(known, set) else [known]
