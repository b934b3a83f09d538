"""What leaves the ledger: blocks that are invalid, dropped, or nowhere any more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvterrace.engine.attention import Scored
from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Verdict
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.tree import Run, RunTree
from kvterrace.keys import KEY_NBYTES, KeyChain

__all__ = ["GivingUp"]


class GivingUp:
    """Gives blocks up, at once or when their last user ends. Not thread-safe: the ledger's owner serialises."""

    def __init__(
        self,
        table: BlockTable,
        tree: RunTree,
        dram: DramSpace,
        dirty: DirtyRuns,
        slot_nbytes: dict[int, int],
        below: CopiesBelow,
        *,
        scored: dict[int, Scored],
    ) -> None:
        """
        Args:
            slot_nbytes: size of a slot by namespace.
            scored: has no entry for a run that is forgotten.
        """
        self._table = table
        self._tree = tree
        self._dram = dram
        self._dirty = dirty
        self._slot_nbytes = slot_nbytes
        self._scored = scored
        self._below = below
        #: Blocks that were invalidated while in use: given up at the last release.
        self.doomed: set[int] = set()
        #: Blocks that were given up though nobody asked for it.
        self.dropped_blocks = 0

    def are_doomed(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether it was invalidated and only waits for its users to end."""
        if not self.doomed:
            return np.zeros(len(ids), np.bool_)
        found: npt.NDArray[np.bool_] = np.isin(ids, list(self.doomed))
        return found

    def tidy(self, block: int) -> None:
        """Nobody uses the block any more, or nobody pins it: what waited for that is done now."""
        table = self._table
        if self.doomed and block in self.doomed and not table.pins[block] and not table.users[block]:
            self.doomed.discard(block)
            run = self._tree.run_of(block)
            self._drop_copies(np.array([block], np.int32), self._slot_nbytes[run.namespace])
            self._dirty.settle(run)
        if table.slot[block] == NOWHERE and table.segment[block] == NOWHERE:
            self._prune(self._tree.run_of(block))

    def invalidate(self, chain: KeyChain, start: int) -> list[bytes]:
        """Give up the blocks of `chain` from `start` on, and all that hangs on them; those in use as soon as they are
        let go.

        Returns their keys, also of those that the index does not know: a record that it has let go of may still lie in
        a segment, and must not come back with a restart.
        """
        steps = self._tree.walk(chain)
        at = 0
        keys: list[bytes] = []
        for run, count in steps:
            if at + count > start:
                cut = max(0, start - at)
                ids = np.concatenate([run.ids[cut:], *(child.ids for child in self._tree.below(run))])
                data = self._table.key[ids].tobytes()
                keys = [data[at : at + KEY_NBYTES] for at in range(0, len(data), KEY_NBYTES)]
                self.doomed.update(ids[(self._table.users[ids] > 0) | (self._table.pins[ids] > 0)].tolist())
                self._forget(run, cut, dropping=False)
                break
            at += count
        known = sum(count for _, count in steps)
        return keys + [chain.key(index) for index in range(max(start, known), len(chain))]

    def revoke(self, block: int) -> None:
        """Give up every copy of a block, and of no other; one in use or pinned as soon as it is let go."""
        if self._table.users[block] or self._table.pins[block]:
            self.doomed.add(block)
            return
        run = self._tree.run_of(block)
        self._drop_copies(np.array([block], np.int32), self._slot_nbytes[run.namespace])
        self._dirty.settle(run)
        self._prune(run)

    def forget(self, block: int) -> None:
        """Drop a block and all that hangs on it, except what is in use or pinned."""
        run = self._tree.run_of(block)
        self._forget(run, int(np.flatnonzero(run.ids == block)[0]))

    def leave_gap(self, block: int) -> None:
        """Drop an idle block. What hangs on it stays, and is found again once the block was put again."""
        run = self._tree.run_of(block)
        self.dropped_blocks += self._drop_copies(np.array([block], np.int32), self._slot_nbytes[run.namespace])
        self._dirty.settle(run)
        self._prune(run)

    def _forget(self, run: Run, at: int, *, dropping: bool = True) -> None:
        """Give up the blocks of `run` from `at` on and all that hangs on them, except what is in use or pinned."""
        below = self._tree.below(run)
        lost = [run.ids[at:][::-1], *(child.ids[::-1] for child in below)]
        for ids in lost:
            free = (self._table.users[ids] == 0) & (self._table.pins[ids] == 0)
            dropped = self._drop_copies(ids[free], self._slot_nbytes[run.namespace])
            self.dropped_blocks += dropped if dropping else 0
        for one in (run, *below):
            self._dirty.settle(one)
        for child in reversed(below):
            self._prune(child)
        self._prune(run)

    def _drop_copies(self, ids: Ids, record_nbytes: int) -> int:
        """Give up every copy of blocks of one namespace; of how many there was one."""
        table = self._table
        slot, below = table.slot[ids] != NOWHERE, table.segment[ids] != NOWHERE
        dirty = (table.state[ids] == DramState.READY) & ~below & ~table.spent[ids]
        self._dirty.nbytes -= record_nbytes * int(np.count_nonzero(dirty))
        if below.any():
            self._below.lose_all(ids[below], record_nbytes)
        if slot.any():
            self._dram.free_all(ids[slot])
        table.spent[ids] = False
        table.verdict[ids] = Verdict.NONE
        return int(np.count_nonzero(slot | below))

    def _prune(self, run: Run) -> None:
        """Forget blocks without a copy at the end of `run`, and of what it hangs on, where nothing hangs on them."""
        at: Run | None = run
        while at is not None and len(at) and not at.children:
            gone = self._loose(at.ids)
            if not gone:
                return
            parent, whole = at.parent, gone == len(at)
            if whole:
                self._dirty.since_s.pop(at.number, None)
                self._scored.pop(at.number, None)
            freed = self._tree.trim(at, len(at) - gone)
            self.doomed.difference_update(freed.tolist())
            self._table.release(freed)
            if not whole:
                self._dirty.settle(at)
                return
            at = parent

    def _loose(self, ids: Ids) -> int:
        """How many of `ids`, from the last on, have no copy and are in nobody's use. Looks at few more than these."""
        table, gone, width = self._table, 0, 16
        while gone < len(ids):
            some = ids[max(0, len(ids) - gone - width) : len(ids) - gone]
            kept = (table.slot[some] != NOWHERE) | (table.segment[some] != NOWHERE)
            kept |= (table.users[some] > 0) | (table.pins[some] > 0)
            if kept.any():
                return gone + int(np.argmax(kept[::-1]))
            gone, width = gone + len(some), 4 * width
        return gone
