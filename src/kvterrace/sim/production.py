"""A whole trace through the production ledger."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvterrace.errors import ConfigError
from kvterrace.sim.columns import TraceColumns
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
) -> Outcome:
    """Replay `trace` from an empty ladder. Blocks. Raises ConfigError: so small an SSD is none."""
    if 0 < ssd_blocks < _LEAST_SSD_BLOCKS:
        raise ConfigError(
            f"an SSD of {ssd_blocks} blocks: a store's has {_LEAST_SSD_BLOCKS} at least; give more, or no SSD"
        )
    ladder = LedgerLadder(dram_blocks, ssd_blocks, record_nbytes=_RECORD_NBYTES)
    counts = ladder.counts
    offsets, ids = trace.offsets.tolist(), trace.ids.astype(np.int64)
    seen = np.zeros(trace.distinct, np.bool_)
    new = dropped = dram_tokens = ssd_tokens = told = 0
    squared = 0.0
    for number, (at_s, tokens) in enumerate(zip(trace.at_s.tolist(), trace.tokens.tolist(), strict=True)):
        blocks = ids[offsets[number] : offsets[number + 1]]
        dram_before, ssd_before = counts.dram_hits, counts.ssd_hits
        hits = ladder.request(blocks, at_s)
        missed = int(np.count_nonzero(seen[blocks[hits:]]))
        dropped += missed
        new += len(blocks) - hits - missed
        seen[blocks[hits:]] = True
        hit_tokens = min(hits * trace.block_tokens, tokens)
        squared += float(hit_tokens) ** 2
        # A last block that is not full is taken for one of the SSD's, if it gave any: the tail leaves DRAM first.
        if counts.ssd_hits > ssd_before:
            upper = (counts.dram_hits - dram_before) * trace.block_tokens
            dram_tokens += upper
            ssd_tokens += hit_tokens - upper
        else:
            dram_tokens += hit_tokens
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
        dram_hit_tokens=dram_tokens,
        ssd_hit_tokens=ssd_tokens,
        hit_tokens_squared=squared,
        missed_new=new,
        missed_dropped=dropped,
        missed_behind=0,  # the ledger keeps prefixes whole
        ssd_written=counts.written_nbytes // _RECORD_NBYTES,
        moved_up=None,
        moved_down=None,
        dropped=None,
    )
