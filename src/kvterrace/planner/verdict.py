"""A plan's verdict in a few sentences, the most important first."""

from __future__ import annotations

from kvterrace.planner.plan import Plan
from kvterrace.planner.units import bandwidth, duration, gb, gib, share

__all__ = ["verdict_lines"]

_WORDS = {"dram": "DRAM", "cxl": "CXL memory", "ssd": "SSD", "remote": "remote storage"}


def verdict_lines(plan: Plan) -> list[str]:
    """Whole sentences."""
    lines = [_tiers(plan)]
    for one in plan.verdicts:
        there = "" if one.there else " (usual drives; the machine has none)"
        word = "yes" if one.worth else "no"
        lines.append(f"{_WORDS[one.tier]}{there}: {word}. {one.reason[0].upper()}{one.reason[1:]}.")
    lines += _running(plan)
    if plan.needed_reuse is not None and not plan.setup.workload.reuse:
        lines.append(
            f"From a reuse of about {share(plan.needed_reuse)} on an SSD would gain enough: say with --reuse or "
            "--trace what the load has."
        )
    return lines + _impossible(plan)


def _tiers(plan: Plan) -> str:
    budget = plan.budget
    if not budget.weights_fit:
        need, have = gb(budget.rank_weights_nbytes), gb(budget.rank_memory_nbytes)
        return f"Impossible: {need} of weights for each accelerator of {have}. Use more of them, or smaller weights."
    if plan.chosen is None:
        room, sequence = gib(budget.rank_kv_nbytes), gib(budget.rank_sequence_nbytes)
        return (
            f"HBM holds not one sequence: each accelerator has {room} for KV, of which a sequence takes {sequence}. "
            "Exact decoding waits at every step for what lies below."
        )
    worth = [_WORDS[tier] for tier in plan.worth]
    worth += [f"{_WORDS[one.tier]} (which the machine lacks)" for one in plan.verdicts if one.worth and not one.there]
    if not worth:
        return "No tier below HBM is worth having for this load."
    return f"Worth having below HBM: {', '.join(worth)}."


def _running(plan: Plan) -> list[str]:
    point, load = plan.chosen, plan.setup.workload
    if point is None:
        return []
    lines, fits = [], plan.budget.sequences
    if fits < load.concurrency:
        rest = load.concurrency - fits
        lines.append(f"Of {load.concurrency:,} sequences HBM holds {fits:,} at once; the KV of {rest:,} is idle.")
    target = load.ttft_s is not None or load.tpot_s is not None
    first, each = duration(point.ttft_s), duration(point.tpot_s)
    if target and not point.meets(load):
        lines.append(
            f"No concurrency meets the target: a request alone has its first token after {first}, then {each} for each."
        )
        return lines
    words = "The largest concurrency that meets the target" if target else "Operating point"
    lines.append(
        f"{words}: {point.requests:,} at once, first token after {first}, {each} for each token, "
        f"{point.output_tokens_per_s:,.0f} output tokens/s."
    )
    return lines


def _impossible(plan: Plan) -> list[str]:
    """Where decoding all sequences at once needs more than HBM, and by how much each way falls short."""
    if not plan.budget.weights_fit:
        return []
    active, step = gb(plan.decoding.read_nbytes), duration(plan.step_s)
    hbm = next(one for one in plan.shortfalls if one.link == "hbm")
    lines = []
    if hbm.factor > 1:
        lines.append(
            f"Impossible: {active} of KV in a step of {step} is {bandwidth(hbm.need_bytes_per_s)}; HBM carries "
            f"{bandwidth(hbm.usable_bytes_per_s)}, which is short by a factor of {hbm.factor:,.1f}."
        )
    exact = [f"{duration(one.exact_tpot_s)} out of {one.tier}" for one in plan.decoding.spills if one.fits]
    if exact:
        lines.append(
            f"All at once, exactly, with what HBM does not hold read at each step: a token in {', '.join(exact)}."
        )
    if not plan.decoding.fits and plan.setup.workload.tpot_s is not None:
        broken = [f"{one.link} ({one.factor:,.1f} x)" for one in plan.shortfalls if one.factor > 1 and one is not hbm]
        if broken:
            lines.append(
                f"Impossible: {active} of KV, read from below in steps of {step}, is too much for {', '.join(broken)}: "
                "decode exactly what HBM holds, or sparsely."
            )
    return lines
