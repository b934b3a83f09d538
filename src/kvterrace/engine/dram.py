"""The DRAM tier as the ledger sees it: which block has which slot of the arena, and which slots are given up for
room.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Keys
from kvterrace.engine.extents import ExtentAllocator
from kvterrace.engine.leaving import LeavingLine
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.policy.eviction import EvictionPolicy
from kvterrace.policy.promotion import PromotionRule, SecondTouch
from kvterrace.types import Tier

__all__ = ["AWAITED_S", "DramSpace", "Spares"]

#: What was prefetched stands back for no other prefetch, and is given up for others last, for this long.
AWAITED_S = 10.0
#: The policy's capacity follows the size of the slots in steps of this share.
_STEP = 1 / 32


#: Plain: to compare what NumPy holds with an enum member takes many times as long, and so does looking it up.
_READY, _EMPTY = int(DramState.READY), int(DramState.EMPTY)

_Choice = Callable[[Ids], npt.NDArray[np.bool_]]
#: Of a run whose turn it is, by number: what stays of it and of what it hangs on, head first; empty if it may go.
Spares = Callable[[int], Ids]


class DramSpace:
    """Slots of the arena. A slot holds one whole record image, so that it can be written as it lies.

    Of every block that has a slot, the policy says that it is inside, or the block is in the line of those that leave.
    Not thread-safe: the ledger's owner serialises.
    """

    def __init__(self, nbytes: int, table: BlockTable, sizes: SlotSizes, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.promotion: PromotionRule = SecondTouch(nbytes)
        self.allocator = ExtentAllocator(nbytes)
        self.line = LeavingLine(table)
        #: What is passed over though the policy would let go of it; None where the policy sees to that itself. Asked
        #: for each run once while room is made.
        self.spares: Spares | None = None
        self._table = table
        self._sizes = sizes
        self._capacity = 0  # the policy's, in blocks
        #: Bytes of the slots that are READY.
        self.ready_nbytes = 0
        self._awaited: OrderedDict[int, float] = OrderedDict()  # block -> when it was prefetched, oldest first

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self.allocator.nbytes

    @property
    def index_nbytes(self) -> int:
        """Memory that the order of eviction takes."""
        return self.policy.nbytes + self.line.nbytes

    # -- what the policy is told ---------------------------------------------------------------------------------------

    def request(self, chain: Keys, ids: Ids, now_s: float, *, extend: bool, output_tokens: int = -1) -> None:
        """A prompt came; see `EvictionPolicy.request`."""
        self._resize()
        words = self._table.words
        gone = self.policy.request(chain, ids, words, now_s, extend=extend, output_tokens=output_tokens)
        self._step_in(ids)
        gone = gone[self._table.slot[gone] != NOWHERE]
        self.line.add(gone[~self._table.leaving[gone]])

    def enter(self, ids: Ids) -> None:
        """Blocks of the prompt that came last are there now; see `EvictionPolicy.enter`."""
        self.policy.enter(ids, self._table.words)
        self._step_in(ids)

    def go_first(self, ids: Ids) -> None:
        """Of these, what is here and has a copy below leaves, the first to go first; until it is used again."""
        table = self._table
        self.let_go(ids[(table.segment[ids] != NOWHERE) & (table.slot[ids] != NOWHERE)])

    def let_go(self, ids: Ids) -> None:
        """As if the policy had let go of these blocks, which are here."""
        ids = ids[~self._table.leaving[ids]]
        self.policy.forget(ids, self._table.words)
        self.line.add(ids)

    def _step_in(self, ids: Ids) -> None:
        """Those of these that are inside leave no longer."""
        if len(self.line):
            back = ids[self._table.leaving[ids]]
            if len(back):
                self.line.step_out(back[self.wants(back)])

    def wants(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether the policy would have it here."""
        return self.policy.inside(ids, self._table.words)

    def gone(self, ids: Ids) -> None:
        """These blocks, which have no slots, are forgotten."""
        self.policy.forget(ids, self._table.words)

    def _resize(self) -> None:
        taken = len(self.allocator)
        mean_nbytes = max(PAGE_NBYTES, self._sizes.mean_nbytes)
        if len(self._sizes.geometries) > 1 and taken:
            mean_nbytes = self.allocator.used_nbytes / taken
        capacity = max(1, int(self.nbytes / mean_nbytes))
        if self._capacity == 0 or abs(capacity - self._capacity) > _STEP * self._capacity:
            self._capacity = capacity
            self.policy.resize(capacity)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def keeps(self, ids: Ids, slot_nbytes: int) -> npt.NDArray[np.bool_]:
        """For each block that is read from below and needs no slot for that, whether it is to get one all the same. The
        others are read past DRAM, now.
        """
        return self.promotion.keeps(ids, slot_nbytes, self.allocator.free_nbytes)

    def take(self, ids: Ids, offsets: list[int], state: DramState) -> None:
        """Blocks `ids` have the extents at `offsets` as their slots, to be filled."""
        table = self._table
        assert not table.state[ids].any(), "a block has one slot"
        assert state is not DramState.READY, "a slot is filled before it is ready"
        table.slot[ids] = np.array(offsets, np.int64) // PAGE_NBYTES
        table.state[ids] = state
        inside = self.wants(ids)
        if not inside.all():
            self.line.add(ids[~inside])

    def ready(self, ids: Ids) -> None:
        """The slots of these blocks hold the blocks now."""
        self._table.state[ids] = _READY
        self.ready_nbytes += self._sizes.total(ids)

    @property
    def awaited(self) -> int:
        """How many blocks were prefetched lately and not used since."""
        return len(self._awaited)

    def expect(self, block: int, now_s: float) -> None:
        """`block`, which is ready, was prefetched: it is wanted soon."""
        assert self._table.state[block] == _READY
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

    def free(self, ids: Ids) -> None:
        """Give the slots of these blocks back. Nobody may be reading or filling them any more."""
        table = self._table
        self.used(ids)
        slots = table.slot[ids]
        assert (slots != NOWHERE).all(), "a slot was freed twice"
        ready = table.state[ids] == _READY
        table.left(Tier.DRAM, ids[ready])
        self.ready_nbytes -= self._sizes.total(ids[ready])
        self.allocator.free_all((slots.astype(np.int64) * PAGE_NBYTES).tolist())
        table.slot[ids] = NOWHERE
        table.state[ids] = _EMPTY
        table.lost_copy(ids)
        self.line.step_out(ids)
        self.policy.forget(ids, table.words)

    def offset(self, block: int) -> int:
        """Byte offset of the slot of `block` in the arena."""
        return int(self._table.slot[block]) * PAGE_NBYTES

    # -- what goes -----------------------------------------------------------------------------------------------------

    def victims(self, nbytes: int, *, droppable: bool, awaited: bool = True, keep: Ids | None = None) -> Ids:
        """Blocks to give up for `nbytes` of room, in the policy's order; fewer if there are no more.

        A block goes if nobody uses or pins it, and a copy of it is below or the tier below is done with it; if
        `droppable`, also if this is its last copy. Of the blocks `keep` no last copy goes, and unless `awaited`,
        nothing that was prefetched and not used yet. What is not given up after all belongs back into `line`.
        """
        marked = self._table.marked
        if keep is not None:
            marked[keep] = True
        try:
            return self._victims(nbytes, lambda ids: self._may_go(ids, droppable=droppable, awaited=awaited))
        finally:
            if keep is not None:
                marked[keep] = False

    def _victims(self, nbytes: int, may_go: _Choice) -> Ids:
        table, words = self._table, self._table.words
        passed: set[int] = set()
        asked, count = 0, math.ceil(nbytes / max(PAGE_NBYTES, self._sizes.mean_nbytes))
        chosen, missing = self.line.take(nbytes, self._sizes.of, may_go, count=count)
        while missing > 0:
            if asked == 1:  # more has to leave than was asked for: is there anything that may go?
                left = self._all_that_may_go(may_go)
                if np.isin(left, chosen).all():
                    break
            more = self.policy.evict(count, words)
            if not len(more):  # two blocks of one short key: the policy knows but one of them
                left = self._all_that_may_go(may_go)
                more = left[~np.isin(left, chosen)]
                if not len(more):
                    break
            more = more[(table.slot[more] != NOWHERE) & ~table.leaving[more]]
            self.line.add(more if self.spares is None else self._without_spared(more, self.spares, passed, chosen))
            found, missing = self.line.take(missing, self._sizes.of, may_go, count=count)
            chosen = np.concatenate([chosen, found])
            asked, count = asked + 1, 2 * count
        return chosen

    def _without_spared(self, ids: Ids, spares: Spares, passed: set[int], chosen: Ids) -> Ids:
        """Those of these blocks, which the policy has let go of, that leave. The others are inside again.

        `passed`: runs that were passed over before, and go now; `chosen`: blocks that go already.
        """
        table = self._table
        staying: set[int] = set()
        for number in table.by_run(ids)[0]:
            back = ids[:0] if number in passed else spares(number)
            if len(back):
                runs = {*table.by_run(back)[0]} - passed
                back = back[np.isin(table.run[back], list(runs)) & (table.slot[back] != NOWHERE)]
                self.enter(back[~np.isin(back, chosen)])
                passed |= runs
                staying |= runs
        return ids[~np.isin(table.run[ids], list(staying))] if staying else ids

    def all_idle(self) -> Ids:
        """Every block that has a slot and a copy below, or none to come, and is neither used nor pinned."""
        return self._all_that_may_go(lambda ids: self._may_go(ids, droppable=False, awaited=True))

    def _all_that_may_go(self, may_go: _Choice) -> Ids:
        """One pass over the table."""
        ready: Ids = np.flatnonzero(self._table.state == _READY).astype(np.int32)
        return ready[may_go(ready)]

    def _may_go(self, ids: Ids, *, droppable: bool, awaited: bool) -> npt.NDArray[np.bool_]:
        """Those that are `marked` are kept."""
        table = self._table
        goes: npt.NDArray[np.bool_] = (table.state[ids] == _READY) & ~table.writing[ids]
        goes &= (table.users[ids] | table.pins[ids]) == 0
        if not awaited:
            goes &= ~table.awaited[ids]
        kept = table.marked[ids]
        if not droppable:
            goes &= (table.segment[ids] != NOWHERE) | (table.spent[ids] & ~kept)
        elif kept.any():
            goes &= (table.segment[ids] != NOWHERE) | ~kept
        return goes
