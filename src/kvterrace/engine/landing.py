"""Records on their way up, and what an engine's threads do with them: verify them where they land, then scatter.

Done by the native passes where they are there, and by the functions here where not, with the same outcomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import cast

from kvterrace.buffers import Bytes
from kvterrace.engine.blocks import Geometry
from kvterrace.engine.core import NamespaceEntry
from kvterrace.engine.space import Segment
from kvterrace.engine.transfers import Transfer
from kvterrace.engine.volume import Volume
from kvterrace.format import passes
from kvterrace.format.passes import Copied, Landed, Verdict, check_layout, fault_of
from kvterrace.format.record import BadRecord, StaleRecord, check_identity, decode_header, verify_parts
from kvterrace.health import breaker
from kvterrace.io.base import IoResult
from kvterrace.types import Corrupt, DeviceFailed, GetOutcome, Hit, Miss, Stale, Tier

__all__ = [
    "Copy",
    "Landing",
    "Want",
    "copy_ended",
    "copying",
    "finish_read",
    "is_lost",
    "not_read",
    "read_ended",
    "reading",
    "scatter_all",
    "verify",
    "verifying",
    "wanted_nbytes",
]

_log = logging.getLogger(__name__)

Finish = Callable[[IoResult], object]


@dataclass(slots=True, eq=False)
class Want:
    """One block that a transfer waits for. The transfer holds the block (`ledger.hold`) until the want is answered."""

    transfer: Transfer
    index: int
    block: int


@dataclass(slots=True, eq=False)
class Landing:
    """A record on its way into `memory`, and what it must turn out to be."""

    want: Want
    memory: Bytes
    volume: Volume
    segment: Segment
    offset: int
    nonce: bytes
    key: bytes
    entry: NamespaceEntry
    put_seq: int
    parts: range | None = None
    growing: bool = False  # another process writes the segment: wrong bytes there are no damage, but not there yet
    outcome: GetOutcome | None = None
    fault: DeviceFailed | None = None  # of the caller's buffer: the block itself is fine
    missing: bool = False  # the file ended before the record did, or was not there
    verdict: Verdict | None = None  # of the native pass, until it is taken in

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return self.volume.files.where(self.segment.number, self.offset)

    @property
    def namespace(self) -> bytes:
        """Digest of its namespace."""
        return self.entry.digest

    @property
    def epoch(self) -> int:
        """Generation of its namespace."""
        return self.entry.epoch

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        return self.entry.geometry


@dataclass(slots=True, eq=False)
class Copy:
    """A block on its way from a slot to the caller. `item` is its native twin, None without one."""

    want: Want
    slot: Bytes
    entry: NamespaceEntry
    fault: DeviceFailed | None = None
    item: Copied | None = None


def wanted_nbytes(want: Want) -> int:
    """Bytes that the caller gets of this block."""
    buffers, chain = want.transfer.buffers, want.transfer.chain
    if buffers is None or chain is None:
        return 0
    sizes = chain.namespace.layout.part_nbytes
    return sum(sizes[buffers.parts.start : buffers.parts.stop])


def scatter_all(group: list[Copy], _: IoResult) -> None:
    """On an engine's thread: copy blocks from their slots to the callers."""
    for one in group:
        one.fault = _scatter(one.want, one.slot[one.entry.geometry.header_nbytes :])


def _scatter(want: Want, payload: Bytes, base: int = 0) -> DeviceFailed | None:
    """Copy the wanted parts from `payload` (from payload offset `base` on) to the caller, unless the want is settled
    already. What goes wrong with the caller's buffer is the caller's fault, and no other reader's.
    """
    transfer = want.transfer
    buffers = transfer.buffers
    if buffers is None or transfer.chain is None or not transfer.begin_copy(want.index):
        return None
    try:
        sizes = transfer.chain.namespace.layout.part_nbytes
        at = sum(sizes[: buffers.parts.start]) - base
        buffers.copy_out(want.index - transfer.start, payload[at:])
    except Exception as error:  # noqa: BLE001 - whatever the caller's memory is made of
        _log.error("copying to a caller's buffer failed", exc_info=error)
        return DeviceFailed("the caller's buffer", repr(error))
    finally:
        transfer.end_copy(want.index)
    return None


def copying(group: list[Copy]) -> Finish:
    """What a CALL does to copy blocks from their slots to the callers; `copy_ended` takes in how it went."""
    native = passes.native()
    if native is None:
        return partial(scatter_all, group)
    for one in group:
        transfer, at = one.want.transfer, one.want.index - one.want.transfer.start
        if transfer.places is not None:  # else it was settled meanwhile
            one.item = native.Copy(
                one.slot, one.entry.shape, places=transfer.places, block=at, claims=transfer.claims, claim=at
            )
    return cast("Finish", native.CopyHook([one.item for one in group if one.item is not None]))


def copy_ended(one: Copy) -> None:
    """Under the store's lock, when the result of `copying` is there: let go of the caller's memory."""
    if one.item is not None:
        assert one.item.copied or not one.want.transfer.is_open(one.want.index), "a block was not copied"
        one.item = None


def reading(group: list[Landing]) -> Finish:
    """What a READ does when it has ended: verify each record, and scatter those that are right. `read_ended` takes in
    how it went.
    """
    native = passes.native()
    if native is None:
        return partial(finish_read, group)
    return cast("Finish", native.ReadHook([_native_landing(native, one, 0) for one in group]))


def verifying(one: Landing, base: int) -> Finish:
    """What a CALL does to verify and scatter one record whose payload is in memory from its offset `base` on.
    `read_ended` takes in how it went.
    """
    native = passes.native()
    if native is None:
        return lambda _: verify(one, one.memory[one.geometry.header_nbytes :], base)
    return cast("Finish", native.VerifyHook([_native_landing(native, one, base)]))


def _native_landing(native: ModuleType, one: Landing, base: int) -> object:
    transfer, at = one.want.transfer, one.want.index - one.want.transfer.start
    one.verdict = native.Landing(
        one.memory,
        one.entry.shape,
        one.key,
        one.put_seq,
        one.nonce,
        one.offset,
        places=transfer.places,
        block=at,
        claims=transfer.claims,
        claim=at,
        parts=None if one.parts is None else (one.parts.start, one.parts.stop),
        base=base,
    )
    return one.verdict


def read_ended(one: Landing, result: IoResult) -> None:
    """Under the store's lock, when the result of `reading` or `verifying` is there: set the outcome."""
    verdict, one.verdict = one.verdict, None
    if verdict is None:
        return  # the functions of Python set it
    if verdict.landed == Landed.MISSING:
        not_read(one, result)
    elif verdict.landed == Landed.UNSEEN:
        one.outcome = DeviceFailed(one.where, f"its bytes were not looked at: {result.crash!r}")
    else:
        one.outcome = _outcome_of(one, fault_of(verdict, one))
        want = one.want
        hit = isinstance(one.outcome, Hit) and want.transfer.buffers is not None
        assert verdict.copied or not hit or not want.transfer.is_open(want.index), "a block was not copied"


def finish_read(group: list[Landing], result: IoResult) -> None:
    """On the thread that completed the read: verify each record, and scatter those that are right."""
    end = 0
    for one in group:
        end += one.memory.nbytes
        if result.error is not None or result.expired or end > result.nbytes:
            not_read(one, result)
            continue
        verify(one, one.memory[one.geometry.header_nbytes :], 0)


def not_read(one: Landing, result: IoResult) -> None:
    """Set the outcome of a block whose read ended in an error, or short."""
    gone = isinstance(result.error, FileNotFoundError)
    one.missing = gone or result.error is None
    if gone or (one.growing and result.error is None):
        one.outcome = Miss()
        return
    short = f"short read: {result.nbytes} of {result.wanted_nbytes} B"
    one.outcome = DeviceFailed(one.where, short if result.error is None else str(result.error))


def is_lost(one: Landing, error: OSError | None) -> bool:
    """Whether the copy that a read, which ended in `error`, was to bring is to be given up. Not if it is right, if it
    was half-written, or if the drive is to blame rather than the place.
    """
    if isinstance(one.outcome, Miss):
        return error is not None  # the file is gone
    media = error is not None and breaker.fault_of(error) is breaker.Fault.MEDIA
    return one.missing or media or isinstance(one.outcome, Corrupt | Stale)


def verify(one: Landing, payload: Bytes, base: int) -> None:
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
        sizes = one.entry.part_nbytes
        fault = check_identity(
            header,
            key=one.key,
            namespace=one.namespace,
            epoch=one.epoch,
            put_seq=one.put_seq,
            nonce=one.nonce,
            offset=one.offset,
        )
        if fault is None and sizes is not None:
            fault = check_layout(header, sizes)
        fault = fault or verify_parts(header, payload, one.parts, base=base)
    if fault is None:
        one.fault = _scatter(one.want, payload, base)
    one.outcome = _outcome_of(one, fault)


def _outcome_of(one: Landing, fault: BadRecord | StaleRecord | None) -> GetOutcome:
    if fault is not None and one.growing:
        return Miss()
    if isinstance(fault, StaleRecord):
        return Stale(one.where, fault.reason)
    if isinstance(fault, BadRecord):
        return Corrupt(one.where, fault.reason)
    return Hit(Tier.SSD)
