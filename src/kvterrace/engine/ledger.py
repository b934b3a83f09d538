"""The ledger decides: what is where, what makes room, what is written, what is given up. It moves nothing.

Sans-I/O and deterministic: it takes events and the time, returns decisions, and never asks the operating system for
anything. Production, replay and simulation drive the same ledger. Not thread-safe: whoever drives it serialises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvterrace.engine.admitting import Admitting
from kvterrace.engine.attention import SCORE_HALF_LIFE_S, Attention
from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Geometry, Ids
from kvterrace.engine.dealing import Dealing
from kvterrace.engine.dirty import DirtyRuns, WriteBatch, WritePolicy
from kvterrace.engine.dram import DramSpace
from kvterrace.engine.giving_up import GivingUp
from kvterrace.engine.hinting import Hinting
from kvterrace.engine.room import DramRoom
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.engine.space import SegmentSpace, volume_of
from kvterrace.engine.ssd_order import SsdOrder
from kvterrace.engine.tree import Run, RunTree, Step, ids_of
from kvterrace.engine.turns import OpenTurns
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.keys import KEY_NBYTES, KeyChain
from kvterrace.policy.admission import Admission, WriteBudget
from kvterrace.policy.eviction import EvictionPolicy, LruTailFirst
from kvterrace.types import Hint, Tier

#: By whether a block is in DRAM.
_TIERS = np.array([Tier.SSD, Tier.DRAM], dtype=object)

__all__ = ["SCORE_HALF_LIFE_S", "Geometry", "Ledger"]

#: Plain: to compare what NumPy holds with an enum member takes many times as long.
_READY, _EMPTY = int(DramState.READY), int(DramState.EMPTY)


class Ledger:
    """State of one partition. `dram_nbytes` may be small but not 0; `space` is the room of each volume of the SSD tier,
    or of the only one, or None where there is no such tier.
    """

    def __init__(
        self,
        dram_nbytes: int,
        space: SegmentSpace | Sequence[SegmentSpace] | None,
        *,
        policy: EvictionPolicy | None = None,
        ssd_policy: EvictionPolicy | None = None,
        writes: WritePolicy | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        self.table = BlockTable()
        self.tree = RunTree(self.table)
        self.sizes = SlotSizes(self.tree)
        self.dram = DramSpace(dram_nbytes, self.table, self.sizes, policy or LruTailFirst())
        if space is None or isinstance(space, SegmentSpace):
            space = () if space is None else (space,)
        self.spaces = tuple(space)
        self.dealing = Dealing(self.spaces, self.key_of)
        self.writes = writes or WritePolicy()
        self.next_put_seq = 1
        #: Blocks that the last `begin_put` left out because DRAM alone holds what is likelier to be wanted again.
        self.turned_away = 0
        self._turns = OpenTurns()
        self.dirty = DirtyRuns(self.table, self.tree, self.sizes, self.doomed)
        self.attention = Attention(self.table, self.tree)
        self._below = CopiesBelow(self.table, self.tree, self.dirty, self.dealing, self.sizes)
        self._hinting = Hinting(self.table, self.tree, self.dram, self._below, self.attention)
        self.admitting = Admitting(
            self.table, self.tree, self.dirty, self._below, self._hinting.hints, Admission(budget)
        )
        self.dirty.judge = self.admitting.judge
        parts = self.table, self.tree, self.dram, self.dirty, self.sizes, self._below
        self._giving_up = GivingUp(*parts, scored=self.attention.runs)
        self._room = DramRoom(*parts, self._giving_up)
        self._room.may_overdraw = budget is None or budget.daily_nbytes > 0
        #: What the SSD tier would keep; None: its order is that of age.
        self.ssd_order: SsdOrder | None = None
        if ssd_policy is not None and self.spaces:
            self.ssd_order = SsdOrder(self.table, self.sizes, self._below, ssd_policy)
            self._giving_up.ssd_order = self.ssd_order
            self._hinting.tell(ssd_policy)

    @property
    def space(self) -> SegmentSpace | None:
        """The room of the only volume; None where there is no SSD tier. For who has no more than one."""
        assert len(self.spaces) < 2, "which volume?"
        return self.spaces[0] if self.spaces else None

    def space_of(self, number: int) -> SegmentSpace:
        """The room that the segment `number` takes its share of."""
        return self.spaces[volume_of(number) if len(self.spaces) > 1 else 0]

    def may_store(self, key: bytes) -> bool:
        """Whether the tier below may be given the block of a key, on some volume; else it lives in DRAM alone."""
        return self.dealing.may_store(key)

    @property
    def can_write(self) -> bool:
        """Whether some volume takes writes."""
        return self.dealing.can_write

    @property
    def policies_nbytes(self) -> int:
        """Memory that the orders of eviction take."""
        below = 0 if self.ssd_order is None else self.ssd_order.policy.nbytes
        return self.dram.index_nbytes + below

    # -- what there is -------------------------------------------------------------------------------------------------

    def add_namespace(self, number: int, geometry: Geometry, digest: bytes) -> None:
        """Sizes for namespace `number`, whose chains carry `digest`; before any of its blocks."""
        self.tree.name(number, digest)
        self.sizes.add(number, geometry)

    def find(self, chain: KeyChain, stop: int | None = None) -> Ids:
        """Ids of the blocks of `chain` that the index knows, from the first on; some may have no copy at the moment."""
        return ids_of(self.tree.walk(chain, stop))

    def on_ladder(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether it has a copy, or one on its way into DRAM, and was not invalidated."""
        there: npt.NDArray[np.bool_] = (self.table.state[ids] != _EMPTY) | (self.table.segment[ids] != NOWHERE)
        if self.doomed_blocks:
            there &= ~self.doomed(ids)
        return there

    def doomed(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether it was invalidated and only waits for its users to end."""
        return self._giving_up.are_doomed(ids)

    @property
    def doomed_blocks(self) -> set[int]:
        """All such blocks; not to be changed."""
        return self._giving_up.doomed

    def resident(self, ids: Ids) -> list[Tier]:
        """Tier of each block, cut before the first without a copy: what `match` answers for a chain."""
        ready = self.table.state[ids] == _READY
        there = ready | (self.table.segment[ids] != NOWHERE)
        if self.doomed_blocks:
            there &= ~self.doomed(ids)
        count = len(ids) if there.all() else int(np.argmin(there))
        tiers: list[Tier] = _TIERS[ready[:count].view(np.uint8)].tolist()
        return tiers

    def run_of(self, block: int) -> Run:
        """The run that a block belongs to."""
        return self.tree.run_of(block)

    def geometry_of(self, block: int) -> Geometry:
        """Sizes of the record of a block."""
        return self.sizes.geometries[self.run_of(block).namespace]

    # -- use -----------------------------------------------------------------------------------------------------------

    def touch(self, chain: KeyChain, stop: int, now_s: float, *, put: bool = False, output_tokens: int = -1) -> None:
        """The first `stop` blocks of `chain` were used now, and so was all that they hang on. `put`: to put what comes
        behind them; where they were touched last by who got them, that is one turn. `output_tokens`: of the answer to
        the whole prompt; -1: not known.
        """
        steps = self.tree.walk(chain, stop)
        if not steps:
            return
        ids, last = ids_of(steps), steps[-1][0]
        idle_s = now_s - float(self.tree.used_s[last.number])
        self._mark_used(steps, now_s)
        if not put or not self._turns.has_told(chain, len(chain), now_s):
            if len(ids) == stop < len(chain):  # the policies hear of the whole prompt, so of all that is there of it
                ids = self.find(chain)
            extend = put and self._turns.has_begun(chain, len(ids), now_s)
            self._request(chain, len(chain), ids, now_s, extend=extend, output_tokens=output_tokens)
        if put and len(ids) == len(chain):  # all is there: who puts it once more uses it once more
            self._turns.end(chain, len(chain), len(ids))
        if len(self._hinting.hints):
            self._hinting.used(steps, idle_s, now_s)

    def wanted(self, ids: Ids, now_s: float) -> None:
        """A request asks for these blocks; before `touch`."""
        self._hinting.now(now_s)
        self.admitting.wanted(ids, now_s)

    def hint(self, sequence: bytes, kind: Hint, seconds: float | None, now_s: float) -> None:
        """What a client says of a sequence's future, see `Store.hint`. The one place where hints come in."""
        self._hinting.hint(sequence, kind, seconds, now_s)

    def _request(self, chain: KeyChain, stop: int, ids: Ids, now_s: float, *, extend: bool, output_tokens: int) -> None:
        words = np.frombuffer(chain.data, np.uint64, stop * KEY_NBYTES // 8)[:: KEY_NBYTES // 8].copy()
        self.dram.request(words, ids, now_s, extend=extend, output_tokens=output_tokens)
        if self.ssd_order is not None:
            self.ssd_order.request(words, ids, now_s, extend=extend, output_tokens=output_tokens)
        self._turns.begin(chain, stop, len(ids), now_s)

    def _mark_used(self, steps: list[Step], now_s: float) -> None:
        """The runs of a walk were used now. The last is cut where the walk ends."""
        run, count = steps[-1]
        if count < len(run):
            self._split(run, count)
        used_s = self.tree.used_s
        if self.spaces:
            ids = run.ids if len(steps) == 1 else np.concatenate([run.ids for run, _ in steps])
            for space, some in self._below.by_space(ids):
                space.touch(self.table, some, used_s[self.table.run[some]], now_s)
        used_s[[run.number for run, _ in steps]] = now_s

    def add_scores(self, chain: KeyChain, scores: np.ndarray, now_s: float) -> None:
        """Add attention scores, shape `(blocks,)` or `(layer groups, blocks)`, to the blocks of `chain` that the index
        knows; what they had before has decayed. Those that are cold by now are the first to leave DRAM.
        """
        tokens = chain.namespace.layout.block_tokens
        self.dram.go_first(self.attention.add(self.tree.walk(chain), np.atleast_2d(scores), tokens, now_s))

    def _split(self, run: Run, at: int) -> None:
        tail = self.tree.split(run, at)
        self.attention.split(run, tail)
        self.dirty.split(run, tail)

    def hold(self, ids: Ids) -> None:
        """A transfer uses these blocks: none is forgotten, no slot of theirs moves, until `let_go`."""
        self.table.users[ids] += 1

    def let_go(self, block: int) -> None:
        """One use of a block has ended."""
        self.let_go_all(np.array([block], np.int32))

    def let_go_all(self, ids: Ids) -> None:
        """One use of each of these blocks, no two of them the same and in chain order, has ended."""
        self._giving_up.let_go(ids[::-1])

    def pin(self, ids: Ids) -> None:
        """Active KV: none of these blocks is evicted or dropped until `unpin`."""
        self.table.pins[ids] += 1

    def unpin(self, ids: Ids) -> None:
        """Undo one `pin`."""
        self.table.pins[ids] -= 1
        assert (self.table.pins[ids] >= 0).all(), "a block was unpinned more often than pinned"
        nowhere = (self.table.slot[ids] == NOWHERE) & (self.table.segment[ids] == NOWHERE)
        for block in ids[(self.table.pins[ids] == 0) & (nowhere | self.doomed(ids))][::-1].tolist():
            self.tidy(block)

    # -- room in DRAM --------------------------------------------------------------------------------------------------

    def reserve(self, block: int, state: DramState) -> bool:
        """Give `block` a slot, making room if need be; False if every slot is in use, pinned or waits to be written."""
        return self.reserve_all(np.array([block], np.int32), state, last_copies=True) == 1

    def reserve_all(self, ids: Ids, state: DramState, *, last_copies: bool, awaited: bool = True) -> int:
        """Give blocks of one namespace slots, in order, as many as there is room for; see `DramRoom.reserve_all`."""
        return self._room.reserve_all(ids, state, last_copies=last_copies, awaited=awaited)

    def reserve_extent(self, nbytes: int) -> int | None:
        """A piece of the arena that belongs to no block (staging), or None. Give it back with `dram.allocator.free`."""
        offsets = self._room.extents(nbytes, 1, last_copies=True)
        return offsets[0] if offsets else None

    def drop_for(self, ids: Ids) -> None:
        """Free room in DRAM for blocks of one namespace at any price but active KV; see `DramRoom.drop_for`."""
        self._room.drop_for(ids)

    def evict_idle(self) -> None:
        """Give up every slot of an idle block that has a copy below; see `DramRoom.evict_idle`."""
        self._room.evict_idle()

    # -- put -----------------------------------------------------------------------------------------------------------

    def begin_put(
        self,
        chain: KeyChain,
        at: int,
        stop: int,
        *,
        namespace: int,
        sequence: bytes,
        now_s: float,
        output_tokens: int = -1,
    ) -> tuple[Ids, int]:
        """New blocks for `chain`, of which the index knows the first `at` blocks and no more: up to block `stop`, as
        many as there is room for. The whole chain, up to the last of them, was used now.

        Each has a slot to be filled and is held. Returns their ids and the put-sequence number of the first; those of
        the others follow. See `turned_away`; `output_tokens` as for `touch`.
        """
        self._hinting.now(now_s)
        nbytes = self.sizes[namespace]
        if self._room.is_stuck(nbytes):
            return np.zeros(0, np.int32), 0
        steps = self.tree.walk(chain, at)
        above = ids_of(steps)
        run, ids = self._append(steps, chain, at, stop, namespace=namespace, sequence=sequence, now_s=now_s)
        if not self._turns.has_told(chain, stop, now_s):
            extend = self._turns.has_begun(chain, at, now_s)
            self._request(chain, stop, above, now_s, extend=extend, output_tokens=output_tokens)
        whole = np.concatenate([above, ids])
        self.dram.enter(whole)
        if self.ssd_order is not None:
            self.ssd_order.enter(whole)
        offsets, self.turned_away = self._room.slots_for_new(ids, nbytes, above)
        taken, first = ids[: len(offsets)], 0
        if offsets:
            self.dram.take(taken, offsets, DramState.FILLING)
            self.hold(taken)
            first = self._number(taken)
        if len(taken) < len(ids):
            self._giving_up.cut(run, len(ids) - len(taken))
        if len(taken) + self.turned_away == len(ids):
            self._turns.end(chain, stop, at)
        if len(self._hinting.hints):
            self._hinting.came(sequence, now_s)
        return taken, first

    def begin_fill(self, block: int) -> int | None:
        """Give a known block without a copy a slot for a put to fill; returns its put-sequence number, or None if there
        is no room.
        """
        if not self.reserve(block, DramState.FILLING):
            return None
        return self._number(np.array([block], np.int32))

    def _append(
        self, steps: list[Step], chain: KeyChain, at: int, stop: int, *, namespace: int, sequence: bytes, now_s: float
    ) -> tuple[Run, Ids]:
        """Blocks `at..stop` of `chain`, of which the index knows the first `at` and no more: where `steps` lead. These
        count as used now.
        """
        parent: Run | None = None
        if steps:
            parent = steps[-1][0]
            assert sum(step[1] for step in steps) == at, "what new blocks hang on is not there"
            self._mark_used(steps, now_s)
        keys = chain.data[at * KEY_NBYTES : stop * KEY_NBYTES]
        run, ids = self.tree.append(parent, keys, namespace=namespace, sequence=sequence, depth=at, now_s=now_s)
        self.admitting.came(ids)
        return run, ids

    def _number(self, ids: Ids) -> int:
        """Give blocks their put-sequence numbers; returns the first."""
        first = self.next_put_seq
        self.next_put_seq += len(ids)
        self.table.put_seq[ids] = np.arange(first, self.next_put_seq)
        return first

    def filled(self, block: int, now_s: float) -> None:
        """As `filled_all`, of one block."""
        self.filled_all(np.array([block], np.int32), now_s)

    def filled_all(self, ids: Ids, now_s: float) -> None:
        """A put has filled the slots: the blocks are ready, and have no copies below."""
        self.dram.ready(ids)
        self._below.owe(ids, now_s)

    def undo(self, block: int) -> None:
        """A put or a read did not fill the slot after all: give it back. The caller still holds the block."""
        assert self.table.state[block] in (DramState.FILLING, DramState.READING) and self.table.users[block] > 0
        self.dram.free(np.array([block], np.int32))

    def landed(self, ids: Ids) -> None:
        """Reads have filled the slots with verified bytes: second copies, free to be given up again. Or the only ones,
        if those below were lost meanwhile (other reads found them wrong): then they are to be written.
        """
        self.dram.ready(ids)
        for block in ids[self.table.segment[ids] == NOWHERE].tolist():
            self._below.admit(block)
            self._below.owe(np.array([block], np.int32), float(self.tree.used_s[self.table.run[block]]))

    def lost(self, block: int, now_s: float, *, segment: int | None = None, page: int = NOWHERE) -> None:
        """A copy below was found to be wrong or gone; see `CopiesBelow.lost`."""
        self._below.lost(block, now_s, segment=segment, page=page)

    def bar(self, block: int) -> None:
        """`may_store` says no of this block from now on: if it waits to be written, it does no longer."""
        self._below.bar(block)

    def spend(self, block: int) -> None:
        """The copy below makes room for others; see `CopiesBelow.spend`."""
        self._below.spend(block)

    # -- writing behind ------------------------------------------------------------------------------------------------

    def next_write(self, now_s: float, *, pressed: bool, space: SegmentSpace | None = None) -> WriteBatch | None:
        """Blocks to write now, placed one behind the other in the open segment; None if none is due or no segment is
        open.

        Args:
            pressed: write what there is without waiting for it to be idle (room is wanted, or a flush).
            space: where; None: in the only volume.
        """
        space = space or self.space
        if space is None or not space.can_write:
            return None
        pressed = pressed or self.dirty.nbytes > self.writes.dirty_fraction * self.dram.nbytes
        batch = self.dirty.choose(space, self.writes, now_s, pressed=pressed, refused=self.dealing.refused_by(space))
        if batch is not None:
            self.table.writing[batch.ids] = True
            self.hold(batch.ids)
            batch.segment.writers += 1
            self.admitting.spend(batch.nbytes, now_s)
        return batch

    def needs_segment(self, space: SegmentSpace | None = None) -> bool:
        """Whether dirty blocks wait that `space` (None: the only volume) takes, and its open segment could not take the
        next of them, or there is none.
        """
        if (space := space or self.space) is None:
            return False
        return space.open_is_full if space.open is not None else self.dirty.wait_for(self.dealing.refused_by(space))

    def written(self, batch: WriteBatch) -> None:
        """A write has ended well: the copies count from now on."""
        ids, table = batch.ids, self.table
        sizes = self.sizes.of(ids)
        space = self.space_of(batch.segment.number)
        self.dirty.remove(ids)
        space.gain(table, batch.segment, ids, int(sizes.sum()), self.tree.used_s[table.run[ids]])
        table.page[ids] = (batch.offset + np.cumsum(sizes) - sizes) // PAGE_NBYTES
        self._end_write(batch)

    def write_failed(self, batch: WriteBatch) -> None:
        """A write has failed: its room in the segment is spent, its blocks are as dirty as before."""
        self._end_write(batch)
        for block in batch.ids.tolist():
            if self.table.run[block] != NOWHERE and not self.may_store(self.key_of(block)):
                self.bar(block)  # since the write began

    def _end_write(self, batch: WriteBatch) -> None:
        batch.segment.writers -= 1
        self.table.writing[batch.ids] = False
        self.let_go_all(batch.ids)

    # -- giving up -----------------------------------------------------------------------------------------------------

    def invalidate(self, chain: KeyChain, start: int) -> list[bytes]:
        """Give up the blocks of `chain` from `start` on, and all that hangs on them; see `GivingUp.invalidate`."""
        return self._giving_up.invalidate(chain, start)

    def forget(self, block: int) -> None:
        """Drop a block and all that hangs on it, except what is in use or pinned."""
        self._giving_up.forget(block)

    def tidy(self, block: int) -> None:
        """If a block has no copy and nothing hangs on it: forget it."""
        if self.table.run[block] != NOWHERE:
            self._giving_up.tidy(block)

    def end(self) -> None:
        """DRAM goes: what it alone holds counts as dropped."""
        table = self.table
        alone = (table.state == _READY) & (table.segment == NOWHERE) & (table.run != NOWHERE)
        self._giving_up.dropped_blocks += int(np.count_nonzero(alone))

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were given up though nobody asked for it."""
        return self._giving_up.dropped_blocks

    # -- for the drivers -----------------------------------------------------------------------------------------------

    def key_of(self, block: int) -> bytes:
        """Key of a block."""
        return bytes(self.table.key[block])
