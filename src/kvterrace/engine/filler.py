"""The way in: the caller's blocks into slots of the arena, checksummed on the way, and ready to be written as they
lie.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import DramState, Ids
from kvterrace.engine.core import Core, NamespaceEntry, OnResult
from kvterrace.engine.transfers import Transfer
from kvterrace.format import passes
from kvterrace.format.checksum import crc32c
from kvterrace.format.passes import Filled
from kvterrace.format.record import RecordHeader, RecordKind, encode_header
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import KeyChain
from kvterrace.types import Busy, Present, PutOutcome, Rejected, Stored, Tier

__all__ = ["Filler"]

#: Plain: comparing what NumPy holds with an enum member takes many times as long.
_EMPTY = int(DramState.EMPTY)

_log = logging.getLogger(__name__)

#: Blocks that one call on a worker thread copies.
_FILL_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Fill:
    """One block on its way into its slot. The transfer holds the block until `_on_filled`. `item` is its native twin,
    None without one.
    """

    transfer: Transfer
    index: int
    block: int
    slot: Bytes
    entry: NamespaceEntry
    put_seq: int
    created_unix_ns: int
    done: bool = False
    item: Filled | None = None


@dataclass(slots=True, eq=False)
class _Queued:
    """A put in line: blocks `index..stop` are still to be taken."""

    transfer: Transfer
    index: int
    stop: int

    def give_up(self, outcome: PutOutcome) -> None:
        """Answer what was not taken yet."""
        for index in range(self.index, self.stop):
            self.transfer.settle(index, outcome)
        self.stop = self.index


class Filler:
    """Puts. Called under the store's lock, except for what runs on the engine's threads.

    Blocks of a chain are taken in order, so that what is taken is always a prefix; a transfer that finds no room
    waits in line.
    """

    def __init__(self, core: Core, busy_after_s: float) -> None:
        self._core = core
        self._busy_after_s = busy_after_s
        self._waiting: deque[_Queued] = deque()

    @property
    def waiting(self) -> int:
        """Puts that wait for room."""
        return len(self._waiting)

    def start(self, transfer: Transfer) -> None:
        """Put a transfer in line; `pump` takes its blocks."""
        core = self._core
        assert transfer.chain is not None
        known = core.ledger.find(transfer.chain, transfer.stop)  # what is there already is used by who puts it again
        core.ledger.touch(transfer.chain, len(known), core.clock.monotonic_s(), put=True)
        self._waiting.append(_Queued(transfer, transfer.start, transfer.stop))

    def invalidate(self, chain: KeyChain, start: int) -> None:
        """Puts that wait for room may hold what is invalid now: block `start` of `chain`, and what hangs on it."""
        for one in self._waiting:
            other = one.transfer.chain
            assert other is not None
            if start < one.stop and other.key(start) == chain.key(start):
                stop, one.index = one.index, max(one.index, start)
                one.give_up(Busy())
                one.index = stop

    def pump(self, now_s: float) -> None:
        """Take blocks of waiting puts, in order, until one finds no room; answer Busy to those that have waited too
        long.
        """
        waiting, self._waiting = self._waiting, deque()
        blocked = False
        for one in waiting:
            if not blocked:
                self._take(one, now_s)
            if one.index < one.stop and one.transfer.is_open(one.index):  # else all is taken, or given up by others
                if now_s >= self._limit_s(one.transfer):
                    one.give_up(Busy())
                else:
                    blocked = True
                    self._waiting.append(one)

    def _limit_s(self, transfer: Transfer) -> float:
        """Until when a put may wait for room."""
        if transfer.deadline_s is not None:
            return transfer.deadline_s
        return transfer.submitted_s + self._busy_after_s

    def _take(self, one: _Queued, now_s: float) -> None:
        """Take blocks from `one.index` on, up to the first that finds no room."""
        core, ledger, transfer = self._core, self._core.ledger, one.transfer
        chain = transfer.chain
        assert chain is not None
        fills: list[_Fill] = []
        created_unix_ns = int(core.clock.unix_s() * 1e9)
        while one.index < one.stop and transfer.is_open(one.index):
            known = ledger.find(chain, one.stop)  # anew each time: making room may have cut what hung behind
            there = ledger.on_ladder(known)
            whole = len(there) if there.all() else int(np.argmin(there))
            for block in known[one.index : whole].tolist():
                self._settle_present(transfer, one.index, block)
                one.index += 1
            if one.index == one.stop:
                break
            if whole < one.index or ledger.doomed(known[whole : whole + 1]).any():
                self._settle_orphans(one, whole, known, there)
                break
            if one.index < len(known):  # known, and without a copy
                block = int(known[one.index])
                ledger.hold(known[one.index : one.index + 1])
                put_seq = ledger.begin_fill(block)
                if put_seq is None:
                    ledger.let_go(block)
                    break
                fills.append(self._fill(transfer, one.index, block, put_seq, created_unix_ns))
                one.index += 1
                continue
            ids, first = ledger.begin_put(
                chain,
                one.index,
                one.stop,
                namespace=core.numbers[chain.namespace.digest],
                sequence=transfer.sequence,
                now_s=now_s,
            )
            for more, block in enumerate(ids.tolist()):
                fills.append(self._fill(transfer, one.index + more, block, first + more, created_unix_ns))
            one.index += len(ids)
            if ledger.turned_away and one.index < one.stop:
                one.give_up(Rejected("DRAM, the only tier, holds what is likelier to be wanted again"))
            break
        requests = [
            IoRequest(IoKind.CALL, IoClass.PREFETCH, finish=_filling(group), tag=self._on_filled(group))
            for group in (fills[at : at + _FILL_BLOCKS] for at in range(0, len(fills), _FILL_BLOCKS))
        ]
        if requests:
            core.engine.submit(requests)

    def _settle_present(self, transfer: Transfer, index: int, block: int) -> None:
        in_dram = self._core.ledger.table.state[block] != _EMPTY
        transfer.settle(index, Present(Tier.DRAM if in_dram else Tier.SSD))

    def _settle_orphans(self, one: _Queued, gap: int, known: Ids, there: npt.NDArray[np.bool_]) -> None:
        """The rest cannot be taken because of block `gap`, on which it hangs: that is not there, or it was invalidated
        and is still in use.
        """
        outcome: PutOutcome = Rejected(f"block {gap} of the chain is not on the ladder; put it first")
        if self._core.ledger.doomed(known[gap : gap + 1]).any():
            outcome = Busy()
        for index in range(one.index, min(one.stop, len(known))):
            if there[index]:
                self._settle_present(one.transfer, index, int(known[index]))
        one.give_up(outcome)

    def _fill(self, transfer: Transfer, index: int, block: int, put_seq: int, created_unix_ns: int) -> _Fill:
        core = self._core
        return _Fill(transfer, index, block, core.slot(block), core.entry_of(block), put_seq, created_unix_ns)

    def _on_filled(self, group: list[_Fill]) -> OnResult:
        def on_result(result: IoResult) -> None:
            core = self._core
            now_s = core.clock.monotonic_s()
            if result.crash is not None:
                _log.error("copying from a caller's buffer failed", exc_info=result.crash)
            ids = np.array([one.block for one in group], np.int32)
            doomed = core.ledger.doomed(ids).tolist()
            done = [one.done or (one.item is not None and one.item.done) for one in group]
            core.ledger.filled_all(ids[done], now_s)
            for one, filled, invalidated in zip(group, done, doomed, strict=True):
                if filled:
                    core.stats.dram_written_nbytes += one.entry.geometry.payload_nbytes
                    # invalidated while it was filled: it goes at once, and may be put again after that
                    one.transfer.settle(one.index, Busy() if invalidated else Stored(Tier.DRAM))
                else:
                    core.ledger.undo(one.block)  # given up before it was copied: settled already. Or the copy failed
                    one.transfer.settle(one.index, Rejected(f"the caller's buffer could not be read: {result.crash!r}"))
            core.ledger.let_go_all(ids)

        return on_result


def _filling(group: list[_Fill]) -> Callable[[IoResult], object]:
    """What a CALL does to fill slots: natively, or by the functions below."""
    native = passes.native()
    if native is None:
        return partial(_fill_all, group)
    for one in group:
        transfer, at = one.transfer, one.index - one.transfer.start
        if transfer.places is None:  # given up meanwhile
            continue
        chain = transfer.chain
        assert chain is not None
        one.item = native.Fill(
            one.slot,
            one.entry.shape,
            chain.key(one.index),
            chain.key(one.index - 1),
            one.index,
            transfer.sequence,
            one.put_seq,
            one.created_unix_ns,
            places=transfer.places,
            block=at,
            claims=transfer.claims,
            claim=at,
        )
    return cast("Callable[[IoResult], object]", native.FillHook([one.item for one in group if one.item is not None]))


def _fill_all(group: list[_Fill], _: IoResult) -> None:
    for one in group:
        _fill(one)


def _fill(one: _Fill) -> None:
    """On a worker thread: copy the parts in, checksum each while it is in cache, and put the header before them."""
    buffers = one.transfer.buffers
    if buffers is None or not one.transfer.begin_copy(one.index):
        return
    chain, entry = one.transfer.chain, one.entry
    assert chain is not None
    parts = entry.parts.copy()
    payload = one.slot[entry.geometry.header_nbytes :]
    sums = []
    try:
        for number, (offset, nbytes, _, _) in enumerate(parts.tolist()):
            part = payload[offset : offset + nbytes]
            buffers.copy_in(one.index - one.transfer.start, number, part)
            sums.append(crc32c(part))
    finally:
        one.transfer.end_copy(one.index)
    parts["crc32c"] = sums
    payload[entry.geometry.payload_nbytes :] = 0
    header = RecordHeader(
        RecordKind.BLOCK,
        one.put_seq,
        entry.digest,
        chain.key(one.index),
        chain.key(one.index - 1),
        entry.geometry.payload_nbytes,
        parts,
        depth=one.index,
        epoch=entry.epoch,
        sequence=one.transfer.sequence,
        created_unix_ns=one.created_unix_ns,
    )
    encode_header(header, one.slot)
    one.done = True
