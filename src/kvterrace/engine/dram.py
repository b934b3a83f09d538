"""The DRAM tier as the ledger sees it: which block has which slot of the arena, and which slots are given up for
room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids
from kvterrace.engine.extents import ExtentAllocator
from kvterrace.engine.tree import Run, RunTree
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.policy.eviction import EvictionPolicy

__all__ = ["AWAITED_S", "DramSpace"]

#: What was prefetched stands back for no other prefetch, and is given up for others last, for this long.
AWAITED_S = 10.0
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
        self._resident: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # by run number: its blocks that have a slot
        #: Bytes of the slots that are READY.
        self.ready_nbytes = 0
        self._awaited: OrderedDict[int, float] = OrderedDict()  # block -> when it was prefetched, oldest first
        self._going: dict[int, None] = {}  # blocks that go before all others, the first first

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self.allocator.nbytes

    def resident(self, run: int) -> int:
        """How many blocks of a run have a slot."""
        return int(self._resident[run]) if run < len(self._resident) else 0

    def take(self, ids: Ids, offsets: list[int], state: DramState) -> None:
        """Blocks `ids` have the extents at `offsets` as their slots, to be filled."""
        table = self._table
        assert not table.state[ids].any(), "a block has one slot"
        assert state is not DramState.READY, "a slot is filled before it is ready"
        table.slot[ids] = np.array(offsets, np.int64) // PAGE_NBYTES
        table.state[ids] = state
        self._fit()
        for run, count in zip(*self._runs_of(ids), strict=True):
            if not self._resident[run]:
                self.policy.insert(run)
            self._resident[run] += count

    def ready(self, block: int) -> None:
        """The slot of `block` holds the block now."""
        self._table.state[block] = DramState.READY
        self.ready_nbytes += self.allocator.size_of(self.offset(block))

    @property
    def awaited(self) -> int:
        """How many blocks were prefetched lately and not used since."""
        return len(self._awaited)

    def expect(self, block: int, now_s: float) -> None:
        """`block`, which is ready, was prefetched: it is wanted soon."""
        assert self._table.state[block] == DramState.READY
        self._table.awaited[block] = True
        self._awaited[block] = now_s
        self._awaited.move_to_end(block)

    def used(self, ids: Ids) -> None:
        """Blocks were used, or leave: they are awaited no longer."""
        if self._awaited:
            for block in ids[self._table.awaited[ids]].tolist():
                self._table.awaited[block] = False
                del self._awaited[block]

    def expire(self, now_s: float) -> None:
        """What was prefetched too long ago is as any other block from now on."""
        while self._awaited:
            block, since_s = next(iter(self._awaited.items()))
            if now_s - since_s < AWAITED_S:
                return
            self._table.awaited[block] = False
            del self._awaited[block]

    def free(self, block: int) -> None:
        """Give the slot of `block` back. Nobody may be reading or filling it any more."""
        self.free_all(np.array([block], np.int32))

    def free_all(self, ids: Ids) -> None:
        """As `free`, for many blocks."""
        table = self._table
        self.used(ids)
        if self._going:
            for block in ids.tolist():
                self._going.pop(block, None)
        slots = table.slot[ids]
        assert (slots != NOWHERE).all(), "a slot was freed twice"
        ready = (table.state[ids] == DramState.READY).tolist()
        for slot, counted in zip(slots.tolist(), ready, strict=True):
            if counted:
                self.ready_nbytes -= self.allocator.size_of(slot * PAGE_NBYTES)
            self.allocator.free(slot * PAGE_NBYTES)
        table.slot[ids] = NOWHERE
        table.state[ids] = DramState.EMPTY
        for run, count in zip(*self._runs_of(ids), strict=True):
            self._resident[run] -= count
            if not self._resident[run]:
                self.policy.remove(run)

    def _runs_of(self, ids: Ids) -> tuple[list[int], list[int]]:
        """Numbers of the runs of these blocks in the order they come in, and how many blocks each has of these."""
        runs = self._table.run[ids]
        if len(runs) == 1 or (len(runs) and (runs == runs[0]).all()):
            return [int(runs[0])], [len(runs)]
        numbers, firsts, counts = np.unique(runs, return_index=True, return_counts=True)
        order = np.argsort(firsts)
        return numbers[order].tolist(), counts[order].tolist()

    def split(self, head: Run, tail: Run) -> None:
        """Tell the policy that `tail` was cut off `head`."""
        before = self.resident(head.number)
        if not before:
            return
        in_tail = int(np.count_nonzero(self._table.slot[tail.ids] != NOWHERE))
        if in_tail:
            self._fit()
            self._resident[tail.number] = in_tail
            self.policy.split(head.number, tail.number)
        self._resident[head.number] = before - in_tail
        if before == in_tail:
            self.policy.remove(head.number)

    def _fit(self) -> None:
        more = self._tree.numbers - len(self._resident)
        if more > 0:
            self._resident = np.concatenate([self._resident, np.zeros(more + len(self._resident) // 4, np.int32)])

    def go_first(self, ids: Ids, others: Ids) -> None:
        """`ids`, in this order, are the first to leave from now on, if they have a copy below; `others` are not."""
        if self._going:
            for block in others.tolist():
                self._going.pop(block, None)
        self._going.update(dict.fromkeys(ids[self._table.slot[ids] != NOWHERE].tolist()))

    def offset(self, block: int) -> int:
        """Byte offset of the slot of `block` in the arena."""
        return int(self._table.slot[block]) * PAGE_NBYTES

    def victims(
        self,
        nbytes: int,
        slot_nbytes: dict[int, int],
        *,
        droppable: bool,
        awaited: bool = True,
        keep: Collection[int] = (),
    ) -> Ids:
        """Blocks to give up for `nbytes` of room, in the policy's order, tails first; fewer if there are no more.

        A block goes if nobody uses or pins it, and a copy of it is below or the tier below is done with it; if
        `droppable`, also if this is its last copy. In the runs `keep` no last copy goes, and unless `awaited`, nothing
        that was prefetched and not used yet. The order brings what hangs on a block before the block itself.
        `slot_nbytes` gives a slot's size by namespace number.
        """
        chosen: list[Ids] = []
        if self._going:
            ids = np.fromiter(self._going, np.int32, len(self._going))
            ids = ids[self._may_go(ids, droppable=False, awaited=awaited, kept=True)]
            sizes = [slot_nbytes[self._tree.run_of(block).namespace] for block in ids.tolist()]
            before = np.cumsum(np.array(sizes, np.int64)) - sizes
            ids = ids[before < nbytes]
            nbytes -= sum(sizes[: len(ids)])
            chosen.append(ids)
            if nbytes <= 0:
                return ids
        promising: set[int] | None = None
        for tried, number in enumerate(self.policy.victims()):
            if tried == _RUNS_TRIED:
                promising = self._with_victims(droppable=droppable, awaited=awaited)
                if not promising:
                    break
            if promising is not None and number not in promising:
                continue
            run = self._tree.run(number)
            ids = run.ids[::-1]
            if chosen and self._going:
                ids = ids[~np.isin(ids, chosen[0])]
            found = ids[self._may_go(ids, droppable=droppable, awaited=awaited, kept=number in keep)]
            if not len(found):
                continue
            enough = -(-nbytes // slot_nbytes[run.namespace])
            chosen.append(found[:enough])
            nbytes -= len(chosen[-1]) * slot_nbytes[run.namespace]
            if nbytes <= 0:
                break
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int32)

    def _may_go(self, ids: Ids, *, droppable: bool, awaited: bool, kept: bool) -> npt.NDArray[np.bool_]:
        table = self._table
        goes: npt.NDArray[np.bool_] = (table.state[ids] == DramState.READY) & ~table.writing[ids]
        goes &= (table.users[ids] == 0) & (table.pins[ids] == 0)
        if not awaited:
            goes &= ~table.awaited[ids]
        if kept:
            goes &= table.segment[ids] != NOWHERE
        elif not droppable:
            goes &= (table.segment[ids] != NOWHERE) | table.spent[ids]
        return goes

    def _with_victims(self, *, droppable: bool, awaited: bool) -> set[int]:
        """Runs that have a block to give up: one pass over the table, where many runs have none."""
        ready: Ids = np.flatnonzero(self._table.state == DramState.READY).astype(np.int32)
        runs = self._table.run[ready[self._may_go(ready, droppable=droppable, awaited=awaited, kept=False)]]
        return set(np.unique(runs).tolist())
