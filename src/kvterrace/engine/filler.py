"""The way in: the caller's blocks into slots of the arena, checksummed on the way, and ready to be written as they
lie.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import NOWHERE, DramState
from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.transfers import Transfer
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import RecordHeader, RecordKind, encode_header
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.types import Busy, Present, PutOutcome, Rejected, Stored, Tier

__all__ = ["Filler"]

_log = logging.getLogger(__name__)

#: Blocks that one call on a worker thread copies.
_FILL_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Fill:
    """One block on its way into its slot. The transfer holds the block until `_on_filled`."""

    transfer: Transfer
    index: int
    block: int
    slot: Bytes
    header: RecordHeader
    done: bool = False


class Filler:
    """Puts. Called under the store's lock, except for what runs on the engine's threads.

    Blocks of a chain are taken in order, so that what is taken is always a prefix; a transfer that finds no room
    waits in line.
    """

    def __init__(self, core: Core, busy_after_s: float) -> None:
        self._core = core
        self._busy_after_s = busy_after_s
        self._waiting: deque[tuple[Transfer, int]] = deque()  # with the index of the next block to take

    @property
    def waiting(self) -> int:
        """Puts that wait for room."""
        return len(self._waiting)

    def start(self, transfer: Transfer) -> None:
        """Begin a put. Its blocks are taken at once as far as there is room and nobody stands in line before it."""
        core = self._core
        now_s = core.clock.monotonic_s()
        assert transfer.chain is not None
        known = core.ledger.find(transfer.chain, transfer.start)
        core.ledger.touch(transfer.chain, len(known), now_s)
        self._waiting.append((transfer, transfer.start))
        self.pump(now_s)

    def pump(self, now_s: float) -> None:
        """Take blocks of waiting puts, in order; answer Busy to those that have waited too long."""
        while self._waiting:
            transfer, index = self._waiting[0]
            index = self._take(transfer, index, now_s)
            if index < transfer.stop:
                self._waiting[0] = (transfer, index)
                break
            self._waiting.popleft()
        while self._waiting:
            transfer, _ = self._waiting[0]
            limit_s = transfer.submitted_s + self._busy_after_s
            if transfer.deadline_s is not None:
                limit_s = min(limit_s, transfer.deadline_s)
            if now_s < limit_s:
                return
            transfer.give_up(Busy())
            self._waiting.popleft()

    def _take(self, transfer: Transfer, index: int, now_s: float) -> int:
        """Take blocks from `index` on; returns the first that found no room (`stop` if none)."""
        core, ledger, table = self._core, self._core.ledger, self._core.ledger.table
        assert transfer.chain is not None
        namespace = core.numbers[transfer.chain.namespace.digest]
        fills: list[_Fill] = []
        while index < transfer.stop and transfer.is_open(index):
            block = ledger.insert(transfer.chain, index, namespace=namespace, sequence=transfer.sequence, now_s=now_s)
            if block is None:
                for rest in range(index, transfer.stop):
                    transfer.settle(
                        rest, Rejected(f"block {index - 1} of the chain is not on the ladder; put it first")
                    )
                index = transfer.stop
                break
            outcome: PutOutcome | None = None
            if ledger.is_doomed(block):
                outcome = Busy()
            elif table.state[block] != DramState.EMPTY:
                outcome = Present(Tier.DRAM)
            elif table.segment[block] != NOWHERE:
                outcome = Present(Tier.SSD)
            if outcome is not None:
                transfer.settle(index, outcome)
                index += 1
                continue
            ids = np.array([block], np.int32)
            ledger.hold(ids)
            put_seq = ledger.begin_fill(block)
            if put_seq is None:
                ledger.let_go(block)
                break
            fills.append(_Fill(transfer, index, block, core.slot(block), self._header(transfer, index, put_seq)))
            index += 1
        ledger.touch(transfer.chain, index, now_s)
        requests = []
        for at in range(0, len(fills), _FILL_BLOCKS):
            group = fills[at : at + _FILL_BLOCKS]
            requests.append(
                IoRequest(
                    IoKind.CALL,
                    IoClass.PREFETCH,
                    finish=partial(_fill_all, group),
                    tag=self._on_filled(group),
                )
            )
        if requests:
            core.engine.submit(requests)
        return index

    def _header(self, transfer: Transfer, index: int, put_seq: int) -> RecordHeader:
        core, chain = self._core, transfer.chain
        assert chain is not None
        entry = core.namespaces[core.numbers[chain.namespace.digest]]
        return RecordHeader(
            RecordKind.BLOCK,
            put_seq,
            entry.digest,
            chain.key(index),
            chain.key(index - 1),
            entry.geometry.payload_nbytes,
            entry.parts,
            depth=index,
            epoch=entry.epoch,
            sequence=transfer.sequence,
            created_unix_ns=int(core.clock.unix_s() * 1e9),
        )

    def _on_filled(self, group: list[_Fill]) -> OnResult:
        def on_result(result: IoResult) -> None:
            core = self._core
            now_s = core.clock.monotonic_s()
            if result.crash is not None:
                _log.error("copying from a caller's buffer failed", exc_info=result.crash)
            for one in group:
                if one.done:
                    core.ledger.filled(one.block, now_s)
                    core.stats.dram_written_nbytes += one.header.payload_nbytes
                    one.transfer.settle(one.index, Stored(Tier.DRAM))
                else:
                    core.ledger.undo(one.block)
                    one.transfer.settle(one.index, Rejected(f"the caller's buffer could not be read: {result.crash!r}"))
            for one in reversed(group):
                core.ledger.let_go(one.block)

        return on_result


def _fill_all(group: list[_Fill], _: IoResult) -> None:
    for one in group:
        _fill(one)


def _fill(one: _Fill) -> None:
    """On a worker thread: copy the parts in, checksum each while it is in cache, and put the header before them."""
    buffers = one.transfer.buffers
    if buffers is None or not one.transfer.begin_copy(one.index):
        return
    parts = one.header.parts.copy()
    payload = one.slot[one.header.header_nbytes :]
    for number, (offset, nbytes, _, _) in enumerate(parts.tolist()):
        part = payload[offset : offset + nbytes]
        buffers.copy_in(one.index - one.transfer.start, number, part)
        parts["crc32c"][number] = crc32c(part)
    payload[one.header.payload_nbytes :] = 0
    encode_header(replace(one.header, parts=parts), one.slot)
    one.done = True
