"""The production ledger driven by a trace: every decision is made, no byte is moved, and I/O takes no time.

What it shares with a running store is everything that decides: the tree, eviction, write-behind, placing, reclaim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvterrace.engine import reclaim, residence
from kvterrace.engine.blocks import DramState
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace, SegmentState
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.layout import KVLayout
from kvterrace.policy.admission import WriteBudget
from kvterrace.policy.eviction import EvictionPolicy

#: Plain: to compare what NumPy holds with an enum member takes many times as long.
_EMPTY = int(DramState.EMPTY)

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
    """What a replay has seen. Blocks, except where the name says tokens, bytes or segments.

    Every access is a hit or a miss of one cause: `cold` (never asked for before), `gone` (was stored, and given up
    since), `refused` (was not stored when it was asked for last), `behind_gap` (on the ladder, but something before it
    in its chain is not).
    """

    accesses: int = 0
    dram_hits: int = 0
    ssd_hits: int = 0
    cold_misses: int = 0
    gone_misses: int = 0
    refused_misses: int = 0
    behind_gap_misses: int = 0
    tokens: int = 0
    dram_hit_tokens: int = 0
    ssd_hit_tokens: int = 0
    #: Given to the ladder, and not taken.
    not_stored: int = 0
    #: Given up with their last copy.
    dropped: int = 0
    #: Moved up, from the SSD to DRAM, because they were asked for.
    promoted: int = 0
    #: Moved down: written to the SSD, again and again ones included.
    demoted: int = 0
    written_nbytes: int = 0
    rewritten_nbytes: int = 0
    read_nbytes: int = 0
    reclaimed_segments: int = 0
    #: Read from a segment that goes, to be written anew.
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
        policy: EvictionPolicy | None = None,
        ssd_policy: EvictionPolicy | None = None,
        record_nbytes: int = 1 << 20,
        write_behind_s: float = 2.0,
        block_tokens: int = 512,
        budget: WriteBudget | None = None,
    ) -> None:
        """`policy`: of DRAM; None: least recently used. `ssd_policy`: of the SSD; None: by the age of segments."""
        self.space: SegmentSpace | None = None
        segment_nbytes = 64 * record_nbytes
        if ssd_blocks:
            cap = ssd_blocks * record_nbytes
            segment_nbytes = min(segment_nbytes, cap // 16)
            self.space = SegmentSpace(cap, segment_nbytes, lambda records, _: 4096 + 160 * records)
        writes = WritePolicy(after_s=write_behind_s, batch_nbytes=segment_nbytes)
        self.ledger = Ledger(
            dram_blocks * record_nbytes,
            self.space,
            policy=policy,
            ssd_policy=ssd_policy,
            writes=writes,
            budget=budget,
        )
        self.ledger.add_namespace(0, Geometry(4096, record_nbytes - 4096), _NAMESPACE.digest)
        self.counts = LadderCounts()
        self._record_nbytes = record_nbytes
        self._block_tokens = block_tokens
        self._written: set[int] = set()  # put-sequence numbers that have been on the SSD
        self._was_stored: dict[int, bool] = {}  # by id: whether it was when it was given to the ladder last

    def request(
        self,
        ids: npt.NDArray[np.int64],
        now_s: float,
        *,
        tokens: int | None = None,
        output_tokens: int = -1,
        sequence: bytes = b"",
    ) -> int:
        """Serve one request as an engine would: restore the resident prefix, put the rest. Returns the blocks hit.

        `tokens`: of the prompt, where its last block is not full. `output_tokens`: of its answer; -1: not known.
        `sequence`: what hints call it.
        """
        ledger, table, counts = self.ledger, self.ledger.table, self.counts
        chain = chain_of(ids)
        known = ledger.find(chain)
        there = ledger.on_ladder(known)
        hits = len(there) if there.all() else int(np.argmin(there))
        self._count_misses(ids[hits:], there[hits:])
        ledger.wanted(known, now_s)
        ledger.touch(chain, hits, now_s, output_tokens=output_tokens)
        known = known[:hits]
        cold = known[table.state[known] == _EMPTY]
        counts.accesses += len(ids)
        counts.ssd_hits += len(cold)
        counts.dram_hits += hits - len(cold)
        self._count_tokens(len(ids), table.state[known] == _EMPTY, tokens)
        if len(cold):
            ledger.hold(known)
            got = ledger.reserve_all(cold, DramState.READING, last_copies=True)
            ledger.landed(cold[:got])
            ledger.let_go_all(known)
            counts.promoted += got
            counts.read_nbytes += len(cold) * self._record_nbytes
        stored = self._put(chain, hits, now_s, output_tokens, sequence)
        self._was_stored.update(dict.fromkeys(ids[hits:stored].tolist(), True))
        self._was_stored.update(dict.fromkeys(ids[stored:].tolist(), False))
        counts.not_stored += len(ids) - stored
        self._write(now_s, pressed=False)
        counts.dropped = ledger.dropped_blocks
        return hits

    def _count_misses(self, ids: npt.NDArray[np.int64], there: npt.NDArray[np.bool_]) -> None:
        """Of a request, the blocks that are no hits. `there`: whether those that the index knows are on the ladder."""
        counts = self.counts
        counts.behind_gap_misses += int(np.count_nonzero(there))
        absent = ids if not there.any() else np.concatenate([ids[: len(there)][~there], ids[len(there) :]])
        fates = list(map(self._was_stored.get, absent.tolist()))
        cold, refused = fates.count(None), fates.count(False)
        counts.cold_misses += cold
        counts.refused_misses += refused
        counts.gone_misses += len(fates) - cold - refused

    def _count_tokens(self, blocks: int, below: npt.NDArray[np.bool_], tokens: int | None) -> None:
        """`below`: for each block hit, whether it was on the SSD alone."""
        counts, each = self.counts, self._block_tokens
        missing = 0 if tokens is None else max(0, blocks * each - tokens)  # of the last block
        on_ssd = int(np.count_nonzero(below))
        counts.tokens += blocks * each - missing
        counts.ssd_hit_tokens += on_ssd * each
        counts.dram_hit_tokens += (len(below) - on_ssd) * each
        if len(below) == blocks and blocks:
            if below[-1]:
                counts.ssd_hit_tokens -= missing
            else:
                counts.dram_hit_tokens -= missing

    def _put(self, chain: KeyChain, start: int, now_s: float, output_tokens: int, sequence: bytes) -> int:
        """Put what is behind the first `start` blocks; up to which block the chain is on the ladder then."""
        ledger = self.ledger
        known = ledger.find(chain)
        gaps = known[start:][~ledger.on_ladder(known[start:])]
        for at, block in enumerate(gaps.tolist(), start):
            ledger.hold(np.array([block], np.int32))
            filled = ledger.begin_fill(block) is not None
            if not filled and self._write(now_s, pressed=True):
                filled = ledger.begin_fill(block) is not None
            if filled:
                ledger.filled(block, now_s)
            ledger.let_go(block)
            if not filled:
                return at
        at = len(known)
        while at < len(chain):
            ids, _ = ledger.begin_put(
                chain, at, len(chain), namespace=0, sequence=sequence, now_s=now_s, output_tokens=output_tokens
            )
            ledger.filled_all(ids, now_s)
            ledger.let_go_all(ids)
            at += len(ids)
            if at == len(chain) or ledger.turned_away or not self._write(now_s, pressed=True):
                break
        return at

    def _write(self, now_s: float, *, pressed: bool) -> bool:
        """Write what is due; whether that was anything."""
        ledger, table, counts = self.ledger, self.ledger.table, self.counts
        any_written = False
        while self.space is not None:
            batch = ledger.next_write(now_s, pressed=pressed)
            if batch is not None:
                seqs = table.put_seq[batch.ids].tolist()
                again = len(self._written.intersection(seqs))
                self._written.update(seqs)
                counts.rewritten_nbytes += again * self._record_nbytes
                counts.written_nbytes += batch.nbytes
                counts.demoted += len(batch.ids)
                ledger.written(batch)
                batch.segment.written_s = now_s
                any_written = True
            elif not ledger.needs_segment() or not self._next_segment(now_s):
                break
        return any_written

    def _next_segment(self, now_s: float) -> bool:
        space, ledger, counts = self.space, self.ledger, self.counts
        assert space is not None
        if space.open is not None:
            space.open.state = SegmentState.SEALED
            space.open = None
        while not space.room_for_segment():
            found = residence.choose(ledger, now_s)
            if found is None:
                return False
            segment, carry = found
            cold = carry[ledger.table.state[carry] == _EMPTY]
            ledger.hold(cold)
            got = ledger.reserve_all(cold, DramState.READING, last_copies=True)
            ledger.landed(cold[:got])
            ledger.let_go_all(cold)
            counts.carried += got
            counts.read_nbytes += got * self._record_nbytes
            reclaim.give_up(ledger, segment, carry, now_s)
            counts.reclaimed_segments += 1
            space.remove(segment)
        segment = space.begin()
        segment.state = SegmentState.OPEN
        space.open = segment
        return True
