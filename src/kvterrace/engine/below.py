"""Copies below, block by block: what is owed one, what has lost one, and what is to have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Verdict
from kvterrace.engine.dealing import Dealing
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.space import SegmentSpace, volumes_of
from kvterrace.engine.tree import RunTree

__all__ = ["CopiesBelow"]


class CopiesBelow:
    """The SSD tier's side of each block. Not thread-safe: the ledger's owner serialises."""

    def __init__(
        self, table: BlockTable, tree: RunTree, dirty: DirtyRuns, dealing: Dealing, slot_nbytes: Mapping[int, int]
    ) -> None:
        """`slot_nbytes`: size of a record by namespace."""
        self._table = table
        self._tree = tree
        self._dirty = dirty
        self._slot_nbytes = slot_nbytes
        self.dealing = dealing

    def owe(self, block: int, now_s: float) -> None:
        """A block is ready and has no copy below: it is to be written, if it may; else it is `spent`."""
        if self.dealing.may_store(self._table.key[block].tobytes()):
            self._dirty.add(block, now_s)
        else:
            self._table.spent[block] = True

    def lost(self, block: int, now_s: float, *, segment: int | None = None, page: int = NOWHERE) -> None:
        """The SSD copy (if given: the one at that place; the block may have another by now) was found to be wrong or
        gone. What hangs on the block stays: it may be stored again.
        """
        if self._table.segment[block] == NOWHERE:
            return
        if segment is not None and (self._table.segment[block] != segment or self._table.page[block] != page):
            return
        self.lose(block)
        self.admit(block)
        if self._table.state[block] == DramState.READY:
            self.owe(block, now_s)

    def admit(self, block: int) -> None:
        """The block is worth a write, whatever was said of it: it had a copy, or something hangs on it that has."""
        self._table.verdict[block] = Verdict.ADMITTED

    def bar(self, block: int) -> None:
        """The block may not be stored from now on: if it waits to be written, it does no longer."""
        table = self._table
        waits = table.state[block] == DramState.READY and table.segment[block] == NOWHERE and not table.spent[block]
        if waits and not table.writing[block]:
            run = self._tree.run_of(block)
            table.spent[block] = True
            self._dirty.nbytes -= self._slot_nbytes[run.namespace]
            self._dirty.settle(run)

    def spend(self, block: int) -> None:
        """The SSD copy makes room for others. What DRAM holds stays there until that room is wanted, and is not written
        again: else a tier above that is the larger one would have the tier below rewritten for ever.
        """
        self.lose(block)
        self._table.spent[block] = self._table.state[block] == DramState.READY

    def lose(self, block: int) -> None:
        """The copy of a block counts no longer."""
        self.lose_all(np.array([block], np.int32), self._slot_nbytes[self._tree.run_of(block).namespace])

    def lose_all(self, ids: Ids, record_nbytes: int) -> None:
        """The copies of these blocks, records of that many bytes, count no longer."""
        for space, some in self.by_space(ids):
            space.lose(self._table, some, record_nbytes, self._tree.used_s[self._table.run[some]])

    def by_space(self, ids: Ids) -> Iterator[tuple[SegmentSpace, Ids]]:
        """The blocks of `ids` that have a copy below, by the volume that it is on."""
        spaces, numbers = self.dealing.spaces, self._table.segment[ids]
        here = numbers != NOWHERE
        if not here.all():
            ids, numbers = ids[here], numbers[here]
        if len(spaces) == 1:
            if len(ids):
                yield spaces[0], ids
            return
        volumes = volumes_of(numbers)
        for volume in np.unique(volumes).tolist():
            yield spaces[volume], ids[volumes == volume]
