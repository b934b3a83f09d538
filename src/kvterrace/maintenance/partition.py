"""What is known of one partition, over all its drives: which records stay, and which tombstones are still needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import last_choice, live_entries
from kvterrace.maintenance.census import Dropped, FoundSegment
from kvterrace.maintenance.selection import Selection

__all__ = ["Partition", "Rows"]

#: Which entries of one segment.
Rows = npt.NDArray[np.bool_]

#: The lowest put-sequence number among some records, by the segment that they are in; of those that stay, whatever
#: becomes of their segment, under None.
_Oldest = dict[FoundSegment | None, int]


@dataclass(frozen=True, slots=True)
class _Record:
    key: bytes
    parent: bytes
    depth: int
    namespace: bytes
    put_seq: int
    segment: FoundSegment
    stays: bool
    sound: bool


class Partition:
    """`found`: its segments, drive by drive, those of a drive by number. What happens to them later is told to `left`.

    Attributes:
        chosen: of each segment's entries, those that have to go. live: those that a store would use.
        staying: blocks that stay. What is in none of these is dead.
    """

    def __init__(self, found: Sequence[FoundSegment], selection: Selection) -> None:
        self.chosen: dict[FoundSegment, Rows] = {}
        self.live: dict[FoundSegment, Rows] = {}
        self.staying: dict[FoundSegment, Rows] = {}
        self._blind = any(one.unknown_why for one in found)
        self._gone: set[FoundSegment] = set()
        used = [one for one in found if not (one.foreign or one.unknown_why)]
        whole = [(one, one.contents) for one in used if one.contents is not None]
        live = live_entries([last_choice(contents, one.bad) for one, contents in whole])
        number_of = {one: at for at, (one, _) in enumerate(whole)}
        for one in found:
            if one.contents is None:
                continue
            entries = one.contents.entries
            self.chosen[one] = selection.rows(entries, one.contents.namespaces)
            offsets = live.entries["offset"][live.segments == number_of.get(one, len(whole))]
            self.live[one] = np.isin(entries["offset"], offsets)
            self.staying[one] = self.live[one] & ~self.chosen[one] & (entries["kind"] == RecordKind.BLOCK)
        self._victims: dict[bytes, _Oldest] = {}
        self._lost: dict[bytes, _Oldest] = {}
        self._find_victims(used)

    def left(self, one: FoundSegment) -> None:
        """A segment is no more; what stays of it is in another."""
        self._gone.add(one)

    def is_needed(self, dropped: Dropped, leaving: FoundSegment) -> bool:
        """Whether a tombstone's key still kills something once segment `leaving` is gone."""
        if self._blind:
            return True
        found = [self._victims.get(dropped.key, {})]
        if any(dropped.namespace):
            found.append(self._lost.get(dropped.namespace, {}))
        else:  # of whom is not known
            found += self._lost.values()
        return any(
            put_seq < dropped.put_seq and segment is not leaving and segment not in self._gone
            for oldest in found
            for segment, put_seq in oldest.items()
        )

    def _find_victims(self, used: Sequence[FoundSegment]) -> None:
        """For each record one tombstone that keeps it dead: of its own key, else the nearest above it; for one that
        hangs on nothing known, any of its namespace. Such a one is not dead by them, but would be back once the block
        between is put again.
        """
        buried: dict[bytes, int] = {}
        for one in used:
            for dropped in one.dropped:
                buried[dropped.key] = max(dropped.put_seq, buried.get(dropped.key, 0))
        if not buried:
            return
        records = list(self._records(used))
        above: dict[bytes, bytes] = {}  # parent of each block; of the first of a chain, nothing
        known: dict[bytes, tuple[int, bool]] = {}  # the newest tombstone of it and above; whether it hangs on a first
        for record in sorted(records, key=lambda each: each.depth):
            if record.key in known:
                continue
            own = buried.get(record.key, 0)
            limit, whole = 0, record.depth == 0
            if not whole:
                above[record.key] = record.parent
                limit, whole = known.get(record.parent, (buried.get(record.parent, 0), False))
            known[record.key] = (max(own, limit), whole)
        for record in records:
            if not record.sound:
                continue
            limit, whole = known[record.key]
            if limit > record.put_seq:
                name = record.key
                while buried.get(name, 0) <= record.put_seq:
                    name = above[name]
                _add(self._victims, name, record)
            elif not whole:
                _add(self._lost, record.namespace, record)

    def _records(self, used: Sequence[FoundSegment]) -> Iterator[_Record]:
        """Every block record of which the header is right."""
        for one in used:
            for stray in one.strays:
                header = stray.header
                if header.kind is RecordKind.BLOCK:
                    yield _Record(
                        key=header.key,
                        parent=header.parent,
                        depth=header.depth,
                        namespace=header.namespace,
                        put_seq=header.put_seq,
                        segment=one,
                        stays=False,
                        sound=stray.sound,
                    )
            if one.contents is None:
                continue
            digests = one.contents.namespaces
            for row, stays in zip(one.contents.entries, self.staying[one].tolist(), strict=True):
                if row["kind"] == RecordKind.BLOCK:
                    yield _Record(
                        key=row["key"].tobytes(),
                        parent=row["parent"].tobytes(),
                        depth=int(row["depth"]),
                        namespace=digests[int(row["namespace"])],
                        put_seq=int(row["put_seq"]),
                        segment=one,
                        stays=stays,
                        sound=True,
                    )


def _add(to: dict[bytes, _Oldest], name: bytes, record: _Record) -> None:
    oldest = to.setdefault(name, {})
    where = None if record.stays else record.segment
    oldest[where] = min(record.put_seq, oldest.get(where, record.put_seq))
