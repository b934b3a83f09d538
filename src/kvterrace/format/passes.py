"""One pass over a record while its bytes are in cache, in C++ and without the GIL: what Python needs to use it.

The passes are in `kvterrace._native` (sources: `native/src/record/`): hooks that run on the thread that completed a
read or a copy. They refuse what `kvterrace.format.record` refuses, and answer with numbers; the words are here. Where
the native module is missing, `native()` is None and the functions of `kvterrace.format.record` do the same work.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from kvterrace.format.record import (
    FORMAT_VERSION,
    BadRecord,
    PartTable,
    RecordHeader,
    StaleRecord,
)

__all__ = [
    "VARIABLE",
    "Copied",
    "Expected",
    "Filled",
    "Landed",
    "Reason",
    "Verdict",
    "check_layout",
    "fault_of",
    "native",
    "record_shape",
]

#: Environment variable; `off`: do without the native module, also where it was built.
VARIABLE = "KVTERRACE_NATIVE"

_RAW = 0


class Landed(enum.IntEnum):
    """What a hook found in a landing's memory."""

    UNSEEN = 0  #: the hook did not run
    RIGHT = 1
    MISSING = 2  #: the read ended in an error, or short of it
    BAD = 3
    STALE = 4


class Reason(enum.IntEnum):
    """Why a record is bad or stale. Numbers as in `native/src/record/header.h`."""

    NONE = 0
    TOO_SHORT = 1
    NO_MAGIC = 2
    HEADER_LENGTH = 3
    HEADER_CUT = 4
    HEADER_CRC = 5
    VERSION = 6
    KIND = 7
    PARTS = 8
    UNALIGNED = 9
    PAYLOAD = 10
    TABLE = 11
    TOMBSTONE = 12
    RAW_NBYTES = 13
    LAYOUT = 14
    NONCE = 15
    MISPLACED = 16
    NO_BLOCK = 17
    KEY = 18
    NAMESPACE = 19
    EPOCH = 20
    PUT_SEQ = 21
    CODEC = 22
    PART_LAYOUT = 23
    NO_PART = 24
    PART_OUTSIDE = 25
    PART_CRC = 26


#: Words for what the numbers of a reason mean, for records that cannot be believed.
_BAD = {
    Reason.TOO_SHORT: "{0} B are too short for a record header",
    Reason.NO_MAGIC: "no record begins here",
    Reason.HEADER_LENGTH: "impossible header length {0}",
    Reason.HEADER_CUT: "a header of {0} B is cut at {1} B",
    Reason.HEADER_CRC: "header CRC does not match",
    Reason.VERSION: f"record of format version {{0}}, this build reads {FORMAT_VERSION}",
    Reason.KIND: "unknown kind {0} or flags {1:#x}",
    Reason.PARTS: "{0} parts of {1} B do not fit a header of {2} B",
    Reason.UNALIGNED: "offset {0} is not on a page boundary",
    Reason.PAYLOAD: "{0} parts in a payload of {1} B",
    Reason.TABLE: "the part table overlaps itself or leaves the payload of {0} B",
    Reason.TOMBSTONE: "a tombstone cannot have {0} parts and {1} B",
    Reason.RAW_NBYTES: "parts decode to {0} B, the header says {1} B",
    Reason.LAYOUT: "a record of {0} B in {1} parts, of another layout",
    Reason.CODEC: "codec {0} is not one that this build decodes",
    Reason.PART_LAYOUT: "part {0} at {1}+{2}, decoding to {3} B, is of another layout",
    Reason.NO_PART: "no part {0} in a record of {1}",
    Reason.PART_OUTSIDE: "part {0} at {1}+{2} is not in the {3} B read from {4}",
    Reason.PART_CRC: "part {0}: CRC is {1:08x}, expected {2:08x}",
}


class Verdict(Protocol):
    """A native `Landing` whose hook has run."""

    @property
    def landed(self) -> int:
        """As in `Landed`."""
        ...

    @property
    def copied(self) -> bool:
        """Whether the caller's memory was written."""
        ...

    @property
    def fault(self) -> tuple[int, tuple[int, ...], bytes]:
        """A `Reason`, its numbers, and the 32 bytes that were found (a nonce takes the first half)."""
        ...


class Copied(Protocol):
    """A native `Copy` whose hook has run."""

    @property
    def copied(self) -> bool:
        """Whether the caller's memory was written; else the block was settled by then."""
        ...


class Filled(Protocol):
    """A native `Fill` whose hook has run."""

    @property
    def done(self) -> bool:
        """Whether the slot holds the block's record now; else the block was settled by then."""
        ...


class Expected(Protocol):
    """What a landing's record had to be."""

    @property
    def nonce(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def epoch(self) -> int: ...
    @property
    def put_seq(self) -> int: ...
    @property
    def offset(self) -> int: ...


def fault_of(verdict: Verdict, expected: Expected) -> BadRecord | StaleRecord | None:
    """What is wrong with the record, in the words of `kvterrace.format.record`; None if it is right, or did not arrive.

    Raises:
        ValueError: the native module answers with a reason that this build does not know.
    """
    if verdict.landed not in (Landed.BAD, Landed.STALE):
        return None
    number, numbers, found = verdict.fault
    reason = Reason(number)
    if verdict.landed == Landed.BAD:
        if reason is Reason.MISPLACED:
            return BadRecord(f"record belongs at {numbers[0]}, found at {expected.offset}")
        return BadRecord(_BAD[reason].format(*numbers))
    match reason:
        case Reason.NONCE:
            return StaleRecord(f"segment nonce is {found[:16].hex()}, expected {expected.nonce.hex()}")
        case Reason.NO_BLOCK:
            return StaleRecord("found a tombstone, expected a block")
        case Reason.KEY:
            return StaleRecord(f"key is {found.hex()}, expected {expected.key.hex()}")
        case Reason.NAMESPACE:
            return StaleRecord(f"namespace is {found.hex()}, expected {expected.namespace.hex()}")
        case Reason.EPOCH:
            return StaleRecord(f"epoch is {numbers[0]}, expected {expected.epoch}")
        case Reason.PUT_SEQ:
            return StaleRecord(f"put_seq is {numbers[0]}, expected {expected.put_seq}")
        case _:
            raise ValueError(f"{reason.name} makes no record stale")


def check_layout(header: RecordHeader, part_nbytes: Sequence[int]) -> BadRecord | None:
    """Whether the parts lie where this layout has them, raw: what is copied out by layout was verified by the header's
    table, so the two must agree. None if they do.
    """
    table: PartTable = header.parts
    if header.codec != _RAW:
        return _bad(Reason.CODEC, header.codec)
    if len(table) != len(part_nbytes):
        return _bad(Reason.LAYOUT, header.payload_nbytes, len(table))
    at = 0
    for number, ((offset, nbytes, _, raw_nbytes), wanted) in enumerate(zip(table.tolist(), part_nbytes, strict=True)):
        if (offset, nbytes, raw_nbytes) != (at, wanted, wanted):
            return _bad(Reason.PART_LAYOUT, number, offset, nbytes, raw_nbytes)
        at += wanted
    return None


@functools.cache
def native() -> ModuleType | None:
    """The native module, or None where it was not built, cannot be loaded, or `VARIABLE` is `off`. Found out once in a
    process; `io.probe` says why.
    """
    if os.environ.get(VARIABLE) == "off":
        return None
    try:
        return importlib.import_module("kvterrace._native")
    except ImportError:
        return None


def record_shape(
    namespace: bytes, epoch: int, header_nbytes: int, payload_nbytes: int, part_nbytes: Sequence[int]
) -> object:
    """What all records of a namespace have in common, for the native passes; None without them. `part_nbytes`: empty
    where the layout is not known.
    """
    module = native()
    if module is None:
        return None
    # A footer can say more than a record can be; no header will agree with either figure.
    payload_nbytes = min(payload_nbytes, 2**32 - 1)
    shape: object = module.RecordShape(namespace, epoch, header_nbytes, payload_nbytes, list(part_nbytes))
    return shape


def _bad(reason: Reason, *numbers: int) -> BadRecord:
    return BadRecord(_BAD[reason].format(*numbers))
