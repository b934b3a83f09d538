"""A whole trace through the production ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvterrace.errors import ConfigError
from kvterrace.policy.directories import default_policy
from kvterrace.policy.eviction import LruTailFirst
from kvterrace.sim.columns import TraceColumns
from kvterrace.sim.hinted import Said
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.sim.outcome import Outcome

__all__ = ["POLICIES", "replay_ledger"]

POLICIES = ("default", "lru")
#: A segment of the ledger is a sixteenth of its SSD at most, and holds a record at least.
_LEAST_SSD_BLOCKS = 32
_RECORD_NBYTES = 1 << 20
_STEP_REQUESTS = 64


def replay_ledger(
    trace: TraceColumns,
    policy: str,
    dram_blocks: int,
    ssd_blocks: int,
    on_step: Callable[[int], object],
    hints: Sequence[Said] = (),
) -> Outcome:
    """Replay `trace` from an empty ladder. Blocks. Raises ConfigError: so small an SSD is none."""
    if 0 < ssd_blocks < _LEAST_SSD_BLOCKS:
        raise ConfigError(
            f"an SSD of {ssd_blocks} blocks: a store's has {_LEAST_SSD_BLOCKS} at least; give --tiers more, or no SSD"
        )
    ladder = _ladder(trace, policy, dram_blocks, ssd_blocks)
    counts = ladder.counts
    offsets, ids = trace.offsets.tolist(), trace.ids.astype(np.int64)
    told = 0
    squared = 0.0
    rows = zip(trace.at_s.tolist(), trace.tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    sessions = [b"%d" % one if one >= 0 else b"" for one in trace.session.tolist()]
    left = deque(hints)
    for number, (at_s, tokens, output_tokens) in enumerate(rows):
        while left and left[0].at_s <= at_s:
            said = left.popleft()
            ladder.ledger.hint(b"%d" % said.session, said.kind, said.seconds, said.at_s)
        blocks = ids[offsets[number] : offsets[number + 1]]
        hits = ladder.request(blocks, at_s, tokens=tokens, output_tokens=output_tokens, sequence=sessions[number])
        squared += float(min(hits * trace.block_tokens, tokens)) ** 2
        if number + 1 - told == _STEP_REQUESTS:
            on_step(_STEP_REQUESTS)
            told = number + 1
    on_step(len(trace) - told)
    as_float = trace.tokens.astype(np.float64)
    return Outcome(
        policy=policy,
        dram_blocks=dram_blocks,
        ssd_blocks=ssd_blocks,
        block_tokens=trace.block_tokens,
        requests=len(trace),
        blocks=len(trace.ids),
        tokens=int(trace.tokens.sum(dtype=np.int64)),
        tokens_squared=float(as_float @ as_float),
        dram_hits=counts.dram_hits,
        ssd_hits=counts.ssd_hits,
        dram_hit_tokens=counts.dram_hit_tokens,
        ssd_hit_tokens=counts.ssd_hit_tokens,
        hit_tokens_squared=squared,
        missed_new=counts.cold_misses,
        missed_dropped=counts.gone_misses + counts.refused_misses,
        missed_behind=counts.behind_gap_misses,
        ssd_written=counts.written_nbytes // _RECORD_NBYTES,
        moved_up=counts.promoted,
        moved_down=counts.demoted,
        dropped=counts.dropped,
    )


def _ladder(trace: TraceColumns, policy: str, dram_blocks: int, ssd_blocks: int) -> LedgerLadder:
    """With what a store has: `default`, the orders that `open_store` takes here; `lru`, those without the extension."""
    lru = policy == "lru"
    return LedgerLadder(
        dram_blocks,
        ssd_blocks,
        policy=LruTailFirst() if lru else default_policy(),
        ssd_policy=None if lru else default_policy(),
        record_nbytes=_RECORD_NBYTES,
        block_tokens=trace.block_tokens,
    )
