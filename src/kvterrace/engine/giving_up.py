"""What leaves the ledger: blocks that are invalid, dropped, or nowhere any more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.tree import Run, RunTree
from kvterrace.keys import KeyChain

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
        *,
        scored_s: dict[int, float],
        lose: Callable[[int], None],
    ) -> None:
        """
        Args:
            slot_nbytes: size of a slot by namespace.
            scored_s: has no entry for a run that is forgotten.
            lose: gives up the copy below of a block.
        """
        self._table = table
        self._tree = tree
        self._dram = dram
        self._dirty = dirty
        self._slot_nbytes = slot_nbytes
        self._scored_s = scored_s
        self._lose = lose
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
            self._drop_copies(block)
            self._dirty.settle(self._run_of(block))
        if table.slot[block] == NOWHERE and table.segment[block] == NOWHERE:
            self._prune(self._run_of(block))

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
                keys = [bytes(self._table.key[block]) for block in ids.tolist()]
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
        run = self._run_of(block)
        self._drop_copies(block)
        self._dirty.settle(run)
        self._prune(run)

    def forget(self, block: int) -> None:
        """Drop a block and all that hangs on it, except what is in use or pinned."""
        run = self._run_of(block)
        self._forget(run, int(np.flatnonzero(run.ids == block)[0]))

    def _forget(self, run: Run, at: int, *, dropping: bool = True) -> None:
        """Give up the blocks of `run` from `at` on and all that hangs on them, except what is in use or pinned."""
        below = self._tree.below(run)
        lost = [run.ids[at:][::-1], *(child.ids[::-1] for child in below)]
        for ids in lost:
            free = (self._table.users[ids] == 0) & (self._table.pins[ids] == 0)
            for block in ids[free].tolist():
                self.dropped_blocks += self._drop_copies(block) and dropping
        for one in (run, *below):
            self._dirty.settle(one)
        for child in reversed(below):
            self._prune(child)
        self._prune(run)

    def _drop_copies(self, block: int) -> bool:
        """Give up every copy of a block; whether there was one."""
        table = self._table
        had = bool(table.slot[block] != NOWHERE or table.segment[block] != NOWHERE)
        dirty = table.state[block] == DramState.READY and table.segment[block] == NOWHERE
        if dirty and not table.spent[block]:
            self._dirty.nbytes -= self._slot_nbytes[self._run_of(block).namespace]
        if table.segment[block] != NOWHERE:
            self._lose(block)
        if table.slot[block] != NOWHERE:
            self._dram.free(block)
        table.spent[block] = False
        return had

    def _prune(self, run: Run) -> None:
        """Forget blocks without a copy at the end of `run`, and of what it hangs on, where nothing hangs on them."""
        table = self._table
        at: Run | None = run
        while at is not None and len(at) and not at.children:
            ids = at.ids[::-1]
            kept = (
                (table.slot[ids] != NOWHERE)
                | (table.segment[ids] != NOWHERE)
                | (table.users[ids] > 0)
                | (table.pins[ids] > 0)
            )
            gone = len(ids) if not kept.any() else int(np.argmax(kept))
            if not gone:
                return
            parent, whole = at.parent, gone == len(ids)
            if whole:
                self._dirty.since_s.pop(at.number, None)
                self._scored_s.pop(at.number, None)
            freed = self._tree.trim(at, len(ids) - gone)
            self.doomed.difference_update(freed.tolist())
            self._table.release(freed)
            if not whole:
                self._dirty.settle(at)
                return
            at = parent

    def _run_of(self, block: int) -> Run:
        return self._tree.run(int(self._table.run[block]))
