"""What leaves the ledger: blocks that are invalid, dropped, or nowhere any more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvterrace.engine.attention import Scored
from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, Ids, Verdict
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.engine.ssd_order import SsdOrder
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
        sizes: SlotSizes,
        below: CopiesBelow,
        *,
        scored: dict[int, Scored],
    ) -> None:
        """`scored` has no entry for a run that is forgotten."""
        self._table = table
        self._tree = tree
        self._dram = dram
        self._dirty = dirty
        self._sizes = sizes
        self._scored = scored
        self._below = below
        #: Blocks that were invalidated while in use: given up at the last release.
        self.doomed: set[int] = set()
        #: Blocks that were given up though nobody asked for it.
        self.dropped_blocks = 0
        #: Of the tier below, where it has one.
        self.ssd_order: SsdOrder | None = None

    def are_doomed(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether it was invalidated and only waits for its users to end."""
        if not self.doomed:
            return np.zeros(len(ids), np.bool_)
        found: npt.NDArray[np.bool_] = np.isin(ids, list(self.doomed))
        return found

    def let_go(self, ids: Ids) -> None:
        """One use of each of these blocks, no two of them the same, has ended."""
        table = self._table
        users = table.users[ids] - 1
        assert (users >= 0).all(), "a block was let go more often than held"
        table.users[ids] = users
        rest = ids[users == 0]
        if not self.doomed:
            rest = rest[(table.slot[rest] == NOWHERE) & (table.segment[rest] == NOWHERE)]
        for block in rest.tolist():
            if table.run[block] != NOWHERE:  # not pruned together with one behind it
                self.tidy(block)

    def tidy(self, block: int) -> None:
        """Nobody uses the block any more, or nobody pins it: what waited for that is done now."""
        table = self._table
        if self.doomed and block in self.doomed and not table.pins[block] and not table.users[block]:
            self.doomed.discard(block)
            self._drop_copies(np.array([block], np.int32))
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
        self._drop_copies(np.array([block], np.int32))
        self._prune(self._tree.run_of(block))

    def forget(self, block: int) -> None:
        """Drop a block and all that hangs on it, except what is in use or pinned."""
        run = self._tree.run_of(block)
        self._forget(run, int(np.flatnonzero(run.ids == block)[0]))

    def leave_gap(self, block: int) -> None:
        """Drop an idle block. What hangs on it stays, and is found again once the block was put again."""
        self.dropped_blocks += self._drop_copies(np.array([block], np.int32))
        self._prune(self._tree.run_of(block))

    def drop_all(self, ids: Ids) -> Ids:
        """Drop those of these idle blocks on which nothing hangs but others of them; the rest is returned, in order."""
        table, tree = self._table, self._tree
        numbers, counts = table.by_run(ids)
        runs = [(tree.run(number), count) for number, count in zip(numbers, counts, strict=True)]
        runs.sort(key=lambda one: -one[0].depth)  # what hangs on a run before the run
        table.marked[ids] = True
        going: list[Ids] = []
        whole: set[int] = set()
        cut: list[tuple[Run, int]] = []
        for run, count in runs:
            tail = run.ids[len(run) - count :]
            if table.marked[tail].all() and all(child.number in whole for child in run.children):
                going.append(tail)
                cut.append((run, len(run) - count))
                if count == len(run):
                    whole.add(run.number)
        if going:
            gone = going[0] if len(going) == 1 else np.concatenate(going)
            table.marked[gone] = False
            self.dropped_blocks += self._drop_copies(gone)
            self._cut(cut, gone)
        rest = ids[table.marked[ids]]
        table.marked[rest] = False
        return rest

    def cut(self, run: Run, count: int) -> None:
        """Forget the last blocks of a run, which are new and have no copies."""
        keep = len(run) - count
        self._cut([(run, keep)], run.ids[keep:].copy())

    def _cut(self, runs: list[tuple[Run, int]], gone: Ids) -> None:
        """Forget `gone`: of each run what is behind its first so many blocks. What hangs on a run comes before it."""
        ends: list[Run] = []
        for run, keep in runs:
            if keep:
                ends.append(run)
            elif run.parent is not None:
                ends.append(run.parent)
            self._tree.trim(run, keep)
            if not keep:
                self._scored.pop(run.number, None)
        self._release(gone)
        lasts = np.array([int(run.ids[-1]) if len(run) else NOWHERE for run in ends], np.int32)
        loose = (lasts != NOWHERE) & (self._table.slot[lasts] == NOWHERE) & (self._table.segment[lasts] == NOWHERE)
        for at in np.flatnonzero(loose).tolist():
            self._prune(ends[at])

    def _release(self, ids: Ids) -> None:
        self.doomed.difference_update(ids.tolist() if self.doomed else ())
        self._dram.gone(ids)
        if self.ssd_order is not None:
            self.ssd_order.gone(ids)
        self._table.release(ids)

    def _forget(self, run: Run, at: int, *, dropping: bool = True) -> None:
        """Give up the blocks of `run` from `at` on and all that hangs on them, except what is in use or pinned."""
        below = self._tree.below(run)
        lost = [run.ids[at:][::-1], *(child.ids[::-1] for child in below)]
        for ids in lost:
            free = (self._table.users[ids] == 0) & (self._table.pins[ids] == 0)
            dropped = self._drop_copies(ids[free])
            self.dropped_blocks += dropped if dropping else 0
        for child in reversed(below):
            self._prune(child)
        self._prune(run)

    def _drop_copies(self, ids: Ids) -> int:
        """Give up every copy of these blocks; of how many there was one."""
        table = self._table
        slot, below = table.slot[ids] != NOWHERE, table.segment[ids] != NOWHERE
        dirty = ids[self._dirty.are(ids)]
        if len(dirty):
            self._dirty.remove(dirty)
        if below.any():
            self._below.lose_all(ids[below])
        if slot.any():
            self._dram.free(ids[slot])
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
                self._scored.pop(at.number, None)
            self._release(self._tree.trim(at, len(at) - gone))
            if not whole:
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
