"""From what lies on the drive to an index: the ledger of a partition as it is at open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import Ids
from kvterrace.engine.core import UNSIZED, Core, NamespaceEntry
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.resuming import choose_resumed
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.tree import Run
from kvterrace.format.record import PAGE_NBYTES, RecordKind, part_table
from kvterrace.format.recovery import LiveEntries, SegmentContents, live_entries
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.tiers.segments import RecoveredSegment

__all__ = ["rebuild"]

#: Age given to a recovered block for each put since: only the order counts.
_AGE_STEP_S = 1e-3
#: In place of a bad record's own: those of a partition begin with 1.
_BAD_PUT_SEQ = 0


def rebuild(core: Core, found: Sequence[RecoveredSegment], now_s: float) -> int:
    """Enter segments and their live blocks into the ledger; returns how many blocks it now knows.

    A block whose prefix is not whole is left out: it could never be matched. Its bytes are reclaimed with its segment.
    A record that touches a bad place is no copy. Its block, if no other record holds it, is known only as that on which
    others hang: these are found again once it was put again.
    """
    ledger = core.ledger
    space = ledger.space
    assert space is not None
    contents: list[SegmentContents] = []
    numbers: list[int] = []
    newest = 0
    for one in found:
        segment = Segment(one.number, SegmentState.SEALED, one.file_nbytes)
        if isinstance(one.contents, SegmentContents):
            contents.append(_last_choice(core, one.contents))
            numbers.append(one.number)
            segment.used_nbytes = one.contents.data_end
            segment.records = len(one.contents.entries)
            if one.contents.state is ScanState.SCANNED and one.readable:
                segment.state = SegmentState.SEALING
            for rows in (one.contents.entries, one.contents.tombstones):
                if len(rows):
                    newest = max(newest, int(rows["put_seq"].max()))
            newest = max(newest, one.contents.newest_put_seq)
            segment.tombstones = _tombstones(one.contents)
        elif one.contents is None:
            segment.state = SegmentState.STUCK
        space.adopt(segment)
    ledger.next_put_seq = newest + 1
    live = live_entries(contents)
    _enter_namespaces(core, live)
    choose_resumed(core, found)
    if not len(live.entries):
        return 0
    ids = ledger.table.allocate(len(live.entries))
    table = ledger.table
    table.key[ids] = live.entries["key"].copy().view(np.uint8).reshape(-1, 32)
    table.put_seq[ids] = live.entries["put_seq"]
    order = _Chains(live.entries)
    used = order.plant(core, live, ids, now_s, newest)
    segments = np.array(numbers, np.int32)[live.segments]
    gaps = used[live.entries["put_seq"][used] == _BAD_PUT_SEQ]
    used = used[live.entries["put_seq"][used] != _BAD_PUT_SEQ]
    table.segment[ids[used]] = segments[used]
    table.page[ids[used]] = live.entries["offset"][used] // PAGE_NBYTES
    for number in np.unique(segments[used]).tolist():
        mine = used[segments[used] == number]
        space.segments[number].note(ids[mine])
        space.segments[number].live_nbytes = int(live.entries["record_nbytes"][mine].sum())
    left = np.ones(len(ids), bool)
    left[used] = left[gaps] = False
    table.release(ids[left])
    for block in ids[gaps].tolist():
        ledger.tidy(block)
    return len(used)


def _last_choice(core: Core, contents: SegmentContents) -> SegmentContents:
    """The same contents, with records that touch a bad place older than any other of their blocks."""
    places = () if core.bad is None else core.bad.places(contents.header.nonce)
    if not places:
        return contents
    entries = contents.entries.copy()
    start, end = entries["offset"], entries["offset"] + entries["record_nbytes"]
    for place in places:
        touched = (start < np.uint64(place.offset + place.nbytes)) & (end > np.uint64(place.offset))
        entries["put_seq"][touched & (entries["kind"] == RecordKind.BLOCK)] = _BAD_PUT_SEQ
    return replace(contents, entries=entries)


def _tombstones(contents: SegmentContents) -> list[tuple[bytes, bytes, int]]:
    records = contents.entries[contents.entries["kind"] == RecordKind.TOMBSTONE]
    digest = {int(row["put_seq"]): contents.namespaces[int(row["namespace"])] for row in records}
    return [
        (digest[int(row["put_seq"])], row["key"].tobytes(), int(row["put_seq"]))
        for row in contents.tombstones
        if int(row["put_seq"]) in digest
    ]


def _enter_namespaces(core: Core, live: LiveEntries) -> None:
    """Enter every namespace with the sizes of its records; the layout itself comes with the first chain that names
    it.
    """
    for number, digest in enumerate(live.namespaces):
        rows = live.entries[live.entries["namespace"] == number]
        if len(rows):
            row = rows[0]
            geometry = Geometry(int(row["header_nbytes"]), int(row["payload_nbytes"]))
            entry = NamespaceEntry(digest, int(row["epoch"]), geometry, part_table((geometry.payload_nbytes,)), None)
        else:
            entry = NamespaceEntry(digest, 0, UNSIZED, part_table((PAGE_NBYTES,)), None)
        core.enter_namespace(entry)


class _Chains:
    """Who hangs on whom among recovered entries, by row."""

    def __init__(self, entries: npt.NDArray[np.void]) -> None:
        self._entries = entries
        count = len(entries)
        keys = _words(entries["key"])
        parents = _words(entries["parent"])
        by_first = np.argsort(keys[:, 0], kind="stable")
        firsts = keys[by_first, 0]
        parent = np.full(count, -1, np.int64)
        at = np.searchsorted(firsts, parents[:, 0])
        # keys are hashes: two that share their first eight bytes are next to each other; step over those that differ
        # in the rest
        for _ in range(8):
            inside = at < count
            row = by_first[np.minimum(at, count - 1)]
            same = inside & (keys[row] == parents).all(axis=1) & (parent < 0)
            parent[same] = row[same]
            at = at + 1
        fits = (parent >= 0) & (entries["depth"] == entries["depth"][parent] + np.uint32(1))
        fits &= entries["namespace"] == entries["namespace"][parent]
        self.parent = np.where(fits & (entries["depth"] > 0), parent, -1)
        self.roots = np.flatnonzero(entries["depth"] == 0)
        order = np.argsort(self.parent, kind="stable")
        self._children_of = order[self.parent[order] >= 0]
        linked = self.parent[self._children_of]
        self._start = np.searchsorted(linked, np.arange(count), side="left")
        self._stop = np.searchsorted(linked, np.arange(count), side="right")

    def plant(self, core: Core, live: LiveEntries, ids: Ids, now_s: float, newest: int) -> npt.NDArray[np.int64]:
        """Grow the ledger's tree from the roots; returns the rows that are in it."""
        tree = core.ledger.tree
        sequences = live.entries["sequence"]
        sequence_words = np.ascontiguousarray(sequences).view(np.uint64).reshape(-1, 2)
        same_sequence = np.zeros(len(ids), bool)
        has_parent = self.parent >= 0
        same_sequence[has_parent] = (sequence_words[has_parent] == sequence_words[self.parent[has_parent]]).all(axis=1)
        only_child = (self._stop - self._start) == 1
        # a row goes on the run of its parent if it is the only child and of the same sequence
        follows = np.full(len(ids), -1, np.int64)
        single = np.flatnonzero(only_child)
        child = self._children_of[self._start[single]]
        goes_on = same_sequence[child]
        follows[single[goes_on]] = child[goes_on]
        follow = follows.tolist()
        start, stop, children = self._start.tolist(), self._stop.tolist(), self._children_of.tolist()
        age_s = (newest - live.entries["put_seq"].astype(np.float64)) * _AGE_STEP_S
        namespaces = live.entries["namespace"].tolist()
        depths = live.entries["depth"].tolist()
        numbers = [core.numbers[digest] for digest in live.namespaces]
        todo: list[tuple[int, Run | None]] = [(row, None) for row in self.roots.tolist()]
        used: list[int] = []
        runs: list[Run] = []
        while todo:
            row, parent = todo.pop()
            rows = [row]
            while follow[rows[-1]] >= 0:
                rows.append(follow[rows[-1]])
            used += rows
            run = tree.adopt(
                ids[rows],
                parent=parent,
                namespace=numbers[namespaces[row]],
                sequence=sequences[row].tobytes(),
                depth=depths[row],
                now_s=now_s - float(age_s[rows].min()),
            )
            runs.append(run)
            last = rows[-1]
            todo += [(child_row, run) for child_row in children[start[last] : stop[last]]]
        for run in reversed(runs):  # children come after their parents: who hangs on a run makes it as young as itself
            if run.parent is not None:
                mine, theirs = tree.used_s[run.number], tree.used_s[run.parent.number]
                tree.used_s[run.parent.number] = max(mine, theirs)
        return np.array(used, np.int64)


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 4)
