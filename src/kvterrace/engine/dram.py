"""The DRAM tier as the ledger sees it: which block has which slot of the arena, and which slots are given up for
room.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids
from kvterrace.engine.extents import ExtentAllocator
from kvterrace.engine.tree import Run, RunTree
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.policy.eviction import EvictionPolicy

__all__ = ["DramSpace"]

#: Runs that are looked at one by one for something to give up, before all are looked at at once.
_RUNS_TRIED = 16


class DramSpace:
    """Slots of the arena. A slot holds one whole record image, so that it can be written as it lies.

    Not thread-safe: the ledger's owner serialises.
    """

    def __init__(self, nbytes: int, table: BlockTable, tree: RunTree, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.allocator = ExtentAllocator(nbytes)
        self._table = table
        self._tree = tree
        self._resident: dict[int, int] = {}  # run number -> blocks of it that have a slot

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self.allocator.nbytes

    def take(self, ids: Ids, offsets: list[int], state: DramState) -> None:
        """Blocks `ids` have the extents at `offsets` as their slots."""
        table = self._table
        assert not table.state[ids].any(), "a block has one slot"
        table.slot[ids] = np.array(offsets, np.int64) // PAGE_NBYTES
        table.state[ids] = state
        for run in table.run[ids].tolist():
            count = self._resident.get(run, 0)
            self._resident[run] = count + 1
            if not count:
                self.policy.insert(run)

    def free(self, block: int) -> None:
        """Give the slot of `block` back. Nobody may be reading or filling it any more."""
        table = self._table
        assert table.slot[block] != NOWHERE, "a slot was freed twice"
        self.allocator.free(int(table.slot[block]) * PAGE_NBYTES)
        table.slot[block] = NOWHERE
        table.state[block] = DramState.EMPTY
        run = int(table.run[block])
        self._resident[run] -= 1
        if not self._resident[run]:
            del self._resident[run]
            self.policy.remove(run)

    def split(self, head: Run, tail: Run) -> None:
        """Tell the policy that `tail` was cut off `head`."""
        if head.number not in self._resident:
            return
        in_tail = int(np.count_nonzero(self._table.slot[tail.ids] != NOWHERE))
        in_head = self._resident[head.number] - in_tail
        if in_tail:
            self._resident[tail.number] = in_tail
            self.policy.split(head.number, tail.number)
        if in_head:
            self._resident[head.number] = in_head
        else:
            del self._resident[head.number]
            self.policy.remove(head.number)

    def offset(self, block: int) -> int:
        """Byte offset of the slot of `block` in the arena."""
        return int(self._table.slot[block]) * PAGE_NBYTES

    def victims(self, nbytes: int, slot_nbytes: dict[int, int], *, droppable: bool, keep: Collection[int] = ()) -> Ids:
        """Blocks to give up for `nbytes` of room, in the policy's order, tails first; fewer if there are no more.

        A block goes if nobody uses or pins it, and a copy of it is below or the tier below is done with it; if
        `droppable`, also if this is its last copy. In the runs `keep` no last copy goes. The order brings
        what hangs on a block before the block itself. `slot_nbytes` gives a slot's size by namespace number.
        """
        chosen: list[Ids] = []
        promising: set[int] | None = None
        for tried, number in enumerate(self.policy.order()):
            if tried == _RUNS_TRIED:
                promising = self._with_victims(droppable=droppable)
            if promising is not None and number not in promising:
                continue
            run = self._tree.run(number)
            ids = run.ids[::-1]
            found = ids[self._may_go(ids, droppable=droppable, kept=number in keep)]
            if not len(found):
                continue
            enough = -(-nbytes // slot_nbytes[run.namespace])
            chosen.append(found[:enough])
            nbytes -= len(chosen[-1]) * slot_nbytes[run.namespace]
            if nbytes <= 0:
                break
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int32)

    def _may_go(self, ids: Ids | slice, *, droppable: bool, kept: bool) -> npt.NDArray[np.bool_]:
        table = self._table
        goes: npt.NDArray[np.bool_] = (table.state[ids] == DramState.READY) & ~table.writing[ids]
        goes &= (table.users[ids] == 0) & (table.pins[ids] == 0)
        if kept:
            goes &= table.segment[ids] != NOWHERE
        elif not droppable:
            goes &= (table.segment[ids] != NOWHERE) | table.spent[ids]
        return goes

    def _with_victims(self, *, droppable: bool) -> set[int]:
        """Runs that have a block to give up: one pass over the table, where many runs have none."""
        runs = self._table.run[self._may_go(slice(None), droppable=droppable, kept=False)]
        return set(np.unique(runs).tolist())
