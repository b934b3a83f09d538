"""Records on their way up, and what an engine's threads do with them: verify them where they land, then scatter."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvterrace.buffers import Bytes
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.space import Segment
from kvterrace.engine.transfers import Transfer
from kvterrace.engine.volume import Volume
from kvterrace.format.record import BadRecord, StaleRecord, check_identity, decode_header, verify_parts
from kvterrace.io.base import IoResult
from kvterrace.types import Corrupt, DeviceFailed, GetOutcome, Hit, Miss, Stale, Tier

__all__ = [
    "Copy",
    "Landing",
    "Want",
    "finish_read",
    "is_missing",
    "not_read",
    "scatter_all",
    "verify",
    "wanted_nbytes",
]

_log = logging.getLogger(__name__)


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
    where: str
    offset: int
    nonce: bytes
    key: bytes
    namespace: bytes
    epoch: int
    put_seq: int
    geometry: Geometry
    parts: range | None = None
    growing: bool = (
        False  # another process still writes the segment: wrong bytes there are no damage, but not there yet
    )
    outcome: GetOutcome | None = None
    fault: DeviceFailed | None = None  # of the caller's buffer: the block itself is fine
    missing: bool = False  # the file ended before the record did, or was not there


@dataclass(slots=True, eq=False)
class Copy:
    """A block on its way from a slot to the caller."""

    want: Want
    payload: Bytes
    fault: DeviceFailed | None = None


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
        one.fault = _scatter(one.want, one.payload)


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
    return None


def finish_read(group: list[Landing], result: IoResult) -> None:
    """On the thread that completed the read: verify each record, and scatter those that are right."""
    end = 0
    for one in group:
        end += one.memory.nbytes
        if result.error is not None or end > result.nbytes:
            one.outcome = not_read(one.where, result)
            one.missing = is_missing(result)
            continue
        verify(one, one.memory[one.geometry.header_nbytes :], 0)


def not_read(where: str, result: IoResult) -> DeviceFailed | Miss:
    """The outcome of a block whose read ended in an error, or short. Miss: its file is gone."""
    if isinstance(result.error, FileNotFoundError):
        return Miss()
    reason = (
        str(result.error) if result.error is not None else f"short read: {result.nbytes} of {result.wanted_nbytes} B"
    )
    return DeviceFailed(where, reason)


def is_missing(result: IoResult) -> bool:
    """Whether a read that did not bring all says that the file is not there, or not as long as it was."""
    return result.error is None or isinstance(result.error, FileNotFoundError)


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
        fault = check_identity(
            header,
            key=one.key,
            namespace=one.namespace,
            epoch=one.epoch,
            put_seq=one.put_seq,
            nonce=one.nonce,
            offset=one.offset,
        ) or verify_parts(header, payload, one.parts, base=base)
    if fault is not None and one.growing:
        one.outcome = Miss()
    elif isinstance(fault, StaleRecord):
        one.outcome = Stale(one.where, fault.reason)
    elif isinstance(fault, BadRecord):
        one.outcome = Corrupt(one.where, fault.reason)
    else:
        one.fault = _scatter(one.want, payload, base)
        one.outcome = Hit(Tier.SSD)
