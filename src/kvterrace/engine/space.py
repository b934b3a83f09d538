"""Space on the SSD as the ledger sees it: segments, what is live in them, the capacity cap. No files, no bytes."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, Ids
from kvterrace.engine.segment_columns import SegmentColumns, whole_us
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.types import Tier

__all__ = [
    "MIN_CAP_NBYTES",
    "MOST_VOLUMES",
    "NUMBERS",
    "Segment",
    "SegmentSpace",
    "SegmentState",
    "any_block",
    "segment_nbytes_for",
    "volume_of",
    "volumes_of",
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


def any_block(key: bytes) -> bool:  # noqa: ARG001
    """A drive that may be given every block."""
    return True


def volume_of(number: int) -> int:
    """Volume of the segment `number`, where there are several."""
    return number >> _NUMBER_BITS


def volumes_of(numbers: Ids) -> Ids:
    """As `volume_of`, of many."""
    volumes: Ids = numbers >> _NUMBER_BITS
    return volumes


class SegmentState(enum.Enum):
    """A segment's life, in this order."""

    CREATING = "creating"
    #: Found without a footer at open; to be the open one again once what was found in it is durable.
    RESUMING = "resuming"
    #: Of another process, which goes on appending to it.
    GROWING = "growing"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    RECLAIMING = "reclaiming"
    #: Given up, but its file could not be removed; it still takes its share of the capacity.
    STUCK = "stuck"


class Segment:
    """One append-only file. Made by `SegmentSpace` only.

    Attributes:
        number: unique in the partition, rising within its volume. A lone volume has 31 bits for it.
        row: its row in the columns of the space.
        state: see `SegmentState`.
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
        "_file_nbytes",
        "_ids",
        "_space",
        "_state",
        "namespaces",
        "number",
        "readers",
        "records",
        "reserved_nbytes",
        "row",
        "tombstones",
        "used_nbytes",
        "writers",
        "written_s",
    )

    def __init__(self, space: SegmentSpace, number: int, row: int, state: SegmentState) -> None:
        self.number = number
        self.row = row
        self._space = space
        self._state = state
        self._file_nbytes = 0
        self.used_nbytes = PAGE_NBYTES
        self.records = 0
        self.namespaces: frozenset[int] = frozenset()
        self.writers = 0
        self.readers = 0
        self.reserved_nbytes = 0
        self.tombstones: list[tuple[bytes, bytes, int]] = []
        self.written_s = float("-inf")
        self._ids: list[Ids] = []

    def __repr__(self) -> str:
        return f"<Segment {self.number:08x} {self.state.value}, {self.live_nbytes} of {self.file_nbytes} B live>"

    @property
    def state(self) -> SegmentState:
        return self._state

    @state.setter
    def state(self, state: SegmentState) -> None:
        self._space._enter(self, state)  # noqa: SLF001 - the two are one

    @property
    def file_nbytes(self) -> int:
        return self._file_nbytes

    @file_nbytes.setter
    def file_nbytes(self, nbytes: int) -> None:
        columns = self._space.columns
        columns.files_nbytes += nbytes - self._file_nbytes
        columns.file_nbytes[self.row] = self._file_nbytes = nbytes

    @property
    def live_nbytes(self) -> int:
        return int(self._space.columns.live_nbytes[self.row])

    def live_ids(self, table: BlockTable) -> Ids:
        """Blocks whose copy is here now."""
        if not self._ids:
            return np.zeros(0, np.int32)
        # blocks of one write differ; an id that was used again may be in a second one
        ids: Ids = self._ids[0] if len(self._ids) == 1 else np.unique(np.concatenate(self._ids))
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
        self._segments: dict[int, Segment] = {}
        #: By number, oldest first; changed by `begin`, `adopt` and `remove` only.
        self.segments: Mapping[int, Segment] = MappingProxyType(self._segments)
        self.columns = SegmentColumns()
        self._in_state: dict[SegmentState, dict[int, Segment]] = {state: {} for state in SegmentState}
        #: The segment that records are appended to.
        self.open: Segment | None = None
        self.next_number = (volume << _NUMBER_BITS) + 1
        self._end_number = 2**31 - 1 if alone else (volume + 1) << _NUMBER_BITS
        #: Whether the block of a key may be given to this drive.
        self.may_store: Callable[[bytes], bool] = any_block
        #: Whether the drive takes writes, as far as is known.
        self.can_write = True
        #: Whether something waits to be written for which the open segment had no room when it was last tried.
        self.open_is_full = False
        #: What other files of the partition take of the capacity.
        self.other_nbytes = 0
        #: What all files may take while the drive has less room than the capacity; None: all of it.
        self.limit_nbytes: int | None = None
        #: Blocks that go into the open segment before all others, while they wait: reclaim has to see them elsewhere.
        self.first: Ids = np.zeros(0, np.int32)
        #: Whether reclaim lends what the open segment keeps for it: it gets nowhere until DRAM is relieved.
        self.lent = False
        #: Whether reclaim writes tombstones elsewhere, and has no other room for them than the open segment.
        self.moving = False
        self._footer_nbytes = footer_nbytes

    @property
    def file_nbytes(self) -> int:
        """What all files take of the capacity."""
        return self.other_nbytes + self.columns.files_nbytes

    @property
    def live_nbytes(self) -> int:
        """Bytes of live records."""
        return self.columns.lives_nbytes

    @property
    def oldest(self) -> int | None:
        """Number of the oldest segment."""
        return next(iter(self._segments), None)

    @property
    def max_record_nbytes(self) -> int:
        """The largest record that fits a segment."""
        return self.segment_nbytes - PAGE_NBYTES - self._footer_nbytes(1, 1)

    def in_state(self, state: SegmentState) -> list[Segment]:
        """Segments in `state`, oldest first."""
        return [segment for _, segment in sorted(self._in_state[state].items())]

    def room_for_segment(self) -> bool:
        """Whether one more segment stays under the cap, and under what the drive has room for, and room for another is
        left to reclaim.
        """
        return self.file_nbytes + 2 * self.segment_nbytes <= self.most_nbytes

    def room_for_carried(self) -> bool:
        """Whether the room for a segment is there that only reclaim may use, for what outlives an old one."""
        return self.file_nbytes + self.segment_nbytes <= self.most_nbytes

    def room_for_small(self) -> bool:
        """Whether there is room for half a segment at least, which reclaim makes do with where it has nothing else."""
        return self.file_nbytes + self.segment_nbytes // 2 <= self.most_nbytes

    @property
    def most_nbytes(self) -> int:
        """What all files may take now: the capacity, or less while the drive has less room."""
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
        room_nbytes = (self.most_nbytes - self.file_nbytes) // PAGE_NBYTES * PAGE_NBYTES
        return min(self.segment_nbytes, room_nbytes)

    @property
    def used_up(self) -> bool:
        """Whether every number was given away: no more segments can be made before the store is opened anew."""
        return self.next_number >= self._end_number

    def begin(self) -> Segment:
        """A new segment, to be created by the mover; a shorter one if no more is left."""
        assert self.room_for_small(), "a segment over the cap"
        return self.adopt(self.next_number, SegmentState.CREATING, self._next_nbytes)

    def adopt(self, number: int, state: SegmentState, file_nbytes: int) -> Segment:
        """Enter a segment: a new one, or one found on the drive (recovery), in rising order."""
        assert number >= self.next_number, f"segment {number} after {self.next_number - 1}"
        segment = Segment(self, number, self.columns.take(number), state)
        segment.file_nbytes = file_nbytes
        self._segments[number] = segment
        self._enter(segment, state)
        self.next_number = number + 1
        return segment

    def shut(self) -> None:
        """Append no more to the open segment, if there is one: it is to be sealed."""
        if self.open is not None:
            self.open.state = SegmentState.SEALING
            self.open = None

    def remove(self, segment: Segment) -> None:
        """The segment is no more, and nothing is live in it."""
        assert not self.columns.live_blocks[segment.row], f"{segment!r} goes with what is live in it"
        del self._segments[segment.number]
        del self._in_state[segment.state][segment.number]
        self.columns.give_back(segment.row)

    def _enter(self, segment: Segment, state: SegmentState) -> None:
        self._in_state[segment.state].pop(segment.number, None)
        self._in_state[state][segment.number] = segment
        segment._state = state  # noqa: SLF001 - as above
        self.columns.sealed[segment.row] = state is SegmentState.SEALED

    def fits(self, segment: Segment, record_nbytes: int, namespace: int) -> bool:
        """Whether a record and the footer that it makes longer still fit."""
        namespaces = len(segment.namespaces) + (namespace not in segment.namespaces)
        footer = self._footer_nbytes(segment.records + 1, namespaces)
        return segment.used_nbytes + record_nbytes + footer + segment.reserved_nbytes <= segment.file_nbytes

    def fitting(
        self, segment: Segment, record_nbytes: int, namespace: int, count: int, *, beside_nbytes: int = 0
    ) -> int:
        """How many of `count` records of `record_nbytes` fit, beside so many bytes, with the footer that they make
        longer.
        """
        namespaces = len(segment.namespaces) + (namespace not in segment.namespaces)
        room_nbytes = segment.file_nbytes - segment.used_nbytes - segment.reserved_nbytes - beside_nbytes

        def over(records: int) -> bool:
            footer_nbytes = self._footer_nbytes(segment.records + records, namespaces)
            return records * record_nbytes + footer_nbytes > room_nbytes

        return bisect_left(range(1, count + 1), 1, key=over)

    def place(self, segment: Segment, record_nbytes: int, namespace: int, *, count: int = 1) -> int:
        """Take room for records, one behind the other; returns the byte offset of the first. They must fit."""
        assert segment.state is SegmentState.OPEN
        assert self.fitting(segment, record_nbytes, namespace, count) == count
        offset = segment.used_nbytes
        segment.used_nbytes += count * record_nbytes
        segment.records += count
        if namespace not in segment.namespaces:
            segment.namespaces |= {namespace}
        return offset

    # -- copies that the index points to -------------------------------------------------------------------------------

    def gain(self, table: BlockTable, segment: Segment, ids: Ids, nbytes: int, used_s: npt.NDArray[np.float64]) -> None:
        """`segment` holds the copies of `ids` from now on: `nbytes` of records. The caller sets their pages.

        `used_s`, here and below: `RunTree.used_s` of the run of each block.
        """
        table.segment[ids] = segment.number
        segment._ids.append(ids)  # noqa: SLF001 - as above
        kept = int(np.count_nonzero(table.kept[ids]))
        self.columns.count(segment.row, len(ids), kept, nbytes, int(whole_us(used_s).sum()))
        table.entered(Tier.SSD, ids)

    def lose(self, table: BlockTable, ids: Ids, record_nbytes: int, used_s: npt.NDArray[np.float64]) -> None:
        """The index stops pointing to the SSD copies of `ids`, records of `record_nbytes` each; their bytes become
        reclaimable.
        """
        kept = table.kept[ids]
        if kept.any():
            self.keep(table, ids[kept], kept=False)
        for segment, blocks, used_us in self._by_segment(table, ids, whole_us(used_s)):
            self.columns.count(segment.row, -blocks, 0, -blocks * record_nbytes, -used_us)
            assert segment.live_nbytes >= 0, f"{segment!r} lost more than it held"
        table.segment[ids] = NOWHERE
        table.page[ids] = NOWHERE
        table.left(Tier.SSD, ids)
        table.lost_copy(ids)

    def keep(self, table: BlockTable, ids: Ids, *, kept: bool) -> None:
        """Blocks `ids`, which all have a copy, count as `kept` in their segments, or no longer."""
        for segment, blocks, _ in self._by_segment(table, ids, np.zeros(len(ids), np.int64)):
            self.columns.kept_blocks[segment.row] += blocks if kept else -blocks

    def touch(self, table: BlockTable, ids: Ids, used_s: npt.NDArray[np.float64], now_s: float) -> None:
        """Blocks `ids`, last used at `used_s`, are used now. Some may have no copy."""
        here = table.segment[ids] != NOWHERE
        if not here.any():
            return
        if not here.all():
            ids, used_s = ids[here], used_s[here]
        gained_us = whole_us(np.array(now_s)) - whole_us(used_s)
        each = [(segment.row, sum_us) for segment, _, sum_us in self._by_segment(table, ids, gained_us)]
        rows, sums_us = zip(*each, strict=True)
        self.columns.used_us[list(rows)] += sums_us

    def _by_segment(
        self, table: BlockTable, ids: Ids, values: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Segment, int, int]]:
        """The segments of these blocks, which all have a copy: how many each holds, and the sum of their `values`."""
        numbers = table.segment[ids]
        if not len(numbers):
            return
        if len(numbers) == 1 or (numbers == numbers[0]).all():
            yield self._segments[int(numbers[0])], len(numbers), int(values.sum())
            return
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        counts = np.diff(starts, append=len(numbers)).tolist()
        sums = np.add.reduceat(values[order], starts).tolist()
        for number, count, total in zip(numbers[starts].tolist(), counts, sums, strict=True):
            yield self._segments[number], count, total
