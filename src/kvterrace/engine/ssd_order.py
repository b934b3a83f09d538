"""What the SSD tier would keep if it could choose block by block: by this, reclaim chooses among segments."""

from __future__ import annotations

import numpy as np

from kvterrace.engine.below import CopiesBelow
from kvterrace.engine.blocks import BlockTable, Ids, Keys
from kvterrace.engine.slot_sizes import SlotSizes
from kvterrace.policy.eviction import EvictionPolicy

__all__ = ["SsdOrder"]

#: Of the room, what the policy may fill. A segment goes as a whole, and what is worth keeping in it is written anew: of
#: a tier that is full of such blocks, nearly all. On the shipped traces more than this gains no hits.
_FILL = 0.7
#: The policy's capacity follows the size of the records in steps of this share.
_STEP = 1 / 32


class SsdOrder:
    """A policy with the room of all volumes, told of the same requests as that of DRAM; what is inside is `kept` in the
    block table. Blocks found at open are not, until they are asked for. Not thread-safe: the ledger's owner serialises.
    """

    def __init__(self, table: BlockTable, sizes: SlotSizes, below: CopiesBelow, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._table = table
        self._sizes = sizes
        self._below = below
        self._capacity = 0

    def request(self, chain: Keys, ids: Ids, now_s: float, *, extend: bool, output_tokens: int = -1) -> None:
        """A prompt came; see `EvictionPolicy.request`."""
        self._resize()
        gone = self.policy.request(chain, ids, self._table.words, now_s, extend=extend, output_tokens=output_tokens)
        self._mark(gone, kept=False)
        self._keep(ids)

    def enter(self, ids: Ids) -> None:
        """Blocks of the prompt that came last are there now; see `EvictionPolicy.enter`."""
        self.policy.enter(ids, self._table.words)
        self._keep(ids)

    def gone(self, ids: Ids) -> None:
        """These blocks are forgotten."""
        self.policy.forget(ids, self._table.words)
        self._mark(ids, kept=False)

    def _keep(self, ids: Ids) -> None:
        others = ids[~self._table.kept[ids]]
        self._mark(others[self.policy.inside(others, self._table.words)], kept=True)

    def _mark(self, ids: Ids, *, kept: bool) -> None:
        table = self._table
        ids = ids[table.kept[ids] != kept]
        if len(ids):
            table.kept[ids] = kept
            for space, some in self._below.by_space(ids):
                space.keep(table, some, kept=kept)

    def _resize(self) -> None:
        spaces = self._below.dealing.spaces
        mean_nbytes = self._sizes.mean_nbytes
        if len(self._sizes.geometries) > 1:
            blocks = sum(int(np.sum(space.columns.live_blocks)) for space in spaces)
            mean_nbytes = sum(space.live_nbytes for space in spaces) / blocks if blocks else mean_nbytes
        nbytes = sum(space.cap_nbytes - 2 * space.segment_nbytes for space in spaces)  # one is filled, one kept free
        capacity = max(1, int(_FILL * nbytes / mean_nbytes))
        if self._capacity == 0 or abs(capacity - self._capacity) > _STEP * self._capacity:
            self._capacity = capacity
            self.policy.resize(capacity)
