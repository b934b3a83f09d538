"""Two machines for one load, side by side (R8)."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.planner.plan import Plan
from kvterrace.planner.units import duration, usd

__all__ = ["Side", "side_of", "side_rows"]


@dataclass(frozen=True, slots=True)
class Side:
    """What one machine costs and does. Times of one request alone; of decoding, with all sequences of the load.

    Attributes:
        holds: sequences that HBM holds.
        ttft_computed_s: the whole prompt is computed.
        ttft_loaded_s: all of the prompt but one block of 16 tokens comes from the farthest tier; None without a tier.
        loaded_from: that tier.
        tpot_exact_s: all KV is read at every step, what HBM does not hold from the tier `decodes_from`.
        tpot_sparse_s: a step reads a few tokens of each sequence.
    """

    machine: str
    price_usd: float
    accelerators: int
    holds: int
    ttft_computed_s: float
    ttft_loaded_s: float | None
    loaded_from: str | None
    tpot_exact_s: float | None
    tpot_sparse_s: float | None
    decodes_from: str


def side_of(plan: Plan) -> Side:
    """One side of the comparison. Decoding is None where the weights do not fit, or no tier has the room."""
    setup, spilled = plan.setup, plan.decoding
    load, engine = setup.workload, setup.engine
    last = min(16, load.prompt_tokens)
    prefix = load.prompt_tokens - last
    path = setup.paths()[-1] if setup.machine.storage else None
    loaded = None if path is None else path.load_s(setup.model.sequence_nbytes(prefix)) + engine.prefill_s(prefix, last)
    exact: float | None = None
    sparse: float | None = None
    source = "nowhere"
    if plan.budget.weights_fit and spilled.fits:
        exact, source = spilled.all_in_hbm_s, "hbm"
        local = -(-load.concurrency // plan.budget.instances)
        sparse = engine.sparse_step_s(local, load.context_tokens, spilled.sparse)
    elif plan.budget.weights_fit:
        roomy = [one for one in spilled.spills if one.fits]
        if roomy:
            exact, sparse, source = roomy[-1].exact_tpot_s, roomy[-1].sparse_tpot_s, roomy[-1].tier
    return Side(
        setup.machine.name,
        setup.machine.price_usd,
        setup.machine.accelerator.count,
        plan.budget.sequences,
        engine.prefill_s(0, load.prompt_tokens),
        loaded,
        path.tier if path is not None else None,
        exact,
        sparse,
        source,
    )


def side_rows(*sides: Side) -> list[tuple[str, ...]]:
    """For people: a name, and the figure of each side."""

    def shown(seconds: float | None, source: str | None) -> str:
        return "impossible" if seconds is None else f"{duration(seconds)} ({source})"

    return [
        ("price", *(usd(one.price_usd) for one in sides)),
        ("accelerators", *(f"{one.accelerators}" for one in sides)),
        ("sequences that HBM holds", *(f"{one.holds:,}" for one in sides)),
        ("first token, prompt computed", *(duration(one.ttft_computed_s) for one in sides)),
        ("first token, prompt loaded", *(shown(one.ttft_loaded_s, one.loaded_from) for one in sides)),
        ("token, exact", *(shown(one.tpot_exact_s, one.decodes_from) for one in sides)),
        ("token, sparse", *(shown(one.tpot_sparse_s, one.decodes_from) for one in sides)),
    ]
