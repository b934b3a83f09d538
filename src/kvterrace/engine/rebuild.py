"""From what lies on the drive to an index: the ledger of a partition as it is at open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, Geometry
from kvterrace.engine.core import UNSIZED, Core, NamespaceEntry
from kvterrace.engine.resuming import choose_resumed
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.format.record import PAGE_NBYTES, RecordKind, part_table
from kvterrace.format.recovery import BAD_PUT_SEQ, LiveEntries, SegmentContents, last_choice, live_entries
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.tiers.segments import RecoveredSegment

__all__ = ["rebuild"]

#: Age given to a recovered block for each put since: only the order counts.
_AGE_STEP_S = 1e-3
#: A segment that could not be read may hold higher put-sequence numbers than any that was: what is put or invalidated
#: from now on must be newer than that, too, once it can be read again. Far more than is put between two segments.
_UNKNOWN_PUTS = 1 << 28
#: No block is taken to be older: sums of ages are 64-bit microseconds.
_MOST_AGE_S = 1e6

Rows = npt.NDArray[np.int64]


def rebuild(core: Core, found: Sequence[RecoveredSegment], now_s: float) -> int:
    """Enter segments, in rising order, and their live blocks into the ledger; returns how many blocks it now knows.

    A block whose prefix is not whole is left out: it could never be matched. Its bytes are reclaimed with its segment.
    A record that touches a bad place is no copy. Its block, if no other record holds it, is known only as that on which
    others hang: these are found again once it was put again. About 2 us for each block, and 2 us for each run.
    """
    ledger = core.ledger
    contents: list[SegmentContents] = []
    segments: list[Segment] = []
    newest = 0
    for one in found:
        segment = ledger.space_of(one.number).adopt(one.number, SegmentState.SEALED, one.file_nbytes)
        if isinstance(one.contents, SegmentContents):
            nonce = one.contents.header.nonce
            places = core.volume_of(one.number).bad.places(nonce) if core.volumes else ()
            contents.append(last_choice(one.contents, ((place.offset, place.nbytes) for place in places)))
            segments.append(segment)
            segment.used_nbytes = one.contents.data_end
            segment.records = len(one.contents.entries)
            if one.contents.state is ScanState.SCANNED and one.readable:
                segment.state = SegmentState.SEALING
            for rows in (one.contents.entries, one.contents.tombstones):
                if len(rows):
                    newest = max(newest, int(rows["put_seq"].max()))
            newest = max(newest, one.contents.newest_put_seq)
            if len(one.contents.tombstones):
                segment.tombstones = _tombstones(one.contents)
        elif one.contents is None:
            segment.state = SegmentState.STUCK
    ledger.next_put_seq = newest + 1
    if any(one.contents is None or not one.readable for one in found):
        ledger.next_put_seq += _UNKNOWN_PUTS
    live = live_entries(contents)
    _enter_namespaces(core, live, contents)
    for space in ledger.spaces:
        choose_resumed(core, [one for one in found if ledger.space_of(one.number) is space])
    if not len(live.entries):
        return 0
    rows, starts, above = _runs(live.entries)
    if not len(rows):
        return 0
    entries = live.entries
    table = ledger.table
    ids = table.allocate(len(rows))
    table.key[ids] = _words(entries["key"])[rows].view(np.uint8)
    table.put_seq[ids] = entries["put_seq"][rows]
    heads = rows[starts]
    age_s = np.minimum((newest - _youngest(entries["put_seq"][rows], starts, above)) * _AGE_STEP_S, _MOST_AGE_S)
    numbers = np.array([core.numbers[digest] for digest in live.namespaces])
    ledger.tree.plant(
        ids,
        starts,
        parents=above.tolist(),
        namespaces=numbers[entries["namespace"][heads]].tolist(),
        sequences=_shared(entries["sequence"][heads].tobytes()),
        depths=entries["depth"][heads].tolist(),
        used_s=np.asarray(now_s - age_s, np.float64),
    )
    gaps = ids[entries["put_seq"][rows] == BAD_PUT_SEQ]
    if len(gaps):
        sound = entries["put_seq"][rows] != BAD_PUT_SEQ
        rows, ids = rows[sound], ids[sound]
    table.page[ids] = entries["offset"][rows] // PAGE_NBYTES
    used_s = ledger.tree.used_s[table.run[ids]]
    sizes = entries["record_nbytes"][rows].astype(np.int64)
    where = live.segments[rows]
    by_segment = np.argsort(where, kind="stable")
    cuts = np.searchsorted(where[by_segment], np.arange(len(segments) + 1))
    for segment, start, stop in zip(segments, cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        mine = by_segment[start:stop]
        if len(mine):
            ledger.space_of(segment.number).gain(table, segment, ids[mine], int(sizes[mine].sum()), used_s[mine])
    for block in gaps.tolist():
        if table.run[block] != NOWHERE:  # not gone together with one behind it
            ledger.tidy(block)
    return len(rows)


def _tombstones(contents: SegmentContents) -> list[tuple[bytes, bytes, int]]:
    records = contents.entries[contents.entries["kind"] == RecordKind.TOMBSTONE]
    digest = {int(row["put_seq"]): contents.namespaces[int(row["namespace"])] for row in records}
    return [
        (digest[int(row["put_seq"])], row["key"].tobytes(), int(row["put_seq"]))
        for row in contents.tombstones
        if int(row["put_seq"]) in digest
    ]


def _enter_namespaces(core: Core, live: LiveEntries, contents: Sequence[SegmentContents]) -> None:
    """Enter every namespace with the sizes of its records; the layout itself comes with the first chain that names
    it. One without live blocks may have tombstones, which bear its epoch when they are written again.
    """
    present, firsts = np.unique(live.entries["namespace"], return_index=True)
    first = dict(zip(present.tolist(), firsts.tolist(), strict=True))
    for number, digest in enumerate(live.namespaces):
        if number in first:
            row = live.entries[first[number]]
            geometry = Geometry(int(row["header_nbytes"]), int(row["payload_nbytes"]))
            entry = NamespaceEntry(digest, int(row["epoch"]), geometry, part_table((geometry.payload_nbytes,)), None)
        else:
            entry = NamespaceEntry(digest, _epoch_of(digest, contents), UNSIZED, part_table((PAGE_NBYTES,)), None)
        core.enter_namespace(entry)


def _epoch_of(digest: bytes, contents: Sequence[SegmentContents]) -> int:
    for one in contents:
        if digest in one.namespaces:
            epochs = one.entries["epoch"][one.entries["namespace"] == one.namespaces.index(digest)]
            if len(epochs):
                return int(epochs[0])
    return 0


def _runs(entries: npt.NDArray[np.void]) -> tuple[Rows, Rows, Rows]:
    """The runs that entries make: rows whose prefix is whole, run by run and in chain order; where in these each run
    starts; and which run it hangs on (-1: none), always one before it.
    """
    count = len(entries)
    parent = _parents(entries)
    rows = np.arange(count)
    first = _last_of(np.where(parent >= 0, parent, rows))  # of the chain, as far as it is known
    whole = entries["depth"][first] == 0
    # a row goes on the run of its parent if it is the only child and of the same sequence
    linked = np.flatnonzero(whole & (parent >= 0))
    children = np.bincount(parent[linked], minlength=count)
    sequence = np.ascontiguousarray(entries["sequence"]).view(np.uint64).reshape(-1, 2)
    up = parent[linked]
    goes_on = (children[up] == 1) & (sequence[linked] == sequence[up]).all(axis=1)
    follows = rows.copy()
    follows[linked[goes_on]] = up[goes_on]
    head = _last_of(follows)
    # runs by the depth of their heads: what a run hangs on comes before it
    depth = entries["depth"].astype(np.int64)
    used = np.flatnonzero(whole)
    used = used[np.lexsort((depth[used], head[used], depth[head[used]]))]
    starts = np.flatnonzero(head[used] == used)
    number = np.full(count, -1)
    number[used[starts]] = np.arange(len(starts))
    above = parent[used[starts]]
    return used, starts, np.where(above >= 0, number[head[above]], -1)


def _parents(entries: npt.NDArray[np.void]) -> Rows:
    """The row that each row hangs on; -1 where that is not there, or cannot be what the row hangs on."""
    count = len(entries)
    keys, parents = _words(entries["key"]), _words(entries["parent"])
    found = np.full(count, -1)
    # mostly a block was written right behind the one that it hangs on
    near = np.flatnonzero((parents[1:] == keys[:-1]).all(axis=1)) + 1
    found[near] = near - 1
    todo = np.flatnonzero((found < 0) & (entries["depth"] > 0))
    if len(todo):
        by_first = np.argsort(keys[:, 0])
        firsts = keys[by_first, 0]
        at = np.searchsorted(firsts, parents[todo, 0])
        while len(todo):  # past keys that share their first eight bytes with the one that is sought
            inside = at < count
            row = by_first[np.minimum(at, count - 1)]
            inside &= keys[row, 0] == parents[todo, 0]
            same = inside & (keys[row] == parents[todo]).all(axis=1)
            found[todo[same]] = row[same]
            again = inside & ~same
            todo, at = todo[again], at[again] + 1
    depth, namespace = entries["depth"], entries["namespace"]
    fits = (found >= 0) & (depth > 0) & (depth - np.uint32(1) == depth[found]) & (namespace == namespace[found])
    return np.where(fits, found, -1)


def _last_of(links: Rows) -> Rows:
    """Where each row comes to by following `links` until a row that links to itself. There must be no circle."""
    while True:
        further = links[links]
        if (further == links).all():
            return links
        links = further


def _youngest(put_seq: npt.NDArray[np.uint64], starts: Rows, above: Rows) -> npt.NDArray[np.int64]:
    """For each run the highest put-sequence number in it and in all that hangs on it: who hangs on a run makes it as
    young as itself.
    """
    newest: list[int] = np.maximum.reduceat(put_seq.astype(np.int64), starts).tolist()
    parents: list[int] = above.tolist()
    for run in range(len(newest) - 1, -1, -1):  # what a run hangs on comes before it
        parent = parents[run]
        if parent >= 0 and newest[run] > newest[parent]:
            newest[parent] = newest[run]
    return np.array(newest)


def _shared(sequences: bytes) -> list[bytes]:
    """Names of 16 bytes each; equal ones are one object."""
    names: dict[bytes, bytes] = {}
    each = (sequences[at : at + 16] for at in range(0, len(sequences), 16))
    return [names.setdefault(name, name) for name in each]


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 4)
