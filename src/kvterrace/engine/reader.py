"""The way up: blocks from DRAM or SSD into the caller's buffers.

A read lands in a slot of the arena, is verified there on the thread that completed it, and is scattered to the caller
from there; the slot stays as the promoted copy. So bytes are copied once, and requests for one block share one read.
What DRAM is not to keep goes past it, if it can: see `straight`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.foresight import Foresight
from kvterrace.engine.landing import (
    Copy,
    Landing,
    Want,
    copy_ended,
    copying,
    wanted_nbytes,
)
from kvterrace.engine.layers import LayerReads
from kvterrace.engine.outbox import Outbox
from kvterrace.engine.record_reads import RecordReads, stopped
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.straight import StraightReads
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.engine.volume import Volume
from kvterrace.engine.waiting import Line
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import KEY_NBYTES
from kvterrace.types import Busy, Expired, GetOutcome, Hit, Miss, Tier

__all__ = ["Reader"]

_log = logging.getLogger(__name__)

#: Blocks that one call on a worker thread copies.
_COPY_BLOCKS = 8
#: Blocks to copy, and at least as many to read, that are handed over together; more are looked at while these move.
_COPIES_AT_ONCE, _READS_AT_ONCE = 4 * _COPY_BLOCKS, 24
#: Wants that are first tried for slots at once; twice as many each time that all of them got one. So one round looks at
#: few more than it can serve, however many wait.
_FIRST_WANTS = 8

#: Plain: comparing what NumPy holds with an enum member takes many times as long.
_EMPTY, _READING, _READY = int(DramState.EMPTY), int(DramState.READING), int(DramState.READY)


class Reader:
    """Gets and prefetches. Called under the store's lock, except for what runs on the engine's threads."""

    def __init__(self, core: Core, busy_after_s: float) -> None:
        self._core = core
        self._busy_after_s = busy_after_s
        self._waiting = (Line(), Line())  # demand, prefetch: no slot yet
        self._shared: dict[int, list[Want]] = {}  # block being read -> who else wants it
        self._foresight = Foresight(core.ledger, core.stats)
        self._records = RecordReads(
            core, self._landed, brought=self._brought, expired=self._expired, time_left=self._time_left
        )
        #: By volume: told of a segment whose file a read says is gone or cut, and of that read.
        self.suspects: dict[int, Callable[[Segment, Landing], None]] = {}
        self._layers = LayerReads(core, landing=self._landing, discard=self._discard, answer=self._answer)
        self._straight = StraightReads(core, landing=self._landing, answer=self._answer, again=self._again)

    @property
    def waiting(self) -> int:
        """Blocks that are wanted and have no slot yet."""
        return len(self._waiting[0]) + len(self._waiting[1])

    def start(self, transfer: Transfer) -> None:
        """Begin a get or a prefetch: answer what is known at once, submit what can run, queue the rest."""
        core, ledger = self._core, self._core.ledger
        now_s = core.clock.monotonic_s()
        assert transfer.chain is not None
        ids = ledger.find(transfer.chain, transfer.stop)
        ledger.wanted(ids, now_s)
        ledger.touch(transfer.chain, len(ids), now_s)
        mine = ids[transfer.start :]
        wanted = ~ledger.doomed(mine)
        ledger.hold(mine[wanted])
        if transfer.kind is TransferKind.GET:
            self._foresight.used(mine, now_s)
            ledger.dram.used(mine)
        copies: list[Want] = []
        table = ledger.table  # of blocks that are held, nothing in it changes before the next result is taken in
        columns = (one.tolist() for one in (mine, wanted, table.state[mine], table.segment[mine]))
        line, readable = self._waiting[transfer.kind is TransferKind.PREFETCH], self._readable(table.segment[mine])
        for index, (block, alive, state, segment) in enumerate(zip(*columns, strict=True), transfer.start):
            if alive and state == _EMPTY and segment in readable:
                line.add(Want(transfer, index, block))
            elif alive:
                self._send(Want(transfer, index, block), state, segment, copies)
                if len(copies) == _COPIES_AT_ONCE:
                    self._copy(copies, Tier.DRAM)
                    copies = []
            else:
                transfer.settle(index, Miss())
        for index in range(max(transfer.start, len(ids)), transfer.stop):
            transfer.settle(index, Miss())
        self._copy(copies, Tier.DRAM)
        if transfer.kind is TransferKind.GET and transfer.layers is None and len(ids) == transfer.stop:
            cold = int(np.count_nonzero(table.state[mine] == _EMPTY))
            if cold:
                self._bring_along(transfer, cold, self._foresight.neighbours(ids, now_s))

    def _bring_along(self, read: Transfer, cold: int, blocks: Ids) -> None:
        """Prefetch what lies behind the end of a read, as if its caller had asked for it. Where the read itself goes
        past a full DRAM, that pushes nothing out either. `cold`: blocks that it takes from the drive.
        """
        if read.direct and len(blocks):
            ledger = self._core.ledger
            free = ledger.dram.allocator.free_nbytes // ledger.geometry_of(int(blocks[0])).record_nbytes
            blocks = blocks[: max(0, free - cold)]
        if not len(blocks):
            return
        transfer = Transfer(
            TransferKind.PREFETCH,
            read.chain,
            0,
            len(blocks),
            buffers=None,
            submitted_s=read.submitted_s,
            deadline_s=None,
        )
        self._foresight.bringing(transfer, self._core.ledger.geometry_of(int(blocks[0])).record_nbytes)
        self._core.ledger.hold(blocks)
        for index, block in enumerate(blocks.tolist()):
            self._route(Want(transfer, index, block), [])

    def _readable(self, numbers: Ids) -> set[int]:
        """Those of these segments whose drive is read from now."""
        return {one for one in set(numbers.tolist()) if one != NOWHERE and self._core.volume_of(one).gate.is_open}

    def bring(self, blocks: Ids, now_s: float) -> Transfer:
        """Prefetch blocks by id, for the store itself (carrying them out of a segment). Those that find no room end
        in Busy.
        """
        transfer = Transfer(
            TransferKind.PREFETCH, None, 0, len(blocks), buffers=None, submitted_s=now_s, deadline_s=None
        )
        self._core.ledger.hold(blocks)
        for index, block in enumerate(blocks.tolist()):
            self._route(Want(transfer, index, block), [])
        self.pump(now_s)
        return transfer

    def pump(self, now_s: float) -> None:
        """Give slots to waiting reads, in order, demand first, and submit them; answer Busy to those that waited too
        long.
        """
        self._core.ledger.dram.expire(now_s)
        self._foresight.sweep(now_s)
        for volume in self._core.volumes:
            volume.gate.watch(now_s)
        for queue, io_class in zip(self._waiting, (IoClass.DEMAND, IoClass.PREFETCH), strict=True):
            landings: list[Landing] = []
            copies: list[Want] = []
            outbox = Outbox()
            at_once = _FIRST_WANTS
            while queue:
                want = next(iter(queue))
                if not want.transfer.is_open(want.index):
                    self._answer(queue.skip(), Busy())
                elif self._core.ledger.table.state[want.block] != _EMPTY or self._is_gone(want):
                    for one in queue.pop():
                        self._route(one, copies)
                elif want.transfer.layers is not None:
                    if not self._layers.start(want, outbox):
                        break
                    queue.skip()
                else:
                    batch = self._slotless(queue, at_once)
                    at_once *= 2
                    batch, straight = self._straight.take(queue, batch)
                    landings += straight
                    ids = np.array([one.block for one in batch], np.int32)
                    got = self._reserve(ids, batch[0].transfer) if batch else 0
                    if got:
                        ids = ids[:got]
                        landings += self._landings(batch[:got], ids, self._core.slots(ids))
                        for block in ids.tolist():
                            self._shared[block] = queue.pop()[1:]
                    if io_class is IoClass.DEMAND and len(landings) >= _READS_AT_ONCE:
                        landings = self._records.send(landings, io_class, outbox, more_to_come=True)
                        outbox.send()
                    if got < len(batch):
                        break
            if io_class is IoClass.PREFETCH:
                self._records.prefetch(landings, outbox)
            else:
                self._records.send(landings, io_class, outbox)
            self._copy(copies, Tier.DRAM)
            outbox.send()
            while queue and (io_class is IoClass.PREFETCH or now_s - queue.since_s >= self._busy_after_s):
                for one in queue.pop():
                    self._answer(one, Busy())

    def _reserve(self, ids: Ids, transfer: Transfer) -> int:
        """Slots for reads: how many of `ids` got one. A prefetch displaces no other that waits for its use. For demand,
        where nothing can be written and DRAM holds nothing but last copies, a few of those go: for as many slots as
        reads then hand on to each other.
        """
        ledger = self._core.ledger
        demand = transfer.kind is TransferKind.GET
        got = ledger.reserve_all(ids, DramState.READING, last_copies=False, awaited=not _is_asked_for(transfer))
        if got or not demand or ledger.can_write or self._slots_to_come:
            return got
        return ledger.reserve_all(ids[:_FIRST_WANTS], DramState.READING, last_copies=True)

    @property
    def _slots_to_come(self) -> bool:
        """Whether a slot becomes free without anything being lost: a read is under way, or what has a copy below is in
        use.
        """
        if self._shared:
            return True
        table = self._core.ledger.table
        return bool(((table.state == _READY) & (table.segment != NOWHERE) & (table.users > 0)).any())

    def _slotless(self, queue: Line, limit: int) -> list[Want]:
        """The first wants for the blocks at the head of `queue`, up to `limit`, that all need a slot of one size."""
        core, table = self._core, self._core.ledger.table
        wants = list(islice(queue, limit))
        ids = np.array([want.block for want in wants], np.int32)
        fit = (table.state[ids] == _EMPTY) & (table.segment[ids] != NOWHERE)
        runs = table.run[ids].tolist()
        run, transfer = runs[0], wants[0].transfer
        namespace, asked_for = core.entry_of(wants[0].block), _is_asked_for(transfer)
        for count, (want, fits, its_run) in enumerate(zip(wants, fit.tolist(), runs, strict=True)):
            if not fits or not want.transfer.is_open(want.index):
                return wants[:count]
            if its_run != run:
                if core.entry_of(want.block) is not namespace:
                    return wants[:count]
                run = its_run
            if want.transfer is not transfer:
                transfer = want.transfer
                if transfer.layers is not None or _is_asked_for(transfer) is not asked_for:
                    return wants[:count]
        return wants

    def _is_gone(self, want: Want) -> bool:
        return int(self._core.ledger.table.segment[want.block]) == NOWHERE

    def _route(self, want: Want, copies: list[Want]) -> None:
        """Send a held want where its block is at this moment."""
        table = self._core.ledger.table
        self._send(want, int(table.state[want.block]), int(table.segment[want.block]), copies)

    def _send(self, want: Want, state: int, segment: int, copies: list[Want]) -> None:
        prefetch = want.transfer.kind is TransferKind.PREFETCH
        if state == _READY:
            if prefetch:
                self._expect([want])
                self._answer(want, Hit(Tier.DRAM))
            else:
                copies.append(want)
        elif state == _READING:
            self._shared[want.block].append(want)
            if not prefetch:
                self._records.promote(want.block)
        elif state != _EMPTY or segment == NOWHERE:  # a put is filling it, or it has no copy
            self._answer(want, Miss())
        else:
            volume = self._core.volume_of(segment)
            if volume.gate.is_open:
                self._waiting[prefetch].add(want)
            else:
                self._answer(want, stopped(volume))

    def _again(self, want: Want) -> None:
        copies: list[Want] = []
        self._route(want, copies)
        self._copy(copies, Tier.DRAM)

    # -- from DRAM -----------------------------------------------------------------------------------------------------

    def _copy(self, wants: list[Want], tier: Tier) -> None:
        requests = []
        for at in range(0, len(wants), _COPY_BLOCKS):
            group = [
                Copy(want, self._core.slot(want.block), self._core.entry_of(want.block))
                for want in wants[at : at + _COPY_BLOCKS]
            ]
            call = IoRequest(IoKind.CALL, IoClass.DEMAND, finish=copying(group))
            call.tag = self._on_copied(group, tier)
            requests.append(call)
        if requests:
            self._core.engine.submit(requests)

    def _on_copied(self, group: list[Copy], tier: Tier) -> OnResult:
        def on_result(_: IoResult) -> None:
            for one in group:
                copy_ended(one)
                want = one.want
                if one.fault is None and want.transfer.is_open(want.index):
                    self._core.stats.dram_read_nbytes += wanted_nbytes(want)
                self._answer(want, one.fault or Hit(tier))

        return on_result

    # -- from the SSD --------------------------------------------------------------------------------------------------

    def _landing(self, want: Want, memory: Bytes, parts: range | None = None) -> Landing:
        (one,) = self._landings([want], np.array([want.block], np.int32), [memory])
        one.parts = parts
        return one

    def _landings(self, wants: list[Want], ids: Ids, memories: list[Bytes]) -> list[Landing]:
        """Landings of `wants` for the blocks `ids`, all of one namespace, in these memories."""
        core, table = self._core, self._core.ledger.table
        entry, keys = core.entry_of(wants[0].block), table.key[ids].tobytes()
        numbers = table.segment[ids].tolist()
        places: dict[int, tuple[Volume, Segment, bytes, bool]] = {}
        for number in set(numbers):
            volume = core.volume_of(number)
            segment = volume.space.segments[number]
            growing = segment.state is SegmentState.GROWING
            places[number] = volume, segment, volume.files.nonce(number), growing
        landings = []
        columns = wants, memories, numbers, table.page[ids].tolist(), table.put_seq[ids].tolist()
        for at, (want, memory, number, page, put_seq) in enumerate(zip(*columns, strict=True)):
            memory[:PAGE_NBYTES] = 0  # a completion that moved nothing must not find an old header here
            volume, segment, nonce, growing = places[number]
            key = keys[at * KEY_NBYTES : (at + 1) * KEY_NBYTES]
            offset = page * PAGE_NBYTES
            landings.append(Landing(want, memory, volume, segment, offset, nonce, key, entry, put_seq, None, growing))
        return landings

    def _time_left(self, group: list[Landing]) -> float | None:
        """Seconds until nobody waits for any of these any more; None if somebody waits without a deadline."""
        ends_s = [
            want.transfer.deadline_s for one in group for want in (one.want, *self._shared.get(one.want.block, ()))
        ]
        if any(end_s is None for end_s in ends_s):
            return None
        return max(0.0, max(end_s or 0.0 for end_s in ends_s) - self._core.clock.monotonic_s())

    def _expired(self, one: Landing) -> None:
        """The engine gave a read up at its deadline. Who came for the block since then has it read again."""
        block = one.want.block
        self._core.ledger.undo(block)
        others = self._shared.pop(block)
        for want in others:
            self._route(want, [])
        self._answer(one.want, Expired())

    def _brought(self, landings: list[Landing]) -> None:
        """Reads into slots have brought their blocks."""
        ids = np.array([one.want.block for one in landings], np.int32)
        self._core.ledger.landed(ids)
        copies: list[Want] = []
        ends: dict[Transfer, list[int]] = {}
        now_s = self._core.clock.monotonic_s()
        for one in landings:
            want, others = one.want, self._shared.pop(one.want.block)
            self._foresight.read(one.geometry.record_nbytes, now_s)
            if want.transfer.kind is TransferKind.PREFETCH:
                self._core.stats.prefetched_blocks += 1
                joined = any(other.transfer.kind is TransferKind.GET for other in others)
                self._foresight.brought(want.block, want.transfer, now_s, joined=joined)
                self._expect([want, *others])
            if one.fault is None:
                ends.setdefault(want.transfer, []).append(want.index)
            else:
                want.transfer.settle(want.index, one.fault)
            for other in others:
                self._route(other, copies)
        for transfer, indices in ends.items():
            transfer.settle_all(indices, Hit(Tier.SSD))
        self._core.ledger.let_go_all(ids)
        self._copy(copies, Tier.SSD)

    def _landed(self, one: Landing, *, lost: bool) -> None:
        """A read has ended otherwise, or in the caller's memory. `lost`: it did not bring the block, and will not the
        next time.
        """
        ledger, block, outcome = self._core.ledger, one.want.block, one.outcome
        assert outcome is not None, "a read ended without a verdict"
        if one.runs:
            if isinstance(outcome, Hit):
                self._foresight.read(one.geometry.record_nbytes, self._core.clock.monotonic_s())
            self._straight.landed(one, outcome)
            return
        others = self._shared.pop(block)
        if lost:
            self._discard(one, outcome)
        ledger.undo(block)
        for want in (one.want, *others):
            self._answer(want, outcome)

    def _discard(self, one: Landing, outcome: GetOutcome) -> None:
        """The copy on the SSD is not what it should be: never read it again."""
        core = self._core
        suspect = self.suspects.get(one.volume.number)
        if one.missing and suspect is not None:
            suspect(one.segment, one)
        elif not isinstance(outcome, Miss):
            self.condemn(one, getattr(outcome, "reason", str(outcome)))
        core.ledger.lost(
            one.want.block,
            core.clock.monotonic_s(),
            segment=one.segment.number,
            page=one.offset // PAGE_NBYTES,
        )

    def condemn(self, one: Landing, reason: str = "it could not be read in full") -> None:
        """The place of this record is bad, and its block has failed."""
        _log.warning("%s: %s; this copy is discarded", one.where, reason)
        ledger, table = self._core.ledger, self._core.ledger.table
        one.volume.bad.went_wrong(one.key, one.segment, one.nonce, one.offset, one.geometry.record_nbytes)
        block = one.want.block
        if not ledger.may_store(one.key) and table.run[block] != NOWHERE and bytes(table.key[block]) == one.key:
            ledger.bar(block)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _expect(self, wants: list[Want]) -> None:
        """A block is in DRAM that `wants` asked for: if none of them uses it, it is to stay until somebody does."""
        if all(_is_asked_for(want.transfer) for want in wants):
            self._core.ledger.dram.expect(wants[0].block, self._core.clock.monotonic_s())

    def _answer(self, want: Want, outcome: GetOutcome) -> None:
        want.transfer.settle(want.index, outcome)
        self._core.ledger.let_go(want.block)


def _is_asked_for(transfer: Transfer) -> bool:
    """Whether this is a caller's prefetch, not one of the store's own."""
    return transfer.kind is TransferKind.PREFETCH and transfer.chain is not None
