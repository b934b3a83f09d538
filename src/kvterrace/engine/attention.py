"""Decayed cumulative attention: which blocks are cold though their chain is in use, and which runs stay longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import BlockTable, Ids
from kvterrace.engine.tree import Run, RunTree, Step

__all__ = ["RECENT_TOKENS", "SCORE_HALF_LIFE_S", "SINK_TOKENS", "Attention", "Scored"]

#: A score halves in this time if nothing is added.
SCORE_HALF_LIFE_S = 60.0
#: The first tokens of a prompt draw attention whatever they say (sinks: StreamingLLM, Xiao et al. 2024, keeps four),
#: and the last ones are what the next token is about. Blocks with these are never cold.
SINK_TOKENS, RECENT_TOKENS = 4, 1024
#: A block is cold that has less than this share of what the blocks of its chain, but for sinks, have on average. Sums
#: over the tokens of a block are flat: in a recorded prompt of SmolLM2 the least attended tenth has less than this.
_COLD_SHARE = 0.7
#: What a new chain adds to the average over all.
_ALPHA = 0.05

Scores = npt.NDArray[np.float32]


@dataclass(slots=True)
class Scored:
    """Of one run: when its scores were brought up to date, their sums by layer group, and whether it was passed over
    since.
    """

    at_s: float
    groups: npt.NDArray[np.float64]
    passed: bool = False


class Attention:
    """Scores of blocks stand in the table's column; here is what is known of each run that was scored: about 250 B.

    Not thread-safe: the ledger's owner serialises. Where no score was ever given, nothing changes.
    """

    def __init__(self, table: BlockTable, tree: RunTree) -> None:
        self._table = table
        self._tree = tree
        #: By run number. Who forgets a run takes it out.
        self.runs: dict[int, Scored] = {}
        self._mean = 0.0  # of a block, over what was scored lately
        self._now_s = 0.0

    def add(self, steps: Sequence[Step], scores: Scores, block_tokens: int, now_s: float) -> Ids:
        """Add scores, shape `(groups, blocks)`, to the blocks of a chain that the index knows.

        Returns its blocks that are cold by now, the coldest first.
        """
        self._now_s = max(self._now_s, now_s)
        at = 0
        for run, count in steps:
            some = scores[:, at : at + count]
            known = self.runs.get(run.number)
            if known is None or len(known.groups) != len(scores):
                groups = np.zeros(len(scores)) if known is None else np.full(len(scores), known.groups.mean())
                known = self.runs[run.number] = Scored(known.at_s if known is not None else now_s, groups)
            fade = self._fade(known, now_s)
            self._table.score[run.ids] *= fade
            self._table.score[run.ids[:count]] += some.sum(axis=0)
            known.groups = known.groups * fade + some.sum(axis=1)
            known.at_s, known.passed = now_s, False
            at += count
        if not at:
            return np.zeros(0, np.int32)
        ids: Ids = np.concatenate([run.ids[:count] for run, count in steps])
        found = self._table.score[ids]
        mean = float(found.mean())
        self._mean = mean if not self._mean else (1 - _ALPHA) * self._mean + _ALPHA * mean
        sinks = -(-SINK_TOKENS // block_tokens)
        if at <= sinks:
            return ids[:0]
        cold = found < _COLD_SHARE * float(found[sinks:].mean())
        cold[:sinks] = False
        cold[max(0, scores.shape[1] - -(-RECENT_TOKENS // block_tokens)) :] = False
        order = np.argsort(found[cold], kind="stable")
        return ids[cold][order]

    def by_group(self, run: int, now_s: float) -> npt.NDArray[np.float64]:
        """What the blocks of a run have received, by layer group; empty where nothing is known."""
        known = self.runs.get(run)
        return np.zeros(0) if known is None else known.groups * self._fade(known, now_s)

    def spares(self, number: int) -> bool:
        """Whether run `number`, whose turn it is to go, is passed over: it has, decayed, more than an average block,
        and was not passed over since its last score. It was, after that.
        """
        known = self.runs.get(number)
        if known is None or known.passed:
            return False
        run = self._tree.run(number)
        mean = float(self._table.score[run.ids].mean()) * self._fade(known, self._now_s)
        known.passed = mean > self._mean
        return known.passed

    def now(self, now_s: float) -> None:
        """Time has passed."""
        self._now_s = max(self._now_s, now_s)

    def split(self, head: Run, tail: Run) -> None:
        """`tail` was cut off `head`: the sums are shared out by what their blocks have."""
        known = self.runs.get(head.number)
        if known is None:
            return
        mine, theirs = float(self._table.score[head.ids].sum()), float(self._table.score[tail.ids].sum())
        share = mine / (mine + theirs) if mine + theirs else 0.0
        self.runs[tail.number] = Scored(known.at_s, known.groups * (1 - share), known.passed)
        known.groups = known.groups * share

    def _fade(self, known: Scored, now_s: float) -> float:
        return float(0.5 ** ((now_s - known.at_s) / SCORE_HALF_LIFE_S))
