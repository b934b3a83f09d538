"""Room in DRAM: who gets a slot, and who gives one up for it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.giving_up import GivingUp
from kvterrace.engine.tree import Run, RunTree
from kvterrace.format.record import PAGE_NBYTES

__all__ = ["DramRoom"]


class DramRoom:
    """Makes room in the DRAM tier. Not thread-safe: the ledger's owner serialises."""

    def __init__(
        self,
        table: BlockTable,
        tree: RunTree,
        dram: DramSpace,
        dirty: DirtyRuns,
        slot_nbytes: dict[int, int],
        below: CopiesBelow,
        giving_up: GivingUp,
    ) -> None:
        """`slot_nbytes`: size of a slot by namespace."""
        self._table = table
        self._tree = tree
        self._dram = dram
        self._dirty = dirty
        self._slot_nbytes = slot_nbytes
        self._below = below
        self._giving_up = giving_up

    def reserve_all(self, ids: Ids, state: DramState, *, last_copies: bool, awaited: bool) -> int:
        """Give blocks of one namespace slots, in order, as many as there is room for; returns how many.

        For room, blocks that have a copy below are given up; with `awaited`, where none of those is left, also what was
        prefetched and not used yet; with `last_copies`, where nothing can be written and none of those is left, others,
        too, but none that these blocks hang on.
        """
        if not len(ids):
            return 0
        keep: set[int] = set()
        for number in set(self._table.run[ids].tolist()):
            run: Run | None = self._tree.run(number)
            while run is not None and run.number not in keep:
                keep.add(run.number)
                run = run.parent
        nbytes = self._slot_nbytes[self._tree.run_of(int(ids[0])).namespace]
        droppable = last_copies and not self._below.dealing.can_write
        offsets = self._extents(nbytes, len(ids), droppable=droppable, awaited=awaited, keep=keep)
        self._dram.take(ids[: len(offsets)], offsets, state)
        return len(offsets)

    def drop_for(self, ids: Ids) -> None:
        """Free room for slots of `ids`, of one namespace, at the cost of the blocks that are worth least, whether or
        not these have a copy below; of none that `ids` hang on.
        """
        keep = {run.number for block in ids.tolist() for run in self._tree.lineage(self._tree.run_of(block))}
        nbytes = self._slot_nbytes[self._tree.run_of(int(ids[0])).namespace]
        for offset in self._extents(nbytes, len(ids), droppable=True, keep=keep):
            self._dram.allocator.free(offset)

    def extents(self, nbytes: int, count: int, *, last_copies: bool, keep: Collection[int]) -> list[int]:
        """Up to `count` extents of `nbytes`. Blocks that have a copy below are given up for them.

        `last_copies`: where nothing can be written, blocks without one are given up, too, except in the runs `keep`.
        """
        return self._extents(nbytes, count, droppable=last_copies and not self._below.dealing.can_write, keep=keep)

    def _extents(
        self, nbytes: int, count: int, *, droppable: bool, keep: Collection[int], awaited: bool = True
    ) -> list[int]:
        allocate = self._dram.allocator.allocate
        offsets: list[int] = []
        victims: list[int] = []
        while len(offsets) < count:
            offset = allocate(nbytes)
            if offset is not None:
                offsets.append(offset)
                continue
            if not victims:
                if not droppable and self._dram.ready_nbytes == self._dirty.nbytes:
                    break  # all of it waits to be written
                wanted = nbytes * (count - len(offsets))
                victims = self._victims(wanted, droppable=droppable, awaited=awaited, keep=keep)
                if not victims:
                    break
            self._evict_some(victims, nbytes * (count - len(offsets)))
        return offsets

    def _victims(self, nbytes: int, *, droppable: bool, awaited: bool, keep: Collection[int]) -> list[int]:
        """What to give up for `nbytes` of room, the last first. What was prefetched and not used yet only where there
        is nothing else, and last copies only where there is not even that.
        """
        for last_copies in (False, True) if droppable else (False,):
            for also_awaited in (False, True) if awaited and self._dram.awaited else (awaited,):
                found = self._dram.victims(
                    nbytes, self._slot_nbytes, droppable=last_copies, awaited=also_awaited, keep=keep
                )
                if len(found):
                    return found[::-1].tolist()  # type: ignore[no-any-return] # numpy has no type for it
        return []

    def _evict_some(self, victims: list[int], nbytes: int) -> None:
        """Give up the last of `victims`, and the last copies before it in the list that are of the same run, for up to
        `nbytes` of room; takes them off the list.
        """
        table = self._table
        block = victims.pop()
        if table.state[block] != DramState.READY:  # gone together with one that it hung on
            return
        if table.segment[block] != NOWHERE or table.spent[block]:
            self._evict(block)
            return
        run = self._tree.run_of(block)
        nbytes -= self._slot_nbytes[run.namespace]
        while victims and nbytes > 0 and table.run[victims[-1]] == run.number:
            if table.segment[victims[-1]] != NOWHERE or table.spent[victims[-1]]:
                break
            block = victims.pop()
            nbytes -= self._slot_nbytes[run.namespace]
        self._giving_up.forget(block)  # the first of them in the chain: the others hang on it

    def _evict(self, block: int) -> None:
        if self._table.segment[block] != NOWHERE:
            self._dram.free(block)
            return
        if self._table.spent[block] and self._holds_up(block):
            self._table.spent[block] = False
            self._below.admit(block)
            self._below.owe(block, float(self._tree.used_s[self._table.run[block]]))  # written after all
            if self._table.spent[block]:  # it may not be: what hangs on it waits for it to be put again
                self._giving_up.leave_gap(block)
            return
        self._giving_up.forget(block)

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
        for block in self._dram.victims(self._dram.nbytes + PAGE_NBYTES, self._slot_nbytes, droppable=False).tolist():
            if self._table.state[block] == DramState.READY:  # not gone together with one that it hung on
                self._evict(block)
