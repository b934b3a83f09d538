"""Invalidations that a crash has left on some drives only: they are written where they are missing.

The drives of a partition are read together, so that one tombstone is enough. But each volume keeps its own only for as
long as it has older segments itself: what the tombstone kills on another volume could come back after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvterrace.engine.core import Core
from kvterrace.format.lineage import parent_rows
from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import SegmentContents
from kvterrace.tiers.segments import RecoveredSegment

__all__ = ["RECORD_ROW", "Tombstone", "killers", "missing_tombstones"]

#: (namespace digest, key, put-sequence number), as in `Segment.tombstones`.
Tombstone = tuple[bytes, bytes, int]
#: What `killers` has to know of a block's record. `namespace` is the number of its digest.
RECORD_ROW = np.dtype(
    [("key", "V32"), ("parent", "V32"), ("put_seq", "<u8"), ("depth", "<u4"), ("namespace", "<u4"), ("volume", "<u2")]
)
_NEVER = np.iinfo(np.uint64).max


def missing_tombstones(core: Core, found: Sequence[Sequence[RecoveredSegment]]) -> list[list[Tombstone]]:
    """For each volume, of which `found` are the segments, the tombstones of others that kill something on it, or may
    do so: what lies in a segment that could not be read is not known. After `rebuild`. Where some are lacking, about
    1 s for a million records.
    """
    theirs: list[set[Tombstone]] = [
        {one for segment in volume.space.segments.values() for one in segment.tombstones} for volume in core.volumes
    ]
    everything = set().union(*theirs)
    missing: list[list[Tombstone]] = []
    rows: npt.NDArray[np.void] | None = None
    for volume, (mine, segments) in enumerate(zip(theirs, found, strict=True)):
        lacking = everything - mine
        if lacking and not any(_is_unknown(one) for one in segments):
            if rows is None:
                rows = _records(core, found)
            lacking = killers(lacking, rows, rows["volume"] == volume, core.numbers)
        missing.append(sorted(lacking, key=lambda one: one[2]))
    return missing


def killers(
    tombstones: set[Tombstone], rows: npt.NDArray[np.void], here: npt.NDArray[np.bool_], numbers: dict[bytes, int]
) -> set[Tombstone]:
    """Those of `tombstones` that kill one of the records `here`: an older one of their key, or one that hangs on it.

    `rows` are all records of the partition, on all drives: only together do they say what hangs on what. Where a record
    between is gone, what is above it could be anything of the namespace.
    """
    if not here.any():
        return set()
    parent = parent_rows(rows)  # of several records with the parent's key, one
    lowest = np.where(here, rows["put_seq"], _NEVER)  # of the row, and of what hangs on it
    by_depth = np.argsort(rows["depth"], kind="stable")
    cuts = np.flatnonzero(np.diff(rows["depth"][by_depth])) + 1
    for level in reversed(np.split(by_depth, cuts)):
        below = level[(parent[level] >= 0) & (lowest[level] != _NEVER)]
        np.minimum.at(lowest, parent[below], lowest[below])
    below_of: dict[bytes | int, int] = {}  # by key, and by namespace for what could hang on any key of it

    def note(name: bytes | int, put_seq: int) -> None:
        below_of[name] = min(put_seq, below_of.get(name, put_seq))

    named = np.isin(_first_words(rows["key"]), [np.frombuffer(key[:8], "<u8")[0] for _, key, _ in tombstones])
    for at in np.flatnonzero(named).tolist():
        note(rows["key"][at].tobytes(), int(lowest[at]))
    for at in np.flatnonzero((parent < 0) & (rows["depth"] > 0) & (lowest != _NEVER)).tolist():
        note(rows["parent"][at].tobytes(), int(lowest[at]))
        if rows["depth"][at] > 1:  # the parent is not the first of its chain
            note(int(rows["namespace"][at]), int(lowest[at]))
    return {
        (digest, key, put_seq)
        for digest, key, put_seq in tombstones
        if min(below_of.get(key, _NEVER), below_of.get(numbers[digest], _NEVER)) < put_seq
    }


def _is_unknown(one: RecoveredSegment) -> bool:
    return one.contents is None or not one.readable


def _records(core: Core, found: Sequence[Sequence[RecoveredSegment]]) -> npt.NDArray[np.void]:
    """Every block's record, as `RECORD_ROW`."""
    tables = [np.zeros(0, RECORD_ROW)]
    for volume, segments in enumerate(found):
        for one in segments:
            if not isinstance(one.contents, SegmentContents):
                continue
            entries = one.contents.entries[one.contents.entries["kind"] == RecordKind.BLOCK]
            rows = np.zeros(len(entries), RECORD_ROW)
            for name in ("key", "parent", "put_seq", "depth"):
                rows[name] = entries[name]
            numbers = np.array([core.numbers[digest] for digest in one.contents.namespaces], np.uint32)
            rows["namespace"] = numbers[entries["namespace"]]
            rows["volume"] = volume
            tables.append(rows)
    return np.concatenate(tables)


def _first_words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(keys).view("<u8").reshape(-1, 4)[:, 0]
    return words
