"""Space on the SSD as the ledger sees it: segments, what is live in them, the capacity cap. No files, no bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np

from kvterrace.engine.blocks import NOWHERE, BlockTable, Ids
from kvterrace.format.record import PAGE_NBYTES

__all__ = [
    "MIN_CAP_NBYTES",
    "MOST_VOLUMES",
    "NUMBERS",
    "Segment",
    "SegmentSpace",
    "SegmentState",
    "segment_nbytes_for",
    "volume_of",
]

#: Of the 31 bits of a segment's number, the lower 24 count within its volume: 127 volumes of 16 M segments each.
_NUMBER_BITS = 24
#: Numbers of segments that a volume has, from 1 on, where there are several.
NUMBERS = 1 << _NUMBER_BITS
MOST_VOLUMES = 127

_SEGMENT_NBYTES = 64 << 20
_SEGMENTS = 16
#: The least capacity that is worth a tier: sixteen segments of 64 KiB.
MIN_CAP_NBYTES = _SEGMENTS * (64 << 10)
#: Kept free of segments: the lock file, and what a file system takes to say where files lie.
_OVERHEAD_NBYTES = 32 << 10


def segment_nbytes_for(cap_nbytes: int) -> int:
    """Size of new segments under a cap of `cap_nbytes`: 64 MiB, or a sixteenth of the cap if that is less."""
    return min(_SEGMENT_NBYTES, (cap_nbytes - _OVERHEAD_NBYTES) // _SEGMENTS)


def volume_of(number: int) -> int:
    """Volume of the segment `number`, where there are several."""
    return number >> _NUMBER_BITS


class SegmentState(enum.Enum):
    """A segment's life, in this order."""

    CREATING = "creating"
    #: Of another process, which goes on appending to it.
    GROWING = "growing"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    RECLAIMING = "reclaiming"
    #: Given up, but its file could not be removed; it still takes its share of the capacity.
    STUCK = "stuck"


class Segment:
    """One append-only file.

    Attributes:
        number: unique in the partition, rising within its volume. A lone volume has 31 bits for it.
        file_nbytes: what the file takes of the capacity.
        used_nbytes: where the next record goes.
        records: records placed in it, whether or not they are still live.
        live_nbytes: bytes of records that the index points to.
        writers: writes in flight; it is not sealed before they end.
        readers: reads in flight; its file is not closed before they end.
        reserved_nbytes: room kept for the footer beyond its rows for records.
        tombstones: (namespace digest, key, put-sequence) of the invalidations recorded in it.
    """

    __slots__ = (
        "_ids",
        "file_nbytes",
        "live_nbytes",
        "namespaces",
        "number",
        "readers",
        "records",
        "reserved_nbytes",
        "state",
        "tombstones",
        "used_nbytes",
        "writers",
    )

    def __init__(self, number: int, state: SegmentState, file_nbytes: int) -> None:
        self.number = number
        self.state = state
        self.file_nbytes = file_nbytes
        self.used_nbytes = PAGE_NBYTES
        self.records = 0
        self.namespaces: set[int] = set()
        self.live_nbytes = 0
        self.writers = 0
        self.readers = 0
        self.reserved_nbytes = 0
        self.tombstones: list[tuple[bytes, bytes, int]] = []
        self._ids: list[Ids] = []

    def __repr__(self) -> str:
        return f"<Segment {self.number:08x} {self.state.value}, {self.live_nbytes} of {self.file_nbytes} B live>"

    def note(self, ids: Ids) -> None:
        """Blocks `ids` have their copy here from now on."""
        self._ids.append(ids)

    def live_ids(self, table: BlockTable) -> Ids:
        """Blocks whose copy is here now."""
        if not self._ids:
            return np.zeros(0, np.int32)
        ids: Ids = np.unique(np.concatenate(self._ids))
        ids = ids[table.segment[ids] == self.number]
        self._ids = [ids]
        return ids


class SegmentSpace:
    """The room of one volume: where records go, and which segment makes room. The sum of all files never exceeds
    `cap_nbytes`.
    """

    def __init__(
        self,
        cap_nbytes: int,
        segment_nbytes: int,
        footer_nbytes: Callable[[int, int], int],
        *,
        volume: int = 0,
        alone: bool = True,
    ) -> None:
        """
        Args:
            footer_nbytes: of (records, namespaces), the room that a seal needs, trailer included.
            volume: number of the volume.
            alone: whether it is the only one, and has all numbers for itself.
        """
        self.cap_nbytes = cap_nbytes
        self.segment_nbytes = segment_nbytes
        self.segments: dict[int, Segment] = {}
        #: The segment that records are appended to.
        self.open: Segment | None = None
        self.next_number = (volume << _NUMBER_BITS) + 1
        self._end_number = 2**31 - 1 if alone else (volume + 1) << _NUMBER_BITS
        #: Whether the drive takes writes, as far as is known.
        self.can_write = True
        #: Whether something waits to be written for which the open segment had no room when it was last tried.
        self.open_is_full = False
        #: What other files of the partition take of the capacity.
        self.other_nbytes = 0
        self._footer_nbytes = footer_nbytes

    @property
    def file_nbytes(self) -> int:
        """What all files take of the capacity."""
        return self.other_nbytes + sum(segment.file_nbytes for segment in self.segments.values())

    @property
    def live_nbytes(self) -> int:
        """Bytes of live records."""
        return sum(segment.live_nbytes for segment in self.segments.values())

    @property
    def max_record_nbytes(self) -> int:
        """The largest record that fits a segment."""
        return self.segment_nbytes - PAGE_NBYTES - self._footer_nbytes(1, 1)

    def in_state(self, state: SegmentState) -> list[Segment]:
        """Segments in `state`, oldest first."""
        return [segment for _, segment in sorted(self.segments.items()) if segment.state is state]

    def room_for_segment(self) -> bool:
        """Whether one more segment stays under the cap."""
        return self.file_nbytes + self.segment_nbytes <= self.cap_nbytes

    @property
    def used_up(self) -> bool:
        """Whether every number was given away: no more segments can be made before the store is opened anew."""
        return self.next_number >= self._end_number

    def begin(self) -> Segment:
        """A new segment, to be created by the mover."""
        assert self.room_for_segment(), "a segment over the cap"
        segment = Segment(self.next_number, SegmentState.CREATING, self.segment_nbytes)
        self.next_number += 1
        self.segments[segment.number] = segment
        return segment

    def shut(self) -> None:
        """Append no more to the open segment, if there is one: it is to be sealed."""
        if self.open is not None:
            self.open.state = SegmentState.SEALING
            self.open = None

    def adopt(self, segment: Segment) -> None:
        """A segment found on the drive (recovery)."""
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)

    def fits(self, segment: Segment, record_nbytes: int, namespace: int) -> bool:
        """Whether a record and the footer that it makes longer still fit."""
        namespaces = len(segment.namespaces | {namespace})
        footer = self._footer_nbytes(segment.records + 1, namespaces)
        return segment.used_nbytes + record_nbytes + footer + segment.reserved_nbytes <= segment.file_nbytes

    def place(self, segment: Segment, record_nbytes: int, namespace: int) -> int:
        """Take room for a record; returns its byte offset. It must fit."""
        assert segment.state is SegmentState.OPEN and self.fits(segment, record_nbytes, namespace)
        offset = segment.used_nbytes
        segment.used_nbytes += record_nbytes
        segment.records += 1
        segment.namespaces.add(namespace)
        return offset

    def lose(self, table: BlockTable, block: int, record_nbytes: int) -> None:
        """The index stops pointing to the SSD copy of `block`; its bytes become reclaimable."""
        segment = self.segments[int(table.segment[block])]
        segment.live_nbytes -= record_nbytes
        assert segment.live_nbytes >= 0, f"{segment!r} lost more than it held"
        table.segment[block] = NOWHERE
        table.page[block] = NOWHERE
