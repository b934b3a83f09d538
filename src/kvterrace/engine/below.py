"""Copies below, block by block: what is owed one, what has lost one, and what is to have none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvterrace.engine.blocks import NOWHERE, BlockTable, DramState, Ids, Verdict
from kvterrace.engine.dealing import Dealing
from kvterrace.engine.dirty import DirtyRuns
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.engine.space import SegmentSpace, volumes_of
from kvterrace.engine.tree import RunTree

__all__ = ["CopiesBelow"]


class CopiesBelow:
    """The SSD tier's side of each block. Not thread-safe: the ledger's owner serialises."""

    def __init__(self, table: BlockTable, tree: RunTree, dirty: DirtyRuns, dealing: Dealing, sizes: SlotSizes) -> None:
        self._table = table
        self._tree = tree
        self._dirty = dirty
        self._sizes = sizes
        self.dealing = dealing

    def owe(self, ids: Ids, now_s: float) -> None:
        """Blocks are ready and have no copy below: they are to be written, if they may; else they are `spent`."""
        table = self._table
        if self.dealing.bars:
            may = np.array([self.dealing.may_store(key.tobytes()) for key in table.key[ids]], np.bool_)
            table.spent[ids[~may]] = True
            ids = ids[may]
        self._dirty.add(ids, now_s)

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
            self.owe(np.array([block], np.int32), now_s)

    def admit(self, block: int) -> None:
        """The block is worth a write, whatever was said of it: it had a copy, or something hangs on it that has."""
        self._table.verdict[block] = Verdict.ADMITTED

    def bar(self, block: int) -> None:
        """The block may not be stored from now on: if it waits to be written, it does no longer."""
        table = self._table
        waits = table.state[block] == DramState.READY and table.segment[block] == NOWHERE and not table.spent[block]
        if waits and not table.writing[block]:
            self._dirty.remove(np.array([block], np.int32))
            table.spent[block] = True

    def spend(self, block: int) -> None:
        """The SSD copy makes room for others. What DRAM holds stays there until that room is wanted, and is not written
        again: else a tier above that is the larger one would have the tier below rewritten for ever.
        """
        self.lose(block)
        self._table.spent[block] = self._table.state[block] == DramState.READY

    def lose(self, block: int) -> None:
        """The copy of a block counts no longer."""
        self.lose_all(np.array([block], np.int32))

    def lose_all(self, ids: Ids) -> None:
        """The copies of these blocks count no longer."""
        sizes = self._sizes.of(ids)
        for nbytes in np.unique(sizes).tolist() if len(sizes) > 1 else sizes.tolist():
            for space, some in self.by_space(ids[sizes == nbytes]):
                space.lose(self._table, some, nbytes, self._tree.used_s[self._table.run[some]])

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
