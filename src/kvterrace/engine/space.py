"""Space on the SSD as the ledger sees it: segments, what is live in them, the capacity cap. No files, no bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np

from kvterrace.engine.blocks import NOWHERE, BlockTable, Ids
from kvterrace.format.record import PAGE_NBYTES

__all__ = ["MIN_CAP_NBYTES", "Segment", "SegmentSpace", "SegmentState", "segment_nbytes_for"]

_SEGMENT_NBYTES = 64 << 20
_SEGMENTS = 16
#: The least capacity that is worth a tier: sixteen segments of 64 KiB.
MIN_CAP_NBYTES = _SEGMENTS * (64 << 10)
#: Kept free of segments: the lock file, and what a file system takes to say where files lie.
_OVERHEAD_NBYTES = 32 << 10


def segment_nbytes_for(cap_nbytes: int) -> int:
    """Size of new segments under a cap of `cap_nbytes`: 64 MiB, or a sixteenth of the cap if that is less."""
    return min(_SEGMENT_NBYTES, (cap_nbytes - _OVERHEAD_NBYTES) // _SEGMENTS)


class SegmentState(enum.Enum):
    """A segment's life, in this order."""

    CREATING = "creating"
    #: Found without a footer at open; to be the open one again once what was found in it is durable.
    RESUMING = "resuming"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    RECLAIMING = "reclaiming"
    #: Given up, but its file could not be removed; it still takes its share of the capacity.
    STUCK = "stuck"


class Segment:
    """One append-only file.

    Attributes:
        number: unique in the partition, rising; names the file.
        file_nbytes: what the file takes of the capacity.
        used_nbytes: where the next record goes.
        written_s: when it was last written to, by the monotonic clock; of one found at open, long ago.
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
        "written_s",
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
        self.written_s = float("-inf")
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
    """Where records go, and which segment makes room. The sum of all files never exceeds `cap_nbytes`."""

    def __init__(self, cap_nbytes: int, segment_nbytes: int, footer_nbytes: Callable[[int, int], int]) -> None:
        """`footer_nbytes(records, namespaces)` is the room that a seal needs, trailer included."""
        self.cap_nbytes = cap_nbytes
        self.segment_nbytes = segment_nbytes
        self.segments: dict[int, Segment] = {}
        #: The segment that records are appended to.
        self.open: Segment | None = None
        self.next_number = 1
        #: What other files of the partition take of the capacity.
        self.other_nbytes = 0
        #: What all files may take while the drive has less room than the capacity; None: all of it.
        self.limit_nbytes: int | None = None
        #: Whether reclaim lends what the open segment keeps for it: it gets nowhere until DRAM is relieved.
        self.lent = False
        #: Whether reclaim writes tombstones elsewhere, and has no other room for them than the open segment.
        self.moving = False
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
        """Whether one more segment stays under the cap, and under what the drive has room for, and room for another is
        left to reclaim.
        """
        return self.file_nbytes + 2 * self.segment_nbytes <= self._most_nbytes

    def room_for_carried(self) -> bool:
        """Whether the room for a segment is there that only reclaim may use, for what outlives an old one."""
        return self.file_nbytes + self.segment_nbytes <= self._most_nbytes

    def room_for_small(self) -> bool:
        """Whether there is room for half a segment at least, which reclaim makes do with where it has nothing else."""
        return self.file_nbytes + self.segment_nbytes // 2 <= self._most_nbytes

    @property
    def _most_nbytes(self) -> int:
        return self.cap_nbytes if self.limit_nbytes is None else min(self.cap_nbytes, self.limit_nbytes)

    @property
    def kept_nbytes(self) -> int:
        """Room in the open segment that only reclaim may use: while it has none for a segment of its own."""
        if self.room_for_carried():
            return 0
        if self.moving:
            return self.segment_nbytes
        if self.lent:
            return 0
        return (self.segment_nbytes if self.open is None else self.open.file_nbytes) // 2

    @property
    def carried_room_nbytes(self) -> int:
        """Bytes of records that reclaim can write now before the segment that it empties is gone; a little less than
        it may be.
        """
        if self.room_for_carried() or (self.open is None and self.room_for_small()):
            nbytes = self._next_nbytes - PAGE_NBYTES
        elif self.open is not None:
            segment = self.open
            footer = self._footer_nbytes(segment.records, len(segment.namespaces))
            nbytes = segment.file_nbytes - segment.used_nbytes - segment.reserved_nbytes - footer
        else:
            return 0
        # of each record, at least two pages, comes a row of less than a 32nd of that, and a namespace
        return max(0, nbytes * 31 // 32 - 3 * PAGE_NBYTES)

    @property
    def _next_nbytes(self) -> int:
        room_nbytes = (self._most_nbytes - self.file_nbytes) // PAGE_NBYTES * PAGE_NBYTES
        return min(self.segment_nbytes, room_nbytes)

    def begin(self) -> Segment:
        """A new segment, to be created by the mover."""
        assert self.room_for_small(), "a segment over the cap"
        segment = Segment(self.next_number, SegmentState.CREATING, self._next_nbytes)
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
