"""Invalidations that a crash has left on some drives only: they are written where they are missing.

The drives of a partition are read together, so that one tombstone is enough. But each volume keeps its own only for as
long as it has older segments itself: what the tombstone kills on another volume could come back after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvterrace.engine.core import Core
from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import SegmentContents
from kvterrace.tiers.segments import RecoveredSegment

__all__ = ["missing_tombstones"]

#: (namespace digest, key, put-sequence number), as in `Segment.tombstones`.
_Tombstone = tuple[bytes, bytes, int]


def missing_tombstones(core: Core, found: Sequence[Sequence[RecoveredSegment]]) -> list[list[_Tombstone]]:
    """For each volume, of which `found` are the segments, the tombstones of others that kill something on it."""
    theirs: list[set[_Tombstone]] = [
        {one for segment in volume.space.segments.values() for one in segment.tombstones} for volume in core.volumes
    ]
    everything = set().union(*theirs)
    missing: list[list[_Tombstone]] = []
    for mine, segments in zip(theirs, found, strict=True):
        lacking = everything - mine
        oldest = _oldest(segments, {key for _, key, _ in lacking})
        missing.append(sorted((one for one in lacking if oldest.get(one[1], one[2]) < one[2]), key=lambda one: one[2]))
    return missing


def _oldest(segments: Sequence[RecoveredSegment], keys: set[bytes]) -> dict[bytes, int]:
    """The lowest put-sequence number of each of `keys` that has a block in these segments."""
    oldest: dict[bytes, int] = {}
    if not keys:
        return oldest
    words = np.array(sorted(np.frombuffer(key, "<u8")[0] for key in keys), np.uint64)
    for one in segments:
        if not isinstance(one.contents, SegmentContents):
            continue
        rows = one.contents.entries
        rows = rows[rows["kind"] == RecordKind.BLOCK]
        first = np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, 4)[:, 0]
        for row in rows[np.isin(first, words)]:
            key, put_seq = row["key"].tobytes(), int(row["put_seq"])
            if key in keys:
                oldest[key] = min(put_seq, oldest.get(key, put_seq))
    return oldest
