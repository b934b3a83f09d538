"""The way up: blocks from DRAM or SSD into the caller's buffers.

A read lands in a slot of the arena, is verified there on the thread that completed it, and is scattered to the caller
from there;
the slot stays as the promoted copy. So bytes are copied once, and requests for the same block share one read.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.format.record import (
    PAGE_NBYTES,
    BadRecord,
    StaleRecord,
    check_identity,
    decode_header,
    verify_parts,
)
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.types import Busy, Corrupt, DeviceFailed, GetOutcome, Hit, Miss, Stale, Tier

__all__ = ["Reader"]

_log = logging.getLogger(__name__)

#: Reads that lie one behind the other are merged up to this size.
_MERGE_NBYTES = 4 << 20
#: Blocks that one call on a worker thread copies.
_COPY_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Want:
    """One block that a transfer waits for. The transfer holds the block (`ledger.hold`) until the want is answered."""

    transfer: Transfer
    index: int
    block: int


@dataclass(slots=True, eq=False)
class _Landing:
    """A record on its way into `memory`, and what it must turn out to be."""

    want: _Want
    memory: Bytes
    where: str
    offset: int
    nonce: bytes
    key: bytes
    namespace: bytes
    epoch: int
    put_seq: int
    geometry: Geometry
    parts: range | None = None
    outcome: GetOutcome | None = None


class Reader:
    """Gets and prefetches. Called under the store's lock, except for what runs on the engine's threads."""

    def __init__(self, core: Core, busy_after_s: float) -> None:
        self._core = core
        self._busy_after_s = busy_after_s
        self._waiting: tuple[deque[_Want], deque[_Want]] = (deque(), deque())  # demand, prefetch: no slot yet
        self._shared: dict[int, list[_Want]] = {}  # block being read -> who else wants it

    @property
    def waiting(self) -> int:
        """Wants that have no slot yet."""
        return len(self._waiting[0]) + len(self._waiting[1])

    def start(self, transfer: Transfer) -> None:
        """Begin a get or a prefetch: answer what is known at once, submit what can run, queue the rest."""
        core, ledger = self._core, self._core.ledger
        now_s = core.clock.monotonic_s()
        assert transfer.chain is not None
        ids = ledger.find(transfer.chain, transfer.stop)
        ledger.touch(transfer.chain, min(transfer.stop, len(ids)), now_s)
        copies: list[_Want] = []
        for index in range(transfer.start, transfer.stop):
            if index >= len(ids) or ledger.is_doomed(int(ids[index])):
                self._settle(transfer, index, Miss())
                continue
            want = _Want(transfer, index, int(ids[index]))
            ledger.hold(ids[index : index + 1])
            self._route(want, copies)
        self._copy(copies, Tier.DRAM)
        self.pump(now_s)

    def bring(self, blocks: Ids, now_s: float) -> Transfer:
        """Prefetch blocks by id, for the store itself (carrying them out of a segment). Those that find no room end
        in Busy.
        """
        transfer = Transfer(
            TransferKind.PREFETCH, None, 0, len(blocks), buffers=None, submitted_s=now_s, deadline_s=None
        )
        self._core.ledger.hold(blocks)
        for index, block in enumerate(blocks.tolist()):
            self._route(_Want(transfer, index, block), [])
        self.pump(now_s)
        return transfer

    def pump(self, now_s: float) -> None:
        """Give slots to waiting reads, in order, demand first, and submit them; answer Busy to those that waited too
        long.
        """
        for queue, io_class in zip(self._waiting, (IoClass.DEMAND, IoClass.PREFETCH), strict=True):
            landings: list[_Landing] = []
            copies: list[_Want] = []
            requests: list[IoRequest] = []
            while queue:
                want = queue[0]
                if not want.transfer.is_open(want.index):
                    self._answer(want, Busy())
                elif self._core.ledger.table.state[want.block] != DramState.EMPTY or self._is_gone(want):
                    self._route(want, copies)
                elif want.transfer.layers is not None:
                    if not self._land_layers(want, requests):
                        break
                elif self._core.ledger.reserve(want.block, DramState.READING):
                    landings.append(self._landing(want, self._core.slot(want.block)))
                    self._shared[want.block] = []
                else:
                    break
                queue.popleft()
            requests += self._merge(landings, io_class)
            self._copy(copies, Tier.DRAM)
            if requests:
                self._core.engine.submit(requests)
            while queue and (
                io_class is IoClass.PREFETCH or now_s - queue[0].transfer.submitted_s >= self._busy_after_s
            ):
                self._answer(queue.popleft(), Busy())

    def _is_gone(self, want: _Want) -> bool:
        return int(self._core.ledger.table.segment[want.block]) == NOWHERE

    def _route(self, want: _Want, copies: list[_Want]) -> None:
        """Send a held want where its block is at this moment."""
        table = self._core.ledger.table
        prefetch = want.transfer.kind is TransferKind.PREFETCH
        match DramState(int(table.state[want.block])):
            case DramState.READY if prefetch:
                self._answer(want, Hit(Tier.DRAM))
            case DramState.READY:
                copies.append(want)
            case DramState.READING:
                self._shared[want.block].append(want)
            case DramState.EMPTY if not self._is_gone(want):
                self._waiting[prefetch].append(want)
            case DramState.EMPTY | DramState.FILLING:
                self._answer(want, Miss())

    # -- from DRAM -----------------------------------------------------------------------------------------------------

    def _copy(self, wants: list[_Want], tier: Tier) -> None:
        requests = []
        for at in range(0, len(wants), _COPY_BLOCKS):
            group = [(want, self._payload(want.block)) for want in wants[at : at + _COPY_BLOCKS]]
            call = IoRequest(IoKind.CALL, IoClass.DEMAND, finish=partial(_scatter_all, group))
            call.tag = self._on_copied(group, tier)
            requests.append(call)
        if requests:
            self._core.engine.submit(requests)

    def _payload(self, block: int) -> Bytes:
        return self._core.slot(block)[self._core.entry_of(block).geometry.header_nbytes :]

    def _on_copied(self, group: list[tuple[_Want, Bytes]], tier: Tier) -> OnResult:
        def on_result(result: IoResult) -> None:
            if result.crash is not None:
                _log.error("copying to a caller's buffer failed", exc_info=result.crash)
            for want, _ in group:
                if result.crash is not None:
                    self._answer(want, DeviceFailed("the caller's buffer", repr(result.crash)))
                    continue
                if want.transfer.is_open(want.index):
                    self._core.stats.dram_read_nbytes += _wanted_nbytes(want)
                self._answer(want, Hit(tier))

        return on_result

    # -- from the SSD --------------------------------------------------------------------------------------------------

    def _landing(self, want: _Want, memory: Bytes, parts: range | None = None) -> _Landing:
        core, table = self._core, self._core.ledger.table
        assert core.files is not None
        number, offset = int(table.segment[want.block]), int(table.page[want.block]) * PAGE_NBYTES
        entry = core.entry_of(want.block)
        memory[:PAGE_NBYTES] = 0  # a completion that moved nothing must not find an old header here
        return _Landing(
            want,
            memory,
            core.files.where(number, offset),
            offset,
            core.files.nonce(number),
            core.ledger.key_of(want.block),
            entry.digest,
            entry.epoch,
            int(table.put_seq[want.block]),
            entry.geometry,
            parts,
        )

    def _merge(self, landings: list[_Landing], io_class: IoClass) -> list[IoRequest]:
        """One request for each stretch of records that lie one behind the other in a segment."""
        core, table = self._core, self._core.ledger.table
        assert core.files is not None or not landings
        landings.sort(key=lambda one: (int(table.segment[one.want.block]), one.offset))
        groups: list[list[_Landing]] = []
        nbytes = end = 0
        for one in landings:
            last = groups[-1][-1] if groups else None
            joins = last is not None and last.nonce == one.nonce and end == one.offset
            if joins and nbytes + one.memory.nbytes <= _MERGE_NBYTES:
                groups[-1].append(one)
                nbytes += one.memory.nbytes
            else:
                groups.append([one])
                nbytes = one.memory.nbytes
            end = one.offset + one.memory.nbytes
        requests = []
        for group in groups:
            assert core.files is not None
            number = int(table.segment[group[0].want.block])
            core.stats.ssd_read_requests += 1
            requests.append(
                IoRequest(
                    IoKind.READ,
                    io_class,
                    core.files.file(number),
                    group[0].offset,
                    [one.memory for one in group],
                    finish=partial(_finish_read, group),
                    tag=self._on_read(group),
                )
            )
        return requests

    def _on_read(self, group: list[_Landing]) -> OnResult:
        def on_result(result: IoResult) -> None:
            self._core.stats.ssd_read_nbytes += result.nbytes
            if result.crash is not None:
                _log.error("verifying or scattering a read failed", exc_info=result.crash)
            for one in group:
                if result.crash is not None and one.outcome is None:
                    one.outcome = DeviceFailed(one.where, repr(result.crash))
                self._landed(one)

        return on_result

    def _landed(self, one: _Landing) -> None:
        core, ledger, block = self._core, self._core.ledger, one.want.block
        outcome = one.outcome
        assert outcome is not None, "a read ended without a verdict"
        others = self._shared.pop(block)
        if isinstance(outcome, Hit):
            ledger.landed(block)
            if one.want.transfer.kind is TransferKind.PREFETCH:
                core.stats.prefetched_blocks += 1
            self._answer(one.want, outcome)
            copies: list[_Want] = []
            for want in others:
                self._route(want, copies)
            self._copy(copies, Tier.SSD)
            return
        self._discard(one, outcome)
        ledger.undo(block)
        for want in (one.want, *others):
            self._answer(want, outcome)

    def _discard(self, one: _Landing, outcome: GetOutcome) -> None:
        """The copy on the SSD is not what it should be: never read it again."""
        _log.warning("%s: %s; this copy is discarded", one.where, getattr(outcome, "reason", outcome))
        self._core.ledger.lost(one.want.block, self._core.clock.monotonic_s())

    def _land_layers(self, want: _Want, requests: list[IoRequest]) -> bool:
        """Read the header and the parts of the wanted layers into staging; False if there is no room for it now."""
        core, ledger = self._core, self._core.ledger
        entry, layers = core.entry_of(want.block), want.transfer.layers
        assert layers is not None and core.files is not None and entry.namespace is not None
        layout = entry.namespace.layout
        parts = range(layers.start * layout.parts_per_layer, layers.stop * layout.parts_per_layer)
        header_nbytes = entry.geometry.header_nbytes
        first = int(entry.parts["offset"][parts.start]) // PAGE_NBYTES * PAGE_NBYTES
        last = int(entry.parts["offset"][parts.stop - 1]) + int(entry.parts["nbytes"][parts.stop - 1])
        span = -(-(last - first) // PAGE_NBYTES) * PAGE_NBYTES
        staging = ledger.reserve_extent(header_nbytes + span)
        if staging is None:
            return False
        memory = core.arena.view(staging, header_nbytes + span)
        landing = self._landing(want, memory, parts)
        number = int(ledger.table.segment[want.block])
        results: list[IoResult] = []

        def on_result(result: IoResult) -> None:
            core.stats.ssd_read_nbytes += result.nbytes
            results.append(result)
            if len(results) == 2:
                call = IoRequest(IoKind.CALL, IoClass.DEMAND, finish=finish, tag=on_finished)
                core.engine.submit([call])

        def finish(_: IoResult) -> None:
            for result in results:
                if not result.complete:
                    landing.outcome = _device_failed(landing.where, result)
                    return
            _verify(landing, memory[header_nbytes:], first)

        def on_finished(result: IoResult) -> None:
            ledger.dram.allocator.free(staging)
            outcome = landing.outcome or DeviceFailed(landing.where, repr(result.crash))
            if not isinstance(outcome, Hit):
                self._discard(landing, outcome)
            self._answer(want, outcome)

        file = core.files.file(number)
        for at, piece in (
            (landing.offset, memory[:header_nbytes]),
            (landing.offset + header_nbytes + first, memory[header_nbytes:]),
        ):
            core.stats.ssd_read_requests += 1
            requests.append(IoRequest(IoKind.READ, IoClass.DEMAND, file, at, [piece], tag=on_result))
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _answer(self, want: _Want, outcome: GetOutcome) -> None:
        self._settle(want.transfer, want.index, outcome)
        self._core.ledger.let_go(want.block)

    def _settle(self, transfer: Transfer, index: int, outcome: GetOutcome) -> None:
        transfer.settle(index, outcome)


def _wanted_nbytes(want: _Want) -> int:
    buffers, chain = want.transfer.buffers, want.transfer.chain
    if buffers is None or chain is None:
        return 0
    sizes = chain.namespace.layout.part_nbytes
    return sum(sizes[buffers.parts.start : buffers.parts.stop])


def _scatter_all(group: list[tuple[_Want, Bytes]], _: IoResult) -> None:
    for want, payload in group:
        _scatter(want, payload)


def _scatter(want: _Want, payload: Bytes, base: int = 0) -> bool:
    """Copy the wanted parts from `payload` (from payload offset `base` on) to the caller, unless the want is settled
    already.
    """
    transfer = want.transfer
    buffers = transfer.buffers
    if buffers is None or transfer.chain is None or not transfer.begin_copy(want.index):
        return False
    sizes = transfer.chain.namespace.layout.part_nbytes
    at = sum(sizes[: buffers.parts.start]) - base
    for number, part in enumerate(buffers.parts):
        buffers.copy_out(want.index - transfer.start, number, payload[at : at + sizes[part]])
        at += sizes[part]
    return True


def _finish_read(group: list[_Landing], result: IoResult) -> None:
    """On the thread that completed the read: verify each record, and scatter those that are right."""
    end = 0
    for one in group:
        end += one.memory.nbytes
        if result.error is not None or end > result.nbytes:
            one.outcome = _device_failed(one.where, result)
            continue
        _verify(one, one.memory[one.geometry.header_nbytes :], 0)


def _device_failed(where: str, result: IoResult) -> DeviceFailed:
    reason = (
        str(result.error) if result.error is not None else f"short read: {result.nbytes} of {result.wanted_nbytes} B"
    )
    return DeviceFailed(where, reason)


def _verify(one: _Landing, payload: Bytes, base: int) -> None:
    """Set the outcome of a landing whose bytes (header, then `payload` from its offset `base` on) are in memory;
    scatter if right.
    """
    header = decode_header(one.memory)
    fault: BadRecord | StaleRecord | None
    if isinstance(header, BadRecord):
        fault = header
    elif (header.header_nbytes, header.payload_nbytes) != (one.geometry.header_nbytes, one.geometry.payload_nbytes):
        fault = BadRecord(f"a record of {header.payload_nbytes} B in {len(header.parts)} parts, of another layout")
    else:
        fault = check_identity(
            header,
            key=one.key,
            namespace=one.namespace,
            epoch=one.epoch,
            put_seq=one.put_seq,
            nonce=one.nonce,
            offset=one.offset,
        ) or verify_parts(header, payload, one.parts, base=base)
    if isinstance(fault, StaleRecord):
        one.outcome = Stale(one.where, fault.reason)
    elif isinstance(fault, BadRecord):
        one.outcome = Corrupt(one.where, fault.reason)
    else:
        _scatter(one.want, payload, base)
        one.outcome = Hit(Tier.SSD)
