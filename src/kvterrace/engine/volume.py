"""One drive of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvterrace.clock import Clock
from kvterrace.engine.bad_places import ONLY_DRIVE_STRIKES, BadPlaces
from kvterrace.engine.gate import ReadGate
from kvterrace.engine.space import MOST_VOLUMES, NUMBERS, SegmentSpace
from kvterrace.format.recovery import SegmentContents
from kvterrace.io.base import IoEngine
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.segments import RecoveredSegment, SegmentFiles, footer_room_nbytes

__all__ = ["Volume", "make_volumes"]


@dataclass(frozen=True, slots=True)
class Volume:
    """What belongs to one drive and to no other: a drive that is full, fails or hangs takes nothing else along.

    Attributes:
        number: its place among the volumes.
        engine: of this drive alone.
        files: its segments, as files.
        space: the same, as room under its own cap.
        gate: lets reads of it through, or stops them.
        bad: what went wrong on it, and is not read or written there again.
    """

    number: int
    engine: IoEngine
    files: SegmentFiles
    space: SegmentSpace
    gate: ReadGate
    bad: BadPlaces

    def recover(self) -> list[RecoveredSegment]:
        """What the drive holds, in order of number, opened for reading. Blocks; changes nothing on the drive.

        Raises:
            FormatVersionError, StoreUnusableError: as `SegmentFiles.recover`.
        """
        found = self.files.recover()
        self.space.other_nbytes = self.files.other_nbytes
        self.bad.recover({one.contents.header.nonce for one in found if isinstance(one.contents, SegmentContents)})
        return found


def make_volumes(
    drives: Sequence[tuple[StoreDirectory, IoEngine]], cap_nbytes: int, segment_nbytes: int, clock: Clock
) -> tuple[Volume, ...]:
    """A volume for each drive, each with `cap_nbytes` of room; nothing is read yet."""
    assert len(drives) <= MOST_VOLUMES, "more drives than a segment's number can tell apart"
    alone = len(drives) == 1
    volumes = []
    for number, (directory, engine) in enumerate(drives):
        space = SegmentSpace(cap_nbytes, segment_nbytes, footer_room_nbytes, volume=number, alone=alone)
        numbers = {} if alone else {"base": number * NUMBERS, "count": NUMBERS}
        files = SegmentFiles(engine, directory.partition, directory.store_uuid, **numbers)
        bad = BadPlaces(files, space, clock, max_strikes=ONLY_DRIVE_STRIKES if alone else 1)
        space.may_store = bad.may_store
        volumes.append(Volume(number, engine, files, space, ReadGate(clock, str(files.folder)), bad))
    return tuple(volumes)
