"""The write budget of a partition over its restarts: read at open, written down now and then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from kvterrace.clock import Clock
from kvterrace.io.base import IoClass, IoEngine, IoKind, IoRequest, IoResult
from kvterrace.policy.admission import DAY_S, WriteBudget
from kvterrace.tiers.budget import BudgetFile

__all__ = ["BudgetKeeper", "recover_budget"]

_log = logging.getLogger(__name__)

#: What is left is written down again once it differs by this share of a day's budget: more than that, and what is in
#: flight, no crash gives back.
_STEP, _LEAST_STEP_NBYTES = 1 / 256, 4096


def recover_budget(files: Sequence[BudgetFile], daily_nbytes: int, clock: Clock) -> WriteBudget:
    """The budget as an earlier life left it, with what the time since has added; all of it where none is known. Of
    several drives the one that says least counts. Blocks.
    """
    found = []
    for file in files:
        said = file.read()
        if said is not None:
            left_nbytes, unix_s, daily = said
            since_s = min(max(0.0, clock.unix_s() - unix_s), DAY_S)
            found.append(left_nbytes + since_s / DAY_S * daily)
    return WriteBudget(daily_nbytes, left_nbytes=min(found) if found else None)


class BudgetKeeper:
    """Writes down what is left, on a thread of each drive's engine. Used under the store's lock."""

    def __init__(self, budget: WriteBudget, places: Sequence[tuple[BudgetFile, IoEngine]], clock: Clock) -> None:
        self._budget = budget
        self._places = places
        self._clock = clock
        self._written_nbytes: float | None = None
        self._writing = 0
        self._warned = False

    def pump(self, now_s: float) -> None:
        """Write down what is left, if that is worth it by now."""
        left_nbytes = self._budget.left_nbytes(now_s)
        step_nbytes = max(_STEP * self._budget.daily_nbytes, _LEAST_STEP_NBYTES)
        if self._written_nbytes is None or abs(left_nbytes - self._written_nbytes) >= step_nbytes:
            self.save(now_s)

    def save(self, now_s: float) -> None:
        """Write down what is left, unless that is under way."""
        if self._writing:
            return
        left_nbytes = self._budget.left_nbytes(now_s)
        self._written_nbytes = left_nbytes
        fields = int(left_nbytes), self._clock.unix_s(), int(self._budget.daily_nbytes)
        for file, engine in self._places:
            self._writing += 1
            call = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=partial(_write, file, *fields), tag=self._on_result)
            engine.submit([call])

    @property
    def busy(self) -> bool:
        """Whether it is being written."""
        return self._writing > 0

    def _on_result(self, result: IoResult) -> None:
        self._writing -= 1
        if result.crash is not None and not self._warned:
            self._warned = True
            _log.warning("the write budget cannot be written down, and begins anew with a restart: %r", result.crash)


def _write(file: BudgetFile, left_nbytes: int, unix_s: float, daily_nbytes: int, _: IoResult) -> None:
    file.write(left_nbytes, unix_s, daily_nbytes)
