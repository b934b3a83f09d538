"""A plan as JSON: `kvterrace.plan/1`. Every key is described in docs/reference/plan.md."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvterrace.planner.advice import TierVerdict
from kvterrace.planner.compare import Side
from kvterrace.planner.decode import HotHit
from kvterrace.planner.explain import steps
from kvterrace.planner.ladder import Point
from kvterrace.planner.layers import Model
from kvterrace.planner.plan import Plan
from kvterrace.planner.verdict import verdict_lines

__all__ = ["SCHEMA", "plan_json"]

#: Name and version of the JSON object.
SCHEMA = "kvterrace.plan/1"


def plan_json(plan: Plan, *, against: tuple[Side, Side] | None = None, explain: bool = False) -> dict[str, object]:
    """The whole plan. `against`: this machine and another. `explain`: with each step of the arithmetic."""
    setup, load = plan.setup, plan.setup.workload
    made: dict[str, object] = {
        "schema": SCHEMA,
        "verdict": {
            "tiers_worth_having": list(plan.worth),
            "lines": verdict_lines(plan),
            "tiers": [_verdict(one) for one in plan.verdicts],
            "least_reuse_for_ssd": plan.needed_reuse,
        },
        "model": _model(setup.model),
        "parallel": {"tp": setup.parallel.tp, "pp": setup.parallel.pp, "instances": plan.budget.instances},
        "workload": {
            "context_tokens": load.context_tokens,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "concurrency": load.concurrency,
            "reuse": load.reuse,
            "return_s": load.return_s,
            "ttft_target_s": load.ttft_s,
            "tpot_target_s": load.tpot_s,
            "trace": _trace(plan),
        },
        "hardware": _hardware(plan),
        "kv": {
            "nbytes_per_token": setup.model.nbytes_per_token(),
            "nbytes_per_token_at_context": setup.model.nbytes_per_token(load.context_tokens),
            "sequence_nbytes": setup.model.sequence_nbytes(load.context_tokens),
            "sequence_held_nbytes": plan.budget.sequence_nbytes,
            "total_nbytes": plan.total_nbytes,
            "active_nbytes": plan.active_nbytes,
            "idle_nbytes": plan.idle_nbytes,
            "split_nbytes": dict(plan.split),
            "split_source": plan.split_source,
            "ranks": _ranks(plan),
        },
        "hbm": _hbm(plan),
        "links": [_picked(one, "link need_bytes_per_s usable_bytes_per_s use") for one in plan.loads],
        "paths": [
            {**_picked(one, "tier bytes_per_s bottleneck"), "crossings": dict(one.crossings)} for one in setup.paths()
        ],
        "decoding": _decoding(plan),
        "load_or_recompute": {
            "choices": [
                _picked(one, "tier tokens nbytes load_s compute_s break_even_bytes_per_s") for one in plan.choices
            ],
            "break_even": [_picked(one, "tier tokens tried_tokens") for one in plan.break_evens],
            "hot_hit": _hot(plan.hot_restore),
        },
        "operating_point": _point(plan.chosen) if plan.chosen is not None else None,
        "sweep": [
            {"tiers": list(tiers), "points": [_point(one) for one in points]} for tiers, points in plan.points.items()
        ],
        "endurance": _endurance(plan),
        "cost": {
            "price_usd": setup.machine.price_usd,
            "usd_per_million_output_tokens": plan.usd_per_million_tokens,
            "all_in_hbm_accelerators": plan.hbm_only.accelerators,
            "all_in_hbm_price_usd": plan.hbm_only.price_usd,
        },
        "notes": list(plan.notes),
    }
    if against is not None:
        made["against"] = [_side(one) for one in against]
    if explain:
        made["steps"] = [
            {"title": one.title.strip(), **_picked(one, "expression result unit source")} for one in steps(plan)
        ]
    cleaned = _finite(made)
    assert isinstance(cleaned, dict)
    return cleaned


def _picked(one: object, names: str) -> dict[str, object]:
    """Attributes of that name, in this order."""
    return {name: getattr(one, name) for name in names.split()}


def _finite(value: object) -> object:
    """JSON has no infinity: null stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value


def _model(model: Model) -> dict[str, object]:
    kinds: dict[str, int] = {}
    for layer in model.layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    return {
        "name": model.name,
        "source": model.source,
        "layers": kinds,
        "params": model.params,
        "active_params": model.active_params,
        "weights_nbytes": model.weights_nbytes,
        "kv_dtype": model.kv_dtype,
        "max_context_tokens": model.max_context or None,
    }


def _trace(plan: Plan) -> dict[str, object] | None:
    trace = plan.setup.workload.trace
    if trace is None:
        return None
    return {
        "requests": trace.requests,
        "block_tokens": trace.block_tokens,
        "context_p50_tokens": trace.context_p50,
        "context_p90_tokens": trace.context_p90,
        "reuse": trace.reuse,
        "return_p50_s": trace.return_p50_s,
        "return_p90_s": trace.return_p90_s,
        "tokens_for_hits": {str(part): trace.tokens_for(part) for part in (0.5, 0.9, 0.99)},
    }


def _hardware(plan: Plan) -> dict[str, object]:
    machine = plan.setup.machine
    return {
        "name": machine.name,
        "source": machine.source,
        "accelerator": _picked(machine.accelerator, "name count memory_nbytes source"),
        "gpudirect": machine.gpudirect,
        "tiers": [
            _picked(tier, "name capacity_nbytes kv_nbytes read_bytes_per_s write_bytes_per_s source")
            for tier in machine.storage
        ],
    }


def _ranks(plan: Plan) -> list[dict[str, object]]:
    model, parallel = plan.setup.model, plan.setup.parallel
    tokens = plan.setup.workload.context_tokens
    return [
        {
            "stage": number,
            "layers": len(stage),
            "ranks": parallel.tp,
            "sequence_nbytes": model.sequence_nbytes(tokens, parallel.tp, stage),
        }
        for number, stage in enumerate(model.stages(parallel.pp))
    ]


def _hbm(plan: Plan) -> dict[str, object]:
    ranks = "rank_memory_nbytes rank_weights_nbytes rank_free_nbytes rank_kv_nbytes rank_sequence_nbytes"
    return _picked(plan.budget, f"{ranks} weights_fit kv_nbytes sequences")


def _decoding(plan: Plan) -> dict[str, object]:
    spilled = plan.decoding
    return {
        "active_nbytes": spilled.active_nbytes,
        "read_nbytes": spilled.read_nbytes,
        "fits_in_hbm": spilled.fits,
        "all_in_hbm_tpot_s": spilled.all_in_hbm_s,
        "sparse_tokens": spilled.sparse.tokens,
        "spills": [
            {
                **_picked(one, "tier bottleneck overflow_nbytes fits"),
                **_picked(one, "exact_tpot_s exact_read_nbytes sparse_tpot_s sparse_read_nbytes"),
            }
            for one in spilled.spills
        ],
        "hot_hit": _hot(plan.hot),
        "step_s": plan.step_s,
        "shortfalls": [_picked(one, "link need_bytes_per_s usable_bytes_per_s factor") for one in plan.shortfalls],
    }


def _hot(hot: HotHit | None) -> dict[str, object] | None:
    names = "tier hit_rate wait_s point_saves_s doubling_saves_s break_even_hit_rate"
    return _picked(hot, names) if hot is not None else None


def _point(point: Point) -> dict[str, object]:
    return {
        **_picked(point, "requests running"),
        "found": dict(point.found),
        **_picked(point, "ttft_s tpot_s output_tokens_per_s requests_per_s"),
        "restored_bytes_per_s": dict(point.restored_bytes_per_s),
        "put_bytes_per_s": point.put_bytes_per_s,
        "written_share": point.written,
    }


def _endurance(plan: Plan) -> dict[str, object] | None:
    wear = plan.wear
    if wear is None:
        return None
    return {
        **_picked(wear, "written_bytes_per_s rated_nbytes rated_days life_days budget_bytes_per_s needed_dwpd lasts"),
        "life_days_with": dict(wear.remedies),
    }


def _verdict(one: TierVerdict) -> dict[str, object]:
    return {
        "tier": one.tier,
        "in_machine": one.there,
        "worth_having": one.worth,
        "reason": one.reason,
        "gain": one.gain,
        "gain_in_a_year_of_service": one.gain_in_service,
        "gain_in_write_budget": one.gain_in_budget,
        "ttft_without_s": one.ttft_without_s,
        "ttft_with_s": one.ttft_with_s,
        "constraints": [{"name": each.name, "holds": each.holds, "reason": each.reason} for each in one.constraints],
    }


def _side(side: Side) -> dict[str, object]:
    return {name: getattr(side, name) for name in side.__dataclass_fields__}
