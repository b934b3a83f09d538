"""The ledger of who reads a partition that another process writes: copies below come and go without its doing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvterrace.engine.blocks import NOWHERE, Ids
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.tree import Run

__all__ = ["SharedLedger"]


class SharedLedger(Ledger):
    """Never writes: what has no copy below is idle KV of this process alone, and goes when its room is wanted."""

    def depth_of(self, block: int) -> int:
        """The place of a block in its chain."""
        run = self.run_of(block)
        return run.depth + int(np.flatnonzero(run.ids == block)[0])

    def learn(
        self, parent: int | None, keys: bytes, *, namespace: int, sequence: bytes, depth: int, now_s: float
    ) -> Ids:
        """New blocks that hang on the block `parent` (None: on none), in order. They have no copy yet."""
        run: Run | None = None
        if parent is not None:
            run = self.run_of(parent)
            kept = self.depth_of(parent) - run.depth + 1
            if kept < len(run):
                self._split(run, kept)
            now_s = float(self.tree.used_s[run.number])  # nothing was used later than what it hangs on
        return self.tree.append(run, keys, namespace=namespace, sequence=sequence, depth=depth, now_s=now_s)[1]

    def found(self, copies: list[tuple[int, int, int, int]]) -> None:
        """Blocks have a copy below from now on, instead of the one that they had.

        Args:
            copies: block, number of the segment, page in it, put-sequence number; each block once.
        """
        table = self.table
        by_segment: defaultdict[int, list[int]] = defaultdict(list)
        nbytes: defaultdict[int, int] = defaultdict(int)
        for block, segment, page, put_seq in copies:
            run = self.run_of(block)
            one = np.array([block], np.int32)
            if self.dirty.are(one)[0]:
                self.dirty.remove(one)
            if table.segment[block] != NOWHERE:
                self._below.lose(block)
            table.page[block], table.put_seq[block] = page, put_seq
            table.spent[block] = False
            nbytes[segment] += self.sizes[run.namespace]
            by_segment[segment].append(block)
        for number, blocks in by_segment.items():
            space, ids = self.space_of(number), np.array(blocks, np.int32)
            space.gain(table, space.segments[number], ids, nbytes[number], self.tree.used_s[table.run[ids]])

    def vanish(self, ids: Ids, now_s: float) -> None:
        """The copies below of these blocks are gone. What DRAM holds of them stays; what is nowhere leaves the index,
        unless something hangs on it.
        """
        table = self.table
        for block in ids.tolist():
            self.lost(block, now_s)
        nowhere = ids[(table.slot[ids] == NOWHERE) & (table.pins[ids] == 0)]
        _, first = np.unique(table.run[nowhere], return_index=True)
        for block in nowhere[first].tolist():
            if table.run[block] != NOWHERE:  # not pruned together with one behind it
                self._giving_up.tidy(block)

    def revoke(self, block: int) -> None:
        """Give up every copy of a block, and of no other; one in use or pinned as soon as it is let go."""
        self._giving_up.revoke(block)

    def revoke_below(self, block: int, put_seq: int) -> None:
        """Give up every copy of what hangs on a block and is older than `put_seq`, or of unknown age; what is in use or
        pinned as soon as it is let go.
        """
        table, going, run = self.table, self._giving_up, self.run_of(block)
        at, below = int(np.flatnonzero(run.ids == block)[0]) + 1, self.tree.below(run)
        for ids in (run.ids[at:], *(child.ids for child in below)):
            old = ids[(table.segment[ids] == NOWHERE) | (table.put_seq[ids] < put_seq)]
            held = (table.users[old] > 0) | (table.pins[old] > 0)
            going.doomed.update(old[held].tolist())
            going._drop_copies(old[~held])  # noqa: SLF001 - as `revoke`, many at once
        for one in (*reversed(below), run):
            going._prune(one)  # noqa: SLF001 - as above
