"""Blocks that another process has written, entered into the index while it is in use; and what takes them out again.

Decisions over a ledger, as the ledger's own: no I/O, no clock. Used under the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvterrace.engine.blocks import NOWHERE, DramState, Geometry
from kvterrace.engine.core import UNSIZED, Core, NamespaceEntry
from kvterrace.engine.key_index import KeyIndex
from kvterrace.engine.shared_ledger import SharedLedger
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.format.record import PAGE_NBYTES, RecordKind, part_table
from kvterrace.format.recovery import SegmentContents
from kvterrace.health.quarantine import BadPlace

__all__ = ["MOST_WAITING", "Grafts", "Row", "rows_of"]

#: Blocks that wait for the one that they hang on, at most: beyond that the longest waiting are let go of, and come back
#: with the footer of their segment, if it is not sealed yet, or when the store is opened again.
MOST_WAITING = 16_384
#: Invalidations remembered, at most, for blocks that are found after them; beyond that the oldest are let go of.
_MOST_DEAD = 1 << 18


class Row(NamedTuple):
    """One block in a segment of the number `segment`, from its record's header or the segment's footer."""

    key: bytes
    parent: bytes
    sequence: bytes
    put_seq: int
    page: int
    depth: int
    namespace: bytes
    epoch: int
    geometry: Geometry
    segment: int


def rows_of(contents: SegmentContents, number: int, start: int = 0, stop: int | None = None) -> list[Row]:
    """The blocks among entries `start..stop` of a segment, tombstones left out."""
    table = contents.entries[start:stop]
    table = table[table["kind"] == RecordKind.BLOCK]
    sizes: dict[tuple[int, int], Geometry] = {}
    keys, parents, sequences = (table[name].tobytes() for name in ("key", "parent", "sequence"))
    numbers = ("put_seq", "offset", "depth", "namespace", "epoch", "header_nbytes", "payload_nbytes")
    rows = []
    for at, (put_seq, offset, depth, namespace, epoch, header, payload) in enumerate(
        zip(*(table[name].tolist() for name in numbers), strict=True)
    ):
        geometry = sizes.setdefault((header, payload), Geometry(header, payload))
        key, parent = keys[at * 32 : at * 32 + 32], parents[at * 32 : at * 32 + 32]
        sequence, digest = sequences[at * 16 : at * 16 + 16], contents.namespaces[namespace]
        page = offset // PAGE_NBYTES
        rows.append(Row(key, parent, sequence, put_seq, page, depth, digest, epoch, geometry, number))
    return rows


class Grafts:
    """What a reader has learnt and not entered yet, and the rules by which it enters it.

    Newest put-sequence number wins; a tombstone kills what is older, whichever is found first; a block whose parent is
    unknown waits for it.
    """

    def __init__(self, core: Core, ledger: SharedLedger) -> None:
        """`ledger`: that of `core`."""
        self._core = core
        self._ledger = ledger
        self._keys = KeyIndex(ledger.table)
        self._dead: OrderedDict[bytes, int] = OrderedDict()
        self._waiting: OrderedDict[bytes, list[Row]] = OrderedDict()  # by parent, oldest first
        self._waiting_rows = 0
        self._spare: OrderedDict[bytes, Row] = OrderedDict()  # second copies, oldest first
        #: What could not be entered for the use that is made of it at this moment.
        self.later: list[Row] = []

    # -- taking out ----------------------------------------------------------------------------------------------------

    def remember_dead(self, tombstones: Iterable[tuple[bytes, int]]) -> None:
        """Blocks of these keys with smaller put-sequence numbers are not entered from now on."""
        for key, put_seq in tombstones:
            self._dead[key] = max(put_seq, self._dead.pop(key, 0))
        while len(self._dead) > _MOST_DEAD:
            self._dead.popitem(last=False)

    def bury(self, tombstones: list[tuple[bytes, int]], _now_s: float) -> None:
        """Give up what these tombstones kill: their blocks, and what hangs on them and is older. What is in use or
        pinned goes when it is let go. A block that only this process holds goes, too: which of the two is older, nobody
        knows.
        """
        table = self._ledger.table
        newest: dict[bytes, int] = {}
        for key, put_seq in tombstones:
            newest[key] = max(put_seq, newest.get(key, 0))
        for key, block in sorted(self._keys.find(newest).items(), key=lambda one: -one[1]):
            if table.run[block] == NOWHERE:
                continue  # gone with one before
            self._ledger.revoke_below(block, newest[key])
            if table.run[block] == NOWHERE:
                continue
            if table.segment[block] == NOWHERE or table.put_seq[block] < newest[key]:
                self._ledger.revoke(block)

    def vanish(self, segment: Segment, most: int, now_s: float) -> int:
        """The file of `segment` is gone: give up at most `most` of its copies, but none that is pinned; how many that
        were. Where another copy is known, that counts now.
        """
        table = self._ledger.table
        ids = segment.live_ids(table)
        # a read that is held back has its place in the file: it is waited for
        ids = ids[(table.pins[ids] == 0) & (table.state[ids] != DramState.READING)][:most]
        keys = [bytes(key) for key in table.key[ids]] if self._spare else []
        self._ledger.vanish(ids, now_s)
        self.enter([self._spare.pop(key) for key in keys if key in self._spare], now_s)
        return len(ids)

    def condemn(self, segment: Segment, places: Sequence[BadPlace], now_s: float) -> None:
        """Give up the copies in these places of `segment`, which are bad. Where another copy is known, that counts
        now.
        """
        ledger, table = self._ledger, self._ledger.table
        ids = segment.live_ids(table)
        sizes = {run: ledger.sizes[ledger.tree.run(run).namespace] for run in np.unique(table.run[ids]).tolist()}
        starts = table.page[ids].astype(np.int64) * PAGE_NBYTES
        ends = starts + np.array([sizes[run] for run in table.run[ids].tolist()], np.int64)
        bad = np.zeros(len(ids), bool)
        for place in places:
            bad |= (starts < place.offset + place.nbytes) & (ends > place.offset)
        ids = ids[bad]
        keys = [bytes(key) for key in table.key[ids]]
        ledger.vanish(ids, now_s)
        self.enter([self._spare.pop(key) for key in keys if key in self._spare], now_s)

    def leave(self, number: int) -> None:
        """Let go of what waits of a segment that is gone."""
        waiting, self._waiting, self._waiting_rows = self._waiting, OrderedDict(), 0
        for rows in waiting.values():
            for row in rows:
                if row.segment != number:
                    self._wait(row)

    # -- entering ------------------------------------------------------------------------------------------------------

    def enter(self, rows: Iterable[Row], now_s: float) -> None:
        """Enter blocks, those before others of their chain first, and what waited for them."""
        news = self._newest(self._with_waiting(rows))
        known = self._keys.find(news.keys() | {row.parent for row in news.values()})
        limits = self._limits(known)
        below: dict[bytes, list[Row]] = {}
        todo: list[Row] = []
        for row in news.values():
            block = known.get(row.key)
            if block is not None:
                if limits.get(row.key, 0) <= row.put_seq:
                    self._take(block, row)
            elif row.depth == 0 or row.parent in known:
                if self._limit_of(row, limits) <= row.put_seq:
                    todo.append(row)
            else:
                below.setdefault(row.parent, []).append(row)
        while todo:
            row = todo.pop()
            stretch = [row]
            while True:
                above = stretch[-1]
                limits[above.key] = self._limit_of(above, limits)
                more = [one for one in below.pop(above.key, []) if self._limit_of(one, limits) <= one.put_seq]
                if len(more) != 1 or not _continues(stretch[-1], more[0]):
                    break
                stretch += more
            parent = known.get(row.parent) if row.depth else None
            ids = self._plant(parent, stretch, now_s)
            if ids is None:
                continue  # it hangs on a block of another place or namespace: damage, or a lie
            known.update((one.key, block) for one, block in zip(stretch, ids, strict=True))
            todo += more
        for rest in below.values():
            for row in rest:
                self._wait(row)
        while self._waiting_rows > MOST_WAITING:
            self._waiting_rows -= len(self._waiting.popitem(last=False)[1])

    def again(self, now_s: float) -> None:
        """Try once more what waits: a put may have brought what it hangs on."""
        later, self.later = self.later, []
        parents = self._keys.find(self._waiting.keys())
        self.enter([*later, *(row for parent in parents for row in self._taken(parent))], now_s)

    def _limits(self, known: dict[bytes, int]) -> dict[bytes, int]:
        """Of each of these blocks of the index, the newest tombstone of it or of what it hangs on: what hangs on it and
        is older is dead.
        """
        if not self._dead:
            return {}
        tree, table = self._ledger.tree, self._ledger.table
        by_run: dict[int, dict[int, int]] = {}
        last: dict[int, int] = {}
        for number in {int(table.run[block]) for block in known.values()}:
            for run in reversed(tree.lineage(tree.run(number))):
                if run.number in by_run:
                    continue
                limit = last[run.parent.number] if run.parent is not None else 0
                mine = by_run[run.number] = {}
                keys = table.key[run.ids].tobytes()
                for at, block in enumerate(run.ids.tolist()):
                    limit = mine[block] = max(limit, self._dead.get(keys[at * 32 : at * 32 + 32], 0))
                last[run.number] = limit
        return {key: by_run[int(table.run[block])][block] for key, block in known.items()}

    def _limit_of(self, row: Row, limits: dict[bytes, int]) -> int:
        """The same of a row whose parent is among `limits`, or that has none."""
        return max(self._dead.get(row.key, 0), limits.get(row.parent, 0) if row.depth else 0)

    def _newest(self, rows: Iterable[Row]) -> dict[bytes, Row]:
        """Of each block the row with the highest put-sequence number, the later of equal ones; none that is dead, none
        of a segment that is gone, none in a bad place, none of impossible size.
        """
        news: dict[bytes, Row] = {}
        bad: dict[int, tuple[BadPlace, ...]] = {}
        for row in rows:
            if self._dead.get(row.key, -1) > row.put_seq or not self._is_there(row) or not self._is_sized(row):
                continue
            if row.segment not in bad:
                volume = self._core.volume_of(row.segment)
                bad[row.segment] = volume.bad.places(volume.files.nonce(row.segment)) if len(volume.bad) else ()
            if bad[row.segment] and _touches(row, bad[row.segment]):
                continue
            other = news.get(row.key)
            if other is None or other.put_seq <= row.put_seq:
                news[row.key] = row
        return news

    def _is_there(self, row: Row) -> bool:
        segment = self._ledger.space_of(row.segment).segments.get(row.segment)
        return segment is not None and segment.state in (SegmentState.GROWING, SegmentState.SEALED)

    def _is_sized(self, row: Row) -> bool:
        """Whether the record has the size of all records of its namespace, which is entered at first sight."""
        core = self._core
        number = core.numbers.get(row.namespace)
        known = UNSIZED if number is None else core.namespaces[number].geometry
        if known == UNSIZED:
            parts = part_table((row.geometry.payload_nbytes,))
            core.enter_namespace(NamespaceEntry(row.namespace, row.epoch, row.geometry, parts, None), number)
            return True
        return known == row.geometry

    def _take(self, block: int, row: Row) -> None:
        """A copy of a known block. It counts if it is newer than the one that the index has. Of equal ones, one was
        carried over from the other's segment, which goes soon: in one volume the later is the one to keep; of two
        volumes nobody knows, so both are kept in mind.
        """
        ledger, table = self._ledger, self._ledger.table
        segment = int(table.segment[block])
        if ledger.run_of(block).namespace != self._core.numbers[row.namespace]:
            return
        if table.state[block] == DramState.FILLING or block in ledger.doomed_blocks:
            self.later.append(row)
            return
        newer = segment == NOWHERE or table.put_seq[block] < row.put_seq
        if not newer and table.put_seq[block] == row.put_seq and segment != row.segment:
            newer = segment < row.segment and ledger.space_of(segment) is ledger.space_of(row.segment)
            if not newer:
                self._spare[row.key] = row
                if len(self._spare) > MOST_WAITING:
                    self._spare.popitem(last=False)
        if newer:
            ledger.found([(block, row.segment, row.page, row.put_seq)])

    def _plant(self, parent: int | None, stretch: list[Row], now_s: float) -> list[int] | None:
        first, ledger = stretch[0], self._ledger
        namespace = self._core.numbers[first.namespace]
        if parent is not None:
            run = ledger.run_of(parent)
            if run.namespace != namespace or ledger.depth_of(parent) != first.depth - 1:
                return None
        ids: list[int] = ledger.learn(
            parent,
            b"".join(row.key for row in stretch),
            namespace=namespace,
            sequence=first.sequence,
            depth=first.depth,
            now_s=now_s,
        ).tolist()
        ledger.found([(b, row.segment, row.page, row.put_seq) for b, row in zip(ids, stretch, strict=True)])
        return ids

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self, row: Row) -> None:
        self._waiting.setdefault(row.parent, []).append(row)
        self._waiting_rows += 1

    def _taken(self, parent: bytes) -> list[Row]:
        """Take out what waits for `parent`."""
        rows = self._waiting.pop(parent, [])
        self._waiting_rows -= len(rows)
        return rows

    def _with_waiting(self, rows: Iterable[Row]) -> list[Row]:
        """`rows`, and what waits for them, for what they hang on, and for each other."""
        everything = list(rows)
        keys = {row.parent for row in everything}
        at = 0
        while keys or at < len(everything):
            if keys:
                key = keys.pop()
            else:
                key, at = everything[at].key, at + 1
            everything += self._taken(key)
        return everything


def _touches(row: Row, places: Iterable[BadPlace]) -> bool:
    start = row.page * PAGE_NBYTES
    end = start + row.geometry.record_nbytes
    return any(start < place.offset + place.nbytes and end > place.offset for place in places)


def _continues(row: Row, after: Row) -> bool:
    same = (row.namespace, row.sequence) == (after.namespace, after.sequence)
    return same and after.depth == row.depth + 1
