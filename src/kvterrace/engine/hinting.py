"""What the ledger makes of hints: order of eviction in DRAM, age on the SSD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvterrace.engine.attention import Attention
from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, Ids
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.hints import HOLDS_S, Hints
from kvterrace.engine.tree import Run, RunTree, Step
from kvterrace.policy.eviction import EvictionPolicy, LruTailFirst, TakesHints
from kvterrace.types import Hint

__all__ = ["Hinting"]

#: For how long it is remembered when the run that is idle for longest was used.
_OLDEST_S = 60.0


class Hinting:
    """Applies hints to runs. Not thread-safe: the ledger's owner serialises.

    A policy that takes hints is told of them, and decides. Where DRAM's knows of uses alone, runs of a sequence that is
    over go next, tails first, and what is to stay is passed over. On the SSD, the former count as the oldest. A run
    that others hang on is not its sequence's own any more, and stays.
    """

    def __init__(
        self, table: BlockTable, tree: RunTree, dram: DramSpace, below: CopiesBelow, attention: Attention
    ) -> None:
        self.hints = Hints()
        self._table = table
        self._tree = tree
        self._dram = dram
        self._below = below
        self._attention = attention
        self._oldest = (float("-inf"), 0.0)  # when that was looked at, and what was found
        self._told: list[TakesHints] = []
        self.tell(dram.policy)
        self._orders = not self._told and isinstance(dram.policy, LruTailFirst)
        if self._orders:
            dram.spares = self._spared

    def tell(self, policy: EvictionPolicy) -> None:
        """Tell this policy of hints, too, if it takes any."""
        if isinstance(policy, TakesHints):
            self._told.append(policy)

    def now(self, now_s: float) -> None:
        """Time has passed."""
        self.hints.now(now_s)
        self._attention.now(now_s)

    def _spared(self, number: int) -> Ids:
        """What stays though it is the turn of run `number`, for a hint or its scores; head first."""
        run = self._tree.run(number)
        scored = bool(self._attention.runs) and self._attention.spares(number)
        if not scored and not (len(self.hints) and self.hints.spares(run.sequence)):
            return run.ids[:0]
        return np.concatenate([one.ids for one in reversed(self._tree.lineage(run))])

    def hint(self, sequence: bytes, kind: Hint, seconds: float | None, now_s: float) -> None:
        """Remember a hint, and apply it to what is there."""
        self.hints.give(sequence, kind, seconds, now_s)
        if self._told:
            for run in self._tree.sequences.of(sequence):
                if not any(child.sequence == sequence for child in run.children):  # where it ends, or each branch of it
                    key = int(self._table.words[run.ids[-1]])
                    for policy in self._told:
                        policy.hint(key, kind.value, HOLDS_S if seconds is None else seconds, now_s)
        if self.hints.goes(sequence, now_s):
            self._sink(sequence, now_s)
        else:
            self._lift(sequence, now_s)

    def used(self, steps: Sequence[Step], idle_s: float, now_s: float) -> None:
        """These runs were used, the last of them after it was idle for this long."""
        for run, _ in steps:
            self.hints.used(run.sequence, now_s)
        last = steps[-1][0].sequence
        self.hints.came_back(last, idle_s, now_s)
        if self.hints.goes(last, now_s):
            self._sink(last, now_s)

    def came(self, sequence: bytes, now_s: float) -> None:
        """Blocks of `sequence` are new."""
        if self.hints.goes(sequence, now_s):
            self._sink(sequence, now_s)

    def _sink(self, sequence: bytes, now_s: float) -> None:
        going: dict[int, Run] = {}
        for run in self._tree.sequences.of(sequence):
            if all(child.number in going for child in run.children):
                going[run.number] = run
        if not going:
            return
        if self._orders:
            ids = np.concatenate([run.ids[::-1] for run in going.values()])
            self._dram.let_go(ids[self._table.slot[ids] != NOWHERE])
        oldest_s = self._oldest_s(now_s)
        for run in going.values():
            self._date(run, min(oldest_s, float(self._tree.used_s[run.number])))

    def _lift(self, sequence: bytes, now_s: float) -> None:
        runs = {one.number: one for run in self._tree.sequences.of(sequence) for one in self._tree.lineage(run)}
        if not runs:
            return
        order = sorted(runs.values(), key=lambda run: (run.depth, run.number))
        if self._orders:
            ids = np.concatenate([run.ids for run in order])
            self._dram.enter(ids[self._table.slot[ids] != NOWHERE])
        for run in order:
            self._date(run, now_s)

    def _date(self, run: Run, used_s: float) -> None:
        """`run` counts as last used at `used_s`."""
        before_s = float(self._tree.used_s[run.number])
        for space, some in self._below.by_space(run.ids):
            space.touch(self._table, some, np.full(len(some), before_s), used_s)
        self._tree.used_s[run.number] = used_s

    def _oldest_s(self, now_s: float) -> float:
        """About when the run that is idle for longest was used."""
        looked_s, found_s = self._oldest
        if now_s - looked_s >= _OLDEST_S:
            numbers = self._table.run[self._table.run != NOWHERE]
            found_s = float(np.min(self._tree.used_s[numbers])) if len(numbers) else now_s
            self._oldest = now_s, found_s
        return found_s
