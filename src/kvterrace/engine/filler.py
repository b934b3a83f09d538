"""The way in: the caller's blocks into slots of the arena, checksummed on the way, and ready to be written as they
lie.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import DramState, Ids
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
        """Put a transfer in line; `pump` takes its blocks."""
        core = self._core
        assert transfer.chain is not None
        known = core.ledger.find(transfer.chain, transfer.start)
        core.ledger.touch(transfer.chain, len(known), core.clock.monotonic_s())
        self._waiting.append((transfer, transfer.start))

    def pump(self, now_s: float) -> None:
        """Take blocks of waiting puts, in order, until one finds no room; answer Busy to those that have waited too
        long.
        """
        waiting, self._waiting = self._waiting, deque()
        blocked = False
        for transfer, at in waiting:
            index = at if blocked else self._take(transfer, at, now_s)
            if index == transfer.stop or not transfer.is_open(index):  # all taken, or given up by somebody else
                continue
            if now_s >= self._limit_s(transfer):
                transfer.give_up(Busy())
                continue
            blocked = True
            self._waiting.append((transfer, index))

    def _limit_s(self, transfer: Transfer) -> float:
        """Until when a put may wait for room."""
        if transfer.deadline_s is not None:
            return transfer.deadline_s
        return transfer.submitted_s + self._busy_after_s

    def _take(self, transfer: Transfer, index: int, now_s: float) -> int:
        """Take blocks from `index` on; returns the first that found no room (`stop` if none)."""
        core, ledger = self._core, self._core.ledger
        chain = transfer.chain
        assert chain is not None
        fills: list[_Fill] = []
        known = ledger.find(chain, transfer.stop)
        while index < transfer.stop and transfer.is_open(index):
            there = ledger.on_ladder(known)
            whole = len(there) if there.all() else int(np.argmin(there))
            if whole < index:  # what block `index` hangs on is not there: it could not be found
                self._answer_orphans(transfer, index, whole, known, there)
                index = transfer.stop
                break
            for block in known[index:whole].tolist():
                in_dram = ledger.table.state[block] != DramState.EMPTY
                transfer.settle(index, Present(Tier.DRAM if in_dram else Tier.SSD))
                index += 1
            if index == transfer.stop:
                break
            if index < len(known) and ledger.doomed(known[index : index + 1]).any():
                self._answer_orphans(transfer, index, whole, known, there)
                index = transfer.stop
                break
            if index < len(known):  # known, and without a copy
                block = int(known[index])
                ledger.hold(known[index : index + 1])
                first = ledger.begin_fill(block)
                if first is None:
                    ledger.let_go(block)
                    break
                fills.append(self._fill(transfer, index, block, first))
                index += 1
            else:
                ids, put_seq = ledger.begin_put(
                    chain,
                    index,
                    transfer.stop,
                    namespace=core.numbers[chain.namespace.digest],
                    sequence=transfer.sequence,
                    now_s=now_s,
                )
                for more, block in enumerate(ids.tolist()):
                    fills.append(self._fill(transfer, index + more, block, put_seq + more))
                index += len(ids)
                break
            known = ledger.find(chain, transfer.stop)  # making room may have cut what hung behind
        ledger.touch(chain, index, now_s)
        requests = [
            IoRequest(IoKind.CALL, IoClass.PREFETCH, finish=partial(_fill_all, group), tag=self._on_filled(group))
            for group in (fills[at : at + _FILL_BLOCKS] for at in range(0, len(fills), _FILL_BLOCKS))
        ]
        if requests:
            core.engine.submit(requests)
        return index

    def _answer_orphans(
        self, transfer: Transfer, index: int, gap: int, known: Ids, there: npt.NDArray[np.bool_]
    ) -> None:
        """Blocks from `index` on cannot be taken because of block `gap`: it is not there, or it was invalidated and is
        still in use.
        """
        ledger = self._core.ledger
        outcome: PutOutcome = Rejected(f"block {gap} of the chain is not on the ladder; put it first")
        if ledger.doomed(known[gap : gap + 1]).any():
            outcome = Busy()
        for at in range(index, transfer.stop):
            if at < len(known) and there[at]:
                in_dram = ledger.table.state[known[at]] != DramState.EMPTY
                transfer.settle(at, Present(Tier.DRAM if in_dram else Tier.SSD))
            else:
                transfer.settle(at, outcome)

    def _fill(self, transfer: Transfer, index: int, block: int, put_seq: int) -> _Fill:
        header = self._header(transfer, index, put_seq)
        return _Fill(transfer, index, block, self._core.slot(block), header)

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
            doomed = core.ledger.doomed(np.array([one.block for one in group], np.int32)).tolist()
            for one, invalidated in zip(group, doomed, strict=True):
                if one.done:
                    core.ledger.filled(one.block, now_s)
                    core.stats.dram_written_nbytes += one.header.payload_nbytes
                    # invalidated while it was filled: it goes at once, and may be put again after that
                    one.transfer.settle(one.index, Busy() if invalidated else Stored(Tier.DRAM))
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
