"""The production ledger driven by a trace: every decision is made, no byte is moved, and I/O takes no time.

What it shares with a running store is everything that decides: the tree, eviction, write-behind, placing, reclaim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvterrace.engine import reclaim, residence
from kvterrace.engine.blocks import NOWHERE, DramState
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.layout import KVLayout
from kvterrace.policy.admission import WriteBudget
from kvterrace.types import Tier

__all__ = ["LadderCounts", "LedgerLadder", "chain_of"]

#: Any namespace will do: a replay has one, and its keys are the trace's ids.
_NAMESPACE = Namespace("trace", KVLayout(layers=1, kv_heads=1, head_dim=1, dtype="uint8", block_tokens=1))


def chain_of(ids: npt.NDArray[np.int64]) -> KeyChain:
    """A key chain from a trace's ids: each stands for its whole prefix, so it is a key as it is."""
    keys = np.zeros((len(ids), KEY_NBYTES // 8), "<i8")
    keys[:, 0] = ids + 1
    return KeyChain(_NAMESPACE, bytes(KEY_NBYTES), keys.tobytes())


@dataclass(slots=True)
class LadderCounts:
    """What a replay has seen. Blocks, except where the name says bytes."""

    accesses: int = 0
    dram_hits: int = 0
    ssd_hits: int = 0
    not_stored: int = 0
    written_nbytes: int = 0
    rewritten_nbytes: int = 0
    reclaimed_segments: int = 0
    carried: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written to the SSD for each byte that was written for the first time since it was put."""
        first = self.written_nbytes - self.rewritten_nbytes
        return self.written_nbytes / first if first else 1.0


class LedgerLadder:
    """A ladder of DRAM and SSD (or of DRAM alone) without bytes. Sizes in blocks of `record_nbytes` each."""

    def __init__(
        self,
        dram_blocks: int,
        ssd_blocks: int,
        *,
        record_nbytes: int = 1 << 20,
        write_behind_s: float = 2.0,
        budget: WriteBudget | None = None,
    ) -> None:
        self.space: SegmentSpace | None = None
        if ssd_blocks:
            cap = ssd_blocks * record_nbytes
            self.space = SegmentSpace(cap, min(64 * record_nbytes, cap // 16), lambda records, _: 4096 + 160 * records)
        self.ledger = Ledger(
            dram_blocks * record_nbytes, self.space, writes=WritePolicy(after_s=write_behind_s), budget=budget
        )
        self.ledger.add_namespace(0, Geometry(4096, record_nbytes - 4096), _NAMESPACE.digest)
        self.counts = LadderCounts()
        self._written: set[int] = set()  # put-sequence numbers that have been on the SSD

    def request(self, ids: npt.NDArray[np.int64], now_s: float) -> int:
        """Serve one request as an engine would: restore the resident prefix, put the rest. Returns the blocks hit."""
        ledger, table, counts = self.ledger, self.ledger.table, self.counts
        chain = chain_of(ids)
        known = ledger.find(chain)
        tiers = ledger.resident(known)
        hits = len(tiers)
        counts.accesses += len(ids)
        counts.dram_hits += tiers.count(Tier.DRAM)
        counts.ssd_hits += tiers.count(Tier.SSD)
        ledger.wanted(known, now_s)
        ledger.touch(chain, hits, now_s)
        known = known[:hits]
        ledger.hold(known)
        for block in known[table.state[known] == DramState.EMPTY].tolist():
            if ledger.reserve(block, DramState.READING):
                ledger.landed(block)
        for block in known[::-1].tolist():
            ledger.let_go(block)
        self._put(chain, hits, now_s)
        self._write(now_s, pressed=False)
        return hits

    def _put(self, chain: KeyChain, start: int, now_s: float) -> None:
        ledger = self.ledger
        for index in range(start, len(chain)):
            block = ledger.insert(chain, index, namespace=0, sequence=b"", now_s=now_s)
            if block is None:
                self.counts.not_stored += len(chain) - index
                break
            if ledger.table.state[block] != DramState.EMPTY or ledger.table.segment[block] != NOWHERE:
                continue
            ledger.hold(np.array([block], np.int32))
            put_seq = ledger.begin_fill(block)
            if put_seq is None:
                self._write(now_s, pressed=True)
                put_seq = ledger.begin_fill(block)
            if put_seq is None:
                ledger.let_go(block)
                self.counts.not_stored += len(chain) - index
                break
            ledger.filled(block, now_s)
            ledger.let_go(block)
        ledger.touch(chain, len(chain), now_s)

    def _write(self, now_s: float, *, pressed: bool) -> None:
        ledger, table, counts = self.ledger, self.ledger.table, self.counts
        while True:
            batch = ledger.next_write(now_s, pressed=pressed)
            if batch is not None:
                nbytes = batch.nbytes // len(batch.ids)
                for seq in table.put_seq[batch.ids].tolist():
                    counts.rewritten_nbytes += nbytes if seq in self._written else 0
                    self._written.add(seq)
                counts.written_nbytes += batch.nbytes
                ledger.written(batch)
                batch.segment.written_s = now_s
                continue
            if not ledger.needs_segment() or not self._next_segment(now_s):
                return

    def _next_segment(self, now_s: float) -> bool:
        space = self.space
        assert space is not None
        if space.open is not None:
            space.open.state = SegmentState.SEALED
            space.open = None
        while not space.room_for_segment():
            found = residence.choose(self.ledger, now_s)
            if found is None:
                return False
            segment, carry = found
            for block in carry.tolist():
                if self.ledger.table.state[block] == DramState.EMPTY and self.ledger.reserve(block, DramState.READING):
                    self.ledger.landed(block)
                    self.counts.carried += 1
            reclaim.give_up(self.ledger, segment, carry, now_s)
            self.counts.reclaimed_segments += 1
            space.remove(segment)
        segment = space.begin()
        segment.state = SegmentState.OPEN
        space.open = segment
        return True
