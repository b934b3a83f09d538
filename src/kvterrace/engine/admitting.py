"""Which idle blocks are written to the SSD at all: the ledger's side of `policy.admission`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Verdict
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.hints import TURN_S, Hints
from kvterrace.engine.tree import Run, RunTree
from kvterrace.policy.admission import Admission, History
from kvterrace.types import Hint

__all__ = ["Admitting"]

#: Sequences of which a client said this are written while there is a drive that takes writes.
_ALWAYS = frozenset({Hint.SHARED, Hint.PRIORITY, Hint.RETURNS})


class Admitting:
    """Judges what waits to be written, once, when it is its turn. Not thread-safe: the ledger's owner serialises.

    What is refused stays in DRAM as long as its room is not wanted, then it is dropped. If it is asked for again before
    that, it is judged again, as something that was used in two turns. A prefix is judged before what hangs on it, and
    where it is refused, so is that.
    """

    def __init__(
        self,
        table: BlockTable,
        tree: RunTree,
        dirty: DirtyRuns,
        below: CopiesBelow,
        hints: Hints,
        admission: Admission,
    ) -> None:
        self._table = table
        self._tree = tree
        self._dirty = dirty
        self._below = below
        self._hints = hints
        self.admission = admission
        #: Blocks that were not worth a write; one that is judged twice counts twice.
        self.refused_blocks = 0

    @property
    def _choosy(self) -> bool:
        return self.admission.budget is not None

    def wanted(self, ids: Ids, now_s: float) -> None:
        """A request asks for these blocks, which the index knows; before they count as used."""
        table = self._table
        if self._choosy:
            cold = ids[(table.state[ids] == DramState.EMPTY) & (table.segment[ids] != NOWHERE)]
            if len(cold):
                self.admission.asked(self._keys(cold))
        again = ids[now_s - self._tree.used_s[table.run[ids]] >= TURN_S]
        table.seen[again] = True
        self._reconsider(again[table.verdict[again] == Verdict.REFUSED], now_s)

    def came(self, ids: Ids) -> None:
        """New blocks of one chain, in order; some may have been here before."""
        if not self._choosy:
            return
        keys = self._keys(ids)
        known = np.flatnonzero(self.admission.seen(keys))
        if len(known):
            last = int(ids[known[-1]])  # a key stands for all that is before it, too
            run = self._tree.run_of(last)
            self._table.seen[run.ids[: int(np.flatnonzero(run.ids == last)[0]) + 1]] = True
            self.admission.asked(keys)

    def judge(self, run: Run, now_s: float) -> None:
        """It is the turn of `run` to be written, behind what waits of the runs that it hangs on."""
        for one in reversed(self._tree.lineage(run)):
            if one.number in self._dirty.since_s:
                self._judge(one, now_s)

    def spend(self, nbytes: int, now_s: float) -> None:
        """So much is written."""
        if self.admission.budget is not None:
            self.admission.budget.spend(nbytes, now_s)

    def _judge(self, run: Run, now_s: float) -> None:
        table = self._table
        waiting = self._dirty.waiting(run)
        waiting = waiting[table.verdict[waiting] == Verdict.NONE]
        if not len(waiting):
            return
        hint = self._hints.of(run.sequence, now_s) if len(self._hints) else None
        shared = any(child.sequence != run.sequence for child in run.children)
        if hint in _ALWAYS:
            for one in self._tree.lineage(run):
                self._reconsider(one.ids[table.verdict[one.ids] == Verdict.REFUSED], now_s)
                table.verdict[self._dirty.waiting(one)] = Verdict.ADMITTED
        elif (hint is not None and not shared) or self._hangs_on_refused(run, waiting):
            self._refuse(waiting)
        elif not self.admission.is_short(now_s):
            table.verdict[waiting] = Verdict.ADMITTED
        else:
            self._choose(run, waiting, now_s)

    def _choose(self, run: Run, waiting: Ids, now_s: float) -> None:
        """Judge by history: what was seen before, then the rest. Where one is refused, so is what is behind it. What
        two others hang on was used by both.
        """
        table = self._table
        seen = len(waiting) if len(run.children) > 1 else int(np.argmin(np.append(table.seen[waiting], False)))
        begins = int(np.flatnonzero(run.ids == waiting[0])[0]) + run.depth
        goes_on = begins + seen >= len(waiting) - seen
        new = History.GOES_ON if goes_on else History.NEW
        for start, stop, history in ((0, seen, History.SEEN), (seen, len(waiting), new)):
            if start == stop:
                continue
            self.admission.judged(self._keys(waiting[start:stop]), history)
            if not self.admission.admits(history, now_s):
                self._refuse(waiting[start:])
                return
            table.verdict[waiting[start:stop]] = Verdict.ADMITTED

    def _hangs_on_refused(self, run: Run, waiting: Ids) -> bool:
        table = self._table
        at = int(np.flatnonzero(run.ids == waiting[0])[0])
        above = [run.ids[:at], *(one.ids for one in self._tree.lineage(run)[1:])]
        return any(bool((table.verdict[ids] == Verdict.REFUSED).any()) for ids in above)

    def _refuse(self, ids: Ids) -> None:
        self._dirty.remove(ids)
        self._table.verdict[ids] = Verdict.REFUSED
        self._table.spent[ids] = True
        self.refused_blocks += len(ids)

    def _reconsider(self, ids: Ids, now_s: float) -> None:
        """Refused blocks are to be judged again."""
        table = self._table
        table.verdict[ids] = Verdict.NONE
        spent = ids[table.spent[ids]]
        table.spent[spent] = False
        self._below.owe(spent, now_s)

    def _keys(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each block's key."""
        return self._table.words[ids]
