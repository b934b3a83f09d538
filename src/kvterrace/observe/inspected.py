"""What an inspection says of one partition: plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["NamespaceShare", "PartitionReport", "RunReport", "SegmentCondition", "SegmentReport"]


class SegmentCondition(enum.Enum):
    """What a segment looks like from outside."""

    #: Footer and trailer are right.
    SEALED = "sealed"
    #: Never sealed: being written, little used at close, or left by a crash. Its records were read and verified.
    UNSEALED = "unsealed"
    #: No usable header, a footer that was there once, or a file of another segment or store. What could be believed
    #: of it was read.
    DAMAGED = "damaged"
    #: Could not be opened or read: nothing is known about it.
    UNREADABLE = "unreadable"
    #: Written by a newer kvterrace: left alone.
    NEWER = "newer"


@dataclass(slots=True)
class SegmentReport:
    """One segment's file.

    Attributes:
        used_nbytes: header, records and footer: what was written of the file, as far as is known.
        record_nbytes: of all records, live or not. live_nbytes: of those of live blocks.
        problems: for people, one line each.
    """

    number: int
    path: Path
    condition: SegmentCondition
    file_nbytes: int
    allocated_nbytes: int
    capacity_nbytes: int = 0
    created_unix_ns: int = 0
    used_nbytes: int = 0
    blocks: int = 0
    tombstones: int = 0
    record_nbytes: int = 0
    live_blocks: int = 0
    live_nbytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NamespaceShare:
    """What of one namespace lives in one partition.

    Attributes:
        blocks: live blocks with their whole prefix on the drive: what an opened store finds.
        orphan_blocks: live blocks without it: they can never be matched, and are reclaimed with their segment. On one
            of several drives: or their prefix lies on another.
        record_nbytes: of `blocks` on the drive, headers and padding included. payload_nbytes: KV alone, as encoded.
        sequences: distinct named ones; unnamed_blocks: blocks of none.
    """

    digest: bytes
    blocks: int
    orphan_blocks: int
    record_nbytes: int
    payload_nbytes: int
    runs: int
    sequences: int
    unnamed_blocks: int
    oldest_unix_ns: int
    newest_unix_ns: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run: consecutive blocks of one chain and one sequence, with no branch in between."""

    digest: bytes
    sequence: bytes
    first_depth: int
    blocks: int
    record_nbytes: int


@dataclass(slots=True)
class PartitionReport:
    """One partition.

    Attributes:
        writer_pid: who has it open for writing, as far as can be seen.
        highest_put_seq: the highest put-sequence number on the drive.
        bad_places: places that are not read again, in segments that are there. failed_blocks: blocks that went wrong.
    """

    name: str
    path: Path
    writer_pid: int | None
    segments: list[SegmentReport] = field(default_factory=list)
    shares: list[NamespaceShare] = field(default_factory=list)
    largest_runs: list[RunReport] = field(default_factory=list)
    highest_put_seq: int = 0
    tombstone_keys: int = 0
    bad_places: int = 0
    failed_blocks: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def file_nbytes(self) -> int:
        """Apparent size of all segment files."""
        return sum(one.file_nbytes for one in self.segments)

    @property
    def allocated_nbytes(self) -> int:
        """What the segment files take of the drive."""
        return sum(one.allocated_nbytes for one in self.segments)

    @property
    def live_nbytes(self) -> int:
        """Records of live blocks with their whole prefix."""
        return sum(one.record_nbytes for one in self.shares)

    @property
    def dead_nbytes(self) -> int:
        """Records of blocks that nothing finds any more: replaced, invalidated, or without their prefix (which may lie
        on another drive, if the store has several).
        """
        return sum(one.record_nbytes for one in self.segments) - self.live_nbytes

    @property
    def other_nbytes(self) -> int:
        """Headers, footers, and room that holds no record: `file_nbytes` less live and dead records."""
        return self.file_nbytes - self.live_nbytes - self.dead_nbytes

    @property
    def highest_segment(self) -> int:
        """Numbers rise from 1: so many segments were made at least, unless the highest were removed meanwhile."""
        return max((one.number for one in self.segments), default=0)

    @property
    def written_nbytes_at_least(self) -> int:
        """Bytes that the drive was given for the files that are there now. What was removed since counts as nothing."""
        return sum(one.used_nbytes for one in self.segments)

    @property
    def written_nbytes_at_most_about(self) -> int:
        """`highest_segment` segments, each as large as the largest here: an upper bound if the size never was larger
        and
        no number was given twice (the store gives one again if the newest segment was removed before it was opened).
        """
        largest = max((max(one.capacity_nbytes, one.file_nbytes) for one in self.segments), default=0)
        return self.highest_segment * largest
