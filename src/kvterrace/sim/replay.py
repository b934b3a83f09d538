"""A trace against a ladder: the production ledger, or a reference policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvterrace.errors import ConfigError
from kvterrace.io.probe import why_not_native
from kvterrace.sim.columns import TraceColumns
from kvterrace.sim.hinted import Said
from kvterrace.sim.outcome import Outcome
from kvterrace.sim.production import POLICIES as PRODUCTION
from kvterrace.sim.production import replay_ledger

__all__ = ["POLICIES", "PRODUCTION", "REFERENCES", "replay"]

#: Policies of the literature, block by block (native/src/policy/), and the bound.
REFERENCES = (
    "fifo",
    "fifo-head",
    "lru-head",
    "lru-tail",
    "lfu",
    "2q",
    "arc",
    "s3-fifo",
    "sieve",
    "w-tinylfu",
    "belady",
)
#: All: those of the production ledger, then the references.
POLICIES = PRODUCTION + REFERENCES

_STEP_REQUESTS = 256


def replay(
    trace: TraceColumns,
    policy: str,
    dram_blocks: int,
    ssd_blocks: int = 0,
    *,
    on_step: Callable[[int], object] = lambda _: None,
    hints: Sequence[Said] = (),
) -> Outcome:
    """Replay `trace` from an empty ladder. Blocks.

    Args:
        policy: one of `POLICIES`.
        dram_blocks, ssd_blocks: room of the tiers; no SSD if 0.
        on_step: hears now and then how many requests were replayed since it was last called.
        hints: in order of time; for `default` and `lru`, the others take none.

    Raises:
        ConfigError: no such policy or ladder; or a reference policy where the extension module is not there.
    """
    if dram_blocks < 1 or ssd_blocks < 0:
        raise ConfigError(f"a ladder of {dram_blocks} blocks of DRAM and {ssd_blocks} of SSD: give DRAM one at least")
    if policy in PRODUCTION:
        return replay_ledger(trace, policy, dram_blocks, ssd_blocks, on_step, hints)
    if policy in REFERENCES and hints:
        raise ConfigError(f"policy {policy} takes no hints; default and lru do")
    if policy in REFERENCES:
        return _replay_reference(trace, policy, dram_blocks, ssd_blocks, on_step)
    raise ConfigError(f"{policy}: no such policy; there are {', '.join(POLICIES)}")


def _replay_reference(
    trace: TraceColumns, policy: str, dram_blocks: int, ssd_blocks: int, on_step: Callable[[int], object]
) -> Outcome:
    missing = why_not_native()
    if missing is not None:
        raise ConfigError(f"policy {policy} needs the extension module: {missing}; default and lru do without")
    from kvterrace._native import ReferenceReplay

    run = ReferenceReplay(
        trace.ids,
        trace.offsets,
        trace.tokens,
        trace.distinct,
        trace.block_tokens,
        policy=policy,
        upper=dram_blocks,
        lower=ssd_blocks,
    )
    left = len(trace)
    while left:
        before, left = left, run.run(_STEP_REQUESTS)
        on_step(before - left)
    counts = run.counts()
    return Outcome(
        policy=policy,
        dram_blocks=dram_blocks,
        ssd_blocks=ssd_blocks,
        block_tokens=trace.block_tokens,
        requests=counts["requests"],
        blocks=counts["blocks"],
        tokens=counts["tokens"],
        tokens_squared=counts["tokens_squared"],
        dram_hits=counts["upper_hits"],
        ssd_hits=counts["lower_hits"],
        dram_hit_tokens=counts["upper_hit_tokens"],
        ssd_hit_tokens=counts["lower_hit_tokens"],
        hit_tokens_squared=counts["hit_tokens_squared"],
        missed_new=counts["missed_new"],
        missed_dropped=counts["missed_dropped"],
        missed_behind=counts["missed_behind"],
        ssd_written=counts["written"],
        moved_up=counts["promoted"],
        moved_down=counts["demoted"],
        dropped=counts["dropped"],
    )
