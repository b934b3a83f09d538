"""Runs that hold blocks without a copy below, and which of those blocks are written next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.engine.space import Segment, SegmentSpace
from kvterrace.engine.tree import Run, RunTree

__all__ = ["DirtyRuns", "WriteBatch", "WritePolicy"]

#: Plain: to compare what NumPy holds with an enum member takes many times as long.
_READY = int(DramState.READY)


#: A run in use all the time is written this many times `WritePolicy.after_s` after it first held something to write.
_MOST_WAITS = 10


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """When idle blocks that have no copy below are written.

    Attributes:
        after_s: behind: once a run has been idle this long, or was in use for ten times as long.
        dirty_fraction: sooner, once this share of the arena has no copy below.
        batch_nbytes: at most this much in one sequential write: 8 MiB of payload, and its headers.
    """

    after_s: float = 2.0
    dirty_fraction: float = 0.5
    batch_nbytes: int = (8 << 20) + (64 << 10)


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Records `ids`, to be written one behind the other from byte `offset` of `segment` on, each from its own slot."""

    segment: Segment
    offset: int
    ids: Ids
    nbytes: int


class DirtyRuns:
    """The ledger's list of what is to be written. Not thread-safe: the ledger's owner serialises."""

    def __init__(
        self,
        table: BlockTable,
        tree: RunTree,
        sizes: SlotSizes,
        doomed: Callable[[Ids], npt.NDArray[np.bool_]],
    ) -> None:
        """`doomed(ids)`: which of them are not worth writing any more."""
        self._table = table
        self._tree = tree
        self._sizes = sizes
        self._doomed = doomed
        #: When each run, by number, first held a block without a copy below; oldest first.
        self.since_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}  # for each in `since_s`: the same, whether or not it was used since
        self._counts: dict[int, int] = {}  # for each in `since_s`: how many such blocks it has
        #: Bytes of all such blocks.
        self.nbytes = 0
        #: Told of each run whose turn it is to be written; may take blocks of it, and of those before it, off the list.
        self.judge: Callable[[Run, float], None] = lambda _, __: None

    def add(self, ids: Ids, now_s: float) -> None:
        """These blocks are ready and have no copy below."""
        if not len(ids):
            return
        for number, count in zip(*self._table.by_run(ids), strict=True):
            if number not in self.since_s:
                self.since_s[number] = self._first_s[number] = now_s
                self._counts[number] = 0
            self._counts[number] += count
        self.nbytes += self._sizes.total(ids)

    def remove(self, ids: Ids) -> None:
        """These blocks were such, and are no longer."""
        for number, count in zip(*self._table.by_run(ids), strict=True):
            self._set_count(number, self._counts[number] - count)
        self.nbytes -= self._sizes.total(ids)

    def split(self, head: Run, tail: Run) -> None:
        """`tail` was cut off `head`."""
        since_s = self.since_s.get(head.number)
        if since_s is not None:
            count, in_tail = self._counts[head.number], int(np.count_nonzero(self.are(tail.ids)))
            self.since_s[tail.number] = since_s
            self._first_s[tail.number] = self._first_s[head.number]
            self._set_count(head.number, count - in_tail)
            self._set_count(tail.number, in_tail)

    def _set_count(self, run: int, count: int) -> None:
        self._counts[run] = count
        if not count:
            del self.since_s[run], self._first_s[run], self._counts[run]

    def hurry(self, ids: Ids) -> None:
        """Write the runs of these blocks next, used or not."""
        first = {number: float("-inf") for number in self._table.run[ids].tolist() if number in self.since_s}
        if first:
            self._first_s.update(first)
            self.since_s = first | {number: at_s for number, at_s in self.since_s.items() if number not in first}

    def _is_dirty(self, block: int) -> bool:
        """As `_dirty`, of one. Runs are written from their heads on: while the last is dirty, few look at all."""
        table = self._table
        return bool(table.state[block] == _READY and table.segment[block] == NOWHERE and not table.spent[block])

    def are(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each block, whether it is ready and has no copy below, and is not done with."""
        table = self._table
        dirty: npt.NDArray[np.bool_] = (
            (table.state[ids] == _READY) & (table.segment[ids] == NOWHERE) & ~table.spent[ids]
        )
        return dirty

    def _wanted(self, run: Run) -> Ids:
        found: Ids = run.ids[self.are(run.ids)]
        return found[~self._doomed(found)]

    def waiting(self, run: Run) -> Ids:
        """Blocks of `run` that are to be written, and are not being written already."""
        found = self._wanted(run)
        return found[~self._table.writing[found]]

    def wait_for(self, refused: Callable[[int], bool]) -> bool:
        """Whether a block that is not `refused` waits to be written, and is not being written already."""
        waiting = (self.waiting(self._tree.run(number)) for number in self.since_s)
        return any(not refused(block) for ids in waiting for block in ids.tolist())

    def owes(self, put_seq: int) -> bool:
        """Whether some block put before the put-sequence number `put_seq` has no copy below yet."""
        put_seqs, runs = self._table.put_seq, [self._tree.run(number) for number in self.since_s]
        if any(self._is_dirty(int(run.ids[-1])) and self._owes_of(run.ids[-1:], put_seq) for run in runs):
            return True
        return any((put_seqs[self._wanted(run)] < put_seq).any() for run in runs)

    def _owes_of(self, ids: Ids, put_seq: int) -> bool:
        return bool((self._table.put_seq[ids] < put_seq).all() and not self._doomed(ids).any())

    def _first(self, space: SegmentSpace, refused: Callable[[int], bool]) -> list[int]:
        """What waits of `space.first` and is not left to another volume."""
        table, ids = self._table, space.first
        if not len(ids):
            return []
        ids = ids[(table.run[ids] != NOWHERE) & self.are(ids) & ~table.writing[ids]]
        return [block for block in ids[~self._doomed(ids)].tolist() if not refused(block)]

    def _in_order(self, run: Run, taken: set[int]) -> Iterator[int]:
        """What waits of `run`, behind what waits of the runs that it hangs on: without them it is worth nothing after a
        crash.
        """
        for one in reversed(self._tree.lineage(run)):
            if one.number in self.since_s:
                yield from (block for block in self.waiting(one).tolist() if block not in taken)

    def choose(
        self,
        space: SegmentSpace,
        writes: WritePolicy,
        now_s: float,
        *,
        pressed: bool,
        refused: Callable[[int], bool] = lambda _: False,
    ) -> WriteBatch | None:
        """Blocks to write now, placed one behind the other in the open segment of `space`; None if none is due or none
        is open. `refused`: which blocks are left to another volume.
        """
        segment = space.open
        space.open_is_full = False
        if segment is None or not (self.since_s or len(space.first)):
            return None
        chosen: list[int] = []
        taken: set[int] = set()
        offset = nbytes = 0
        for block in self._first(space, refused):
            run = self._tree.run_of(block)
            record_nbytes = self._sizes[run.namespace]
            if chosen and nbytes + record_nbytes > writes.batch_nbytes:
                return WriteBatch(segment, offset, np.array(chosen, np.int32), nbytes)
            if not space.fits(segment, record_nbytes, run.namespace):
                space.open_is_full = True
                return WriteBatch(segment, offset, np.array(chosen, np.int32), nbytes) if chosen else None
            at = space.place(segment, record_nbytes, run.namespace)
            offset = offset or at
            nbytes += record_nbytes
            chosen.append(block)
            taken.add(block)
        for number, since_s in list(self.since_s.items()):
            if number not in self.since_s:
                continue  # judged together with one that hangs on it
            run = self._tree.run(number)
            if not pressed and since_s + writes.after_s > now_s:
                break  # and so for all behind it, or nearly so
            used_s = float(self._tree.used_s[number])
            limit_s = self._first_s[number] + _MOST_WAITS * writes.after_s
            if not pressed and used_s + writes.after_s > now_s and limit_s > now_s:
                del self.since_s[number]  # used since: to be looked at again when it may be idle
                self.since_s[number] = min(used_s, limit_s - writes.after_s)
                continue
            self.judge(run, now_s)
            if number not in self.since_s:
                continue
            record_nbytes = self._sizes[run.namespace]
            room = max(writes.batch_nbytes - nbytes, 0 if chosen else record_nbytes) // record_nbytes
            willing = (block for block in self._in_order(run, taken) if not refused(block))
            due = list(islice(willing, room + 1))  # a long run is written in many batches
            most = min(len(due), room)
            fitting = space.fitting(segment, record_nbytes, run.namespace, most)
            allowed = space.fitting(segment, record_nbytes, run.namespace, fitting, beside_nbytes=space.kept_nbytes)
            if allowed:
                at = space.place(segment, record_nbytes, run.namespace, count=allowed)
                offset = offset or at
                nbytes += allowed * record_nbytes
                chosen += due[:allowed]
                taken.update(due[:allowed])
            if allowed < len(due):
                space.open_is_full = allowed == fitting < most
                break
            self._first_s[number] = max(self._first_s[number], now_s)
        return WriteBatch(segment, offset, np.array(chosen, np.int32), nbytes) if chosen else None
