"""Room in DRAM: who gets a slot, and who gives one up for it."""

from __future__ import annotations

import numpy as np

from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Verdict
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.giving_up import GivingUp
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.engine.tree import RunTree

__all__ = ["DramRoom"]

#: Plain: to compare what NumPy holds with an enum member takes many times as long.
_READY = int(DramState.READY)


class DramRoom:
    """Makes room in the DRAM tier. Not thread-safe: the ledger's owner serialises."""

    def __init__(
        self,
        table: BlockTable,
        tree: RunTree,
        dram: DramSpace,
        dirty: DirtyRuns,
        sizes: SlotSizes,
        below: CopiesBelow,
        giving_up: GivingUp,
    ) -> None:
        self._table = table
        self._tree = tree
        self._dram = dram
        self._dirty = dirty
        self._sizes = sizes
        self._below = below
        self._giving_up = giving_up
        #: Whether what was refused a write may have one after all: not where nothing is to be written at all.
        self.may_overdraw = True

    def reserve_all(self, ids: Ids, state: DramState, *, last_copies: bool, awaited: bool) -> int:
        """Give blocks of one namespace slots, in order, as many as there is room for; returns how many.

        For room, blocks that have a copy below are given up; with `awaited`, where none of those is left, also what was
        prefetched and not used yet; with `last_copies`, where nothing can be written and none of those is left, others,
        too, but none that these blocks hang on.
        """
        if not len(ids):
            return 0
        nbytes = self._sizes[self._tree.run_of(int(ids[0])).namespace]
        droppable = last_copies and not self._below.dealing.can_write
        offsets = self._dram.allocator.allocate_all(nbytes, len(ids))
        if len(offsets) < len(ids):
            keep = self._lineage(ids) if last_copies else None
            count = len(ids) - len(offsets)
            offsets += self._extents(nbytes, count, droppable=droppable, awaited=awaited, keep=keep)
        self._dram.take(ids[: len(offsets)], offsets, state)
        return len(offsets)

    def _lineage(self, ids: Ids) -> Ids:
        """All blocks of the runs of these, and of the runs that they hang on."""
        runs = {run.number: run for number in self._table.by_run(ids)[0] for run in self._tree.lineage_of(number)}
        return np.concatenate([run.ids for run in runs.values()])

    def is_stuck(self, nbytes: int) -> bool:
        """Whether no block can be given up for `nbytes` of room before something is written."""
        stuck = self._dram.ready_nbytes == self._dirty.nbytes and self._below.dealing.can_write
        return stuck and self._dram.allocator.largest_free_nbytes < nbytes

    def drop_for(self, ids: Ids) -> None:
        """Free room for slots of `ids`, of one namespace, at the cost of the blocks that are worth least, whether or
        not these have a copy below; of none that `ids` hang on.
        """
        nbytes = self._sizes[self._tree.run_of(int(ids[0])).namespace]
        self._dram.allocator.free_all(self._extents(nbytes, len(ids), droppable=True, keep=self._lineage(ids)))

    def slots_for_new(self, ids: Ids, nbytes: int, above: Ids) -> tuple[list[int], int]:
        """Slots for new blocks, which hang on those `above`; and how many are turned away: where DRAM is the only tier,
        what the policy does not want there only gets what is free.
        """
        if self._below.dealing.spaces:
            return self.extents(nbytes, len(ids), last_copies=True, keep=above), 0
        wanted = self._dram.wants(ids)
        count = len(ids) - int(np.argmax(wanted[::-1])) if wanted.any() else 0
        offsets = self.extents(nbytes, count, last_copies=True, keep=above)
        if len(offsets) < count:
            return offsets, 0
        offsets += self._dram.allocator.allocate_all(nbytes, len(ids) - count)
        return offsets, len(ids) - len(offsets)

    def extents(self, nbytes: int, count: int, *, last_copies: bool, keep: Ids | None = None) -> list[int]:
        """Up to `count` extents of `nbytes`. Blocks that have a copy below are given up for them.

        `last_copies`: where nothing can be written, blocks without one are given up, too, except `keep`. Of `keep`, not
        even what is not to be written is: what hangs on it would go along, and be taken for there by who asks for room.
        """
        return self._extents(nbytes, count, droppable=last_copies and not self._below.dealing.can_write, keep=keep)

    def _extents(
        self, nbytes: int, count: int, *, droppable: bool, keep: Ids | None, awaited: bool = True
    ) -> list[int]:
        allocator = self._dram.allocator
        offsets = allocator.allocate_all(nbytes, count)
        while len(offsets) < count:
            if not droppable and self._dram.ready_nbytes == self._dirty.nbytes:
                break  # all of it waits to be written
            wanted = nbytes * (count - len(offsets))
            victims = self._victims(wanted, droppable=droppable, awaited=awaited, keep=keep)
            if not len(victims):
                if keep is not None and not offsets and not droppable and self.may_overdraw:
                    self._owe(keep)
                break
            self._evict(victims)
            offsets += allocator.allocate_all(nbytes, count - len(offsets))
        return offsets

    def _owe(self, keep: Ids) -> None:
        """Of these, what was not to be written is in the way of what hangs on it: it is written after all, so that its
        slot can go.
        """
        table = self._table
        spent = keep[table.spent[keep] & (table.state[keep] == _READY) & (table.segment[keep] == NOWHERE)]
        if len(spent):
            table.spent[spent] = False
            table.verdict[spent] = Verdict.ADMITTED
            self._below.owe(spent, float(self._tree.used_s[table.run[spent]].min()))

    def _victims(self, nbytes: int, *, droppable: bool, awaited: bool, keep: Ids | None) -> Ids:
        """What to give up for `nbytes` of room. What was prefetched and not used yet only where there is nothing else,
        and last copies only where there is not even that.
        """
        choices = [True] if not self._below.dealing.spaces else [False, True] if droppable else [False]
        found: Ids = np.zeros(0, np.int32)
        for last_copies in choices:
            for also_awaited in (False, True) if awaited and self._dram.awaited else (awaited,):
                found = self._dram.victims(nbytes, droppable=last_copies, awaited=also_awaited, keep=keep)
                if len(found):
                    return found
        return found

    def _evict(self, ids: Ids) -> None:
        """Give up the slots of these blocks, and the blocks where that was their last copy."""
        table = self._table
        below = table.segment[ids] != NOWHERE
        if below.any():
            self._dram.free(ids[below])
            ids = ids[~below]
        if not len(ids):
            return
        for block in self._giving_up.drop_all(ids).tolist():
            if table.state[block] == _READY:  # not gone together with one that it hung on
                self._evict_last(block)

    def _evict_last(self, block: int) -> None:
        """As `_evict`, of a block without a copy below on which something hangs."""
        table = self._table
        if not table.spent[block] or not self._holds_up(block):
            self._giving_up.forget(block)
            return
        table.spent[block] = False
        ids = np.array([block], np.int32)
        self._below.admit(block)
        self._below.owe(ids, float(self._tree.used_s[table.run[block]]))  # written after all
        if table.spent[block]:  # it may not be: what hangs on it waits for it to be put again
            self._giving_up.leave_gap(block)
        elif not table.leaving[block] and not self._dram.wants(ids)[0]:
            self._dram.line.add(ids)

    def _holds_up(self, block: int) -> bool:
        """Whether a block that is still wanted hangs on this one."""
        table, run = self._table, self._tree.run_of(block)
        at = int(np.flatnonzero(run.ids == block)[0])
        ids = np.concatenate([run.ids[at + 1 :], *(child.ids for child in self._tree.below(run))])
        there = (table.slot[ids] != NOWHERE) | (table.segment[ids] != NOWHERE)
        return bool((there & ~table.spent[ids]).any())

    def evict_idle(self) -> None:
        """Give up every slot whose block has a copy below and is neither used nor pinned (tests and benchmarks: a
        cold DRAM tier).
        """
        self._evict(self._dram.all_idle())
