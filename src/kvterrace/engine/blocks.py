"""The block table: what the index knows of each block, one column for each fact (about 75 B a block); and the
sizes of their records.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.format.record import PAGE_NBYTES
from kvterrace.keys import KEY_NBYTES
from kvterrace.types import Tier

__all__ = ["NOWHERE", "BlockTable", "DramState", "Geometry", "Ids", "Keys", "Verdict"]

Ids = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]

#: Value of `slot` and `segment` where a block has no copy there.
NOWHERE = -1

_GROWTH = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the records of one namespace: header and payload, each padded to pages."""

    header_nbytes: int
    payload_nbytes: int

    @property
    def record_nbytes(self) -> int:
        """Bytes of a record on the drive and of a slot in the arena."""
        return self.header_nbytes + -(-self.payload_nbytes // PAGE_NBYTES) * PAGE_NBYTES


class DramState(enum.IntEnum):
    """What the DRAM slot of a block holds."""

    EMPTY = 0  #: no slot
    FILLING = 1  #: a put is copying into it
    READING = 2  #: a read from below is landing in it
    READY = 3  #: the block's bytes, complete and, if they came from below, verified


class Verdict(enum.IntEnum):
    """Whether a block is worth a write to the SSD."""

    NONE = 0  #: not judged yet
    ADMITTED = 1
    REFUSED = 2  #: and so `spent`, unless it was put again since


class BlockTable:
    """Columns over block ids. Not thread-safe: the ledger's owner serialises.

    Columns (`id` is the index):
        key: the block's key.
        state: `DramState`.
        slot: page number of the slot in the arena, or NOWHERE.
        segment: number of the segment that holds the SSD copy, or NOWHERE.
        page: page number of the record in that segment.
        put_seq: put-sequence number that a read of the copy must find.
        run: id of the run that the block belongs to.
        pins: holders that want the block kept (active KV).
        users: transfers that use the slot at this moment; it must not move or be freed.
        writing: whether a write of the block is in flight.
        spent: in DRAM alone, and not to be written: the SSD tier has given its copy up to make room, or may not be
            given the block again. It leaves with its slot.
        awaited: prefetched, and not used since.
        leaving: the eviction policy has let go of what DRAM holds of it; it stays until that room is wanted.
        kept: the order of the SSD tier would keep the block there; see `SsdOrder`.
        marked: scratch; False but within a call.
        seen: used in two turns.
        verdict: `Verdict`.
        score: decayed cumulative attention score.
    """

    _COLUMNS: tuple[tuple[str, Any, int], ...] = (
        ("state", np.uint8, 0),
        ("slot", np.int32, NOWHERE),
        ("segment", np.int32, NOWHERE),
        ("page", np.int32, NOWHERE),
        ("put_seq", np.int64, 0),
        ("run", np.int32, NOWHERE),
        ("pins", np.int32, 0),
        ("users", np.int32, 0),
        ("writing", np.bool_, 0),
        ("spent", np.bool_, 0),
        ("awaited", np.bool_, 0),
        ("leaving", np.bool_, 0),
        ("kept", np.bool_, 0),
        ("marked", np.bool_, 0),
        ("seen", np.bool_, 0),
        ("verdict", np.uint8, 0),
        ("score", np.float32, 0),
    )

    #: Columns of which a block that is no more may leave something behind; `release` wants the others at their start.
    _STALE = tuple(
        (name, start) for name, _, start in _COLUMNS if name in {"page", "put_seq", "spent", "seen", "verdict", "score"}
    )

    key: npt.NDArray[np.uint8]
    state: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.int32]
    segment: npt.NDArray[np.int32]
    page: npt.NDArray[np.int32]
    put_seq: npt.NDArray[np.int64]
    run: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int32]
    users: npt.NDArray[np.int32]
    writing: npt.NDArray[np.bool_]
    spent: npt.NDArray[np.bool_]
    awaited: npt.NDArray[np.bool_]
    leaving: npt.NDArray[np.bool_]
    kept: npt.NDArray[np.bool_]
    marked: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]
    verdict: npt.NDArray[np.uint8]
    score: npt.NDArray[np.float32]

    def __init__(self) -> None:
        self.key = np.zeros((0, KEY_NBYTES), np.uint8)
        for name, dtype, _ in self._COLUMNS:
            setattr(self, name, np.zeros(0, dtype))
        self._free: Ids = np.zeros(0, np.int32)
        self._free_count = 0
        self._watched: list[list[Ids]] = []
        #: Called with a tier and keys, end to end, of blocks that were just written to it, or that it gave up.
        self.on_enter: Callable[[Tier, bytes], None] | None = None
        self.on_leave: Callable[[Tier, bytes], None] | None = None
        self._departed: list[bytes] | None = None  # None: nobody asks

    @property
    def capacity(self) -> int:
        """Ids that exist, used or free."""
        return len(self.key)

    @property
    def used(self) -> int:
        """Ids in use."""
        return self.capacity - self._free_count

    @property
    def words(self) -> Keys:
        """The first eight bytes of each block's key."""
        return self.key.view("<u8")[:, 0]

    def by_run(self, ids: Ids) -> tuple[list[int], list[int]]:
        """Numbers of the runs of these blocks in the order they come in, and how many of the blocks each has."""
        runs = self.run[ids]
        if len(runs) == 1 or (len(runs) and (runs == runs[0]).all()):
            return [int(runs[0])], [len(runs)]
        numbers, firsts, counts = np.unique(runs, return_index=True, return_counts=True)
        order = np.argsort(firsts)
        return numbers[order].tolist(), counts[order].tolist()

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes."""
        columns = [getattr(self, name) for name, _, _ in self._COLUMNS]
        return int(self.key.nbytes + self._free.nbytes + sum(column.nbytes for column in columns))

    def allocate(self, count: int) -> Ids:
        """`count` fresh ids with every column at its start value; the caller sets the keys."""
        if count > self._free_count:
            self._grow(count - self._free_count)
        self._free_count -= count
        ids = self._free[self._free_count : self._free_count + count][::-1].copy()
        for name, start in self._STALE:
            getattr(self, name)[ids] = start
        for came in self._watched:
            came.append(ids)
        return ids

    def watch(self) -> list[Ids]:
        """A list that each `allocate` from now on adds its ids to. The caller clears it now and then."""
        came: list[Ids] = []
        self._watched.append(came)
        return came

    def entered(self, tier: Tier, ids: Ids) -> None:
        """These blocks have copies in `tier` now."""
        if self.on_enter is not None and len(ids):
            self.on_enter(tier, self.key[ids].tobytes())

    def left(self, tier: Tier, ids: Ids) -> None:
        """`tier` gave up its copies of these blocks."""
        if self.on_leave is not None and len(ids):
            self.on_leave(tier, self.key[ids].tobytes())

    def lost_copy(self, ids: Ids) -> None:
        """A copy of each of these blocks was given up: whoever gives up copies says so."""
        if self._departed is not None:
            gone = ids[(self.state[ids] == DramState.EMPTY) & (self.segment[ids] == NOWHERE)]
            if len(gone):
                self._departed.append(self.key[gone].tobytes())

    def take_departed(self) -> bytes:
        """Keys, end to end, of blocks that have lost their last copy since the last call; the first begins it."""
        found, self._departed = self._departed or [], []
        return b"".join(found)

    def release(self, ids: Ids) -> None:
        """Give ids back. They must not be in use anywhere."""
        assert not self.users[ids].any() and not self.pins[ids].any(), "a block in use was released"
        assert (self.slot[ids] == NOWHERE).all() and (self.segment[ids] == NOWHERE).all(), (
            "a block with a copy was released"
        )
        assert not (self.leaving[ids] | self.awaited[ids] | self.writing[ids] | self.kept[ids]).any(), (
            "a block in a list was released"
        )
        self.run[ids] = NOWHERE
        self._free[self._free_count : self._free_count + len(ids)] = ids
        self._free_count += len(ids)

    def _grow(self, at_least: int) -> None:
        old = self.capacity
        new = old + max(at_least, _GROWTH, old // 8)
        key = np.zeros((new, KEY_NBYTES), np.uint8)
        key[:old] = self.key
        self.key = key
        for name, dtype, start in self._COLUMNS:
            column = np.full(new, start, dtype)
            column[:old] = getattr(self, name)
            setattr(self, name, column)
        free = np.zeros(new, np.int32)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + new - old] = np.arange(new - 1, old - 1, -1)
        # lower ids are handed out first, so that they lie on top of the stack
        self._free = free
        self._free_count += new - old
