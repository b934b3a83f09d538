"""One drive of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvterrace.clock import Clock
from kvterrace.engine.gate import ReadGate
from kvterrace.engine.space import MOST_VOLUMES, NUMBERS, SegmentSpace
from kvterrace.io.base import IoEngine
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.segments import SegmentFiles, footer_room_nbytes

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
    """

    number: int
    engine: IoEngine
    files: SegmentFiles
    space: SegmentSpace
    gate: ReadGate


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
        volumes.append(Volume(number, engine, files, space, ReadGate(clock, str(files.folder))))
    return tuple(volumes)
