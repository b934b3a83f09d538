"""Whole plans: the three constraints in order, operating points, and each step of the arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvterrace.errors import ConfigError
from kvterrace.planner.advice import LEAST_GAIN, TierVerdict, least_gain
from kvterrace.planner.compare import side_of
from kvterrace.planner.explain import steps
from kvterrace.planner.hardware import load_machine
from kvterrace.planner.ladder import evaluate
from kvterrace.planner.layers import Parallel
from kvterrace.planner.models import load_model
from kvterrace.planner.plan import Plan, make_plan
from kvterrace.planner.sizing import default_parallel
from kvterrace.planner.trace import TraceProfile
from kvterrace.planner.verdict import verdict_lines
from kvterrace.planner.workload import Workload

LONG = Workload(131_072, concurrency=32, reuse=0.6)


def planned(load: Workload, model: str = "llama-3.1-70b", machine: str = "8x-h100") -> Plan:
    return make_plan(load_model(model), load_machine(machine), load)


def ssd_of(plan: Plan) -> TierVerdict:
    return next(one for one in plan.verdicts if one.tier == "ssd")


def test_long_contexts_that_come_back_are_worth_an_ssd() -> None:
    plan = planned(LONG)
    assert plan.worth == ("dram", "ssd")
    assert plan.total_nbytes == 1280 * 2**30
    assert plan.active_nbytes == 8 * 40 * 2**30  # HBM holds 8 of the 32
    assert plan.idle_nbytes == 24 * 40 * 2**30
    assert plan.split == {"hbm": 256 * 2**30, "dram": 640 * 2**30, "ssd": 384 * 2**30}


@pytest.mark.parametrize("figure", ["9" * 400, "-" + "9" * 400, "nan", "inf"])
def test_a_figure_that_is_no_float_is_refused_by_its_field(figure: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(f'use = "8x-h100"\nssd = {{ dwpd = {figure} }}\n')
    with pytest.raises(ConfigError, match="ssd: dwpd: "):
        load_machine(str(file))


@pytest.mark.parametrize("context", [1024, 2048, 4096])
def test_short_contexts_are_worth_no_ssd(context: int) -> None:
    plan = planned(Workload(context, concurrency=32, reuse=0.9))
    verdict = ssd_of(plan)
    assert not verdict.worth
    assert f"a context of {context:,} tokens" in verdict.reason
    assert "no ssd tier" in verdict.reason


def test_without_reuse_no_tier_is_worth_anything() -> None:
    plan = planned(replace(LONG, reuse=0.0))
    assert plan.worth == ()
    assert "no prefix is shared" in ssd_of(plan).reason
    assert verdict_lines(plan)[0] == "No tier below HBM is worth having for this load."
    # All sets of tiers do the same then, and the plan says from which reuse on an SSD would gain.
    rates = {points[-1].output_tokens_per_s for points in plan.points.values()}
    assert max(rates) == pytest.approx(min(rates))
    assert plan.needed_reuse is not None
    gained = ssd_of(planned(replace(LONG, reuse=plan.needed_reuse)))
    assert gained.worth
    less = ssd_of(planned(replace(LONG, reuse=plan.needed_reuse - 0.05)))
    assert not less.worth


def test_the_target_comes_first() -> None:
    """A target that not even one request meets with the SSD ends the matter, whatever the other two would say."""
    verdict = ssd_of(planned(replace(LONG, ttft_s=0.001)))
    assert [one.name for one in verdict.constraints] == ["latency target", "concurrency", "reuse", "endurance"]
    assert not verdict.worth
    assert verdict.reason == verdict.constraints[0].reason
    assert "1 ms is missed by a factor of" in verdict.reason


def test_the_operating_point_is_the_largest_that_meets_the_target() -> None:
    plan = planned(replace(LONG, ttft_s=25.0))
    assert plan.chosen is not None
    every = list(plan.points.values())[-1]
    meeting = [one.requests for one in every if one.ttft_s <= 25.0]
    assert plan.chosen.requests == max(meeting) == 4  # 22 s; 8 take 44 s
    assert "The largest concurrency that meets the target: 4 at once" in " ".join(verdict_lines(plan))


def test_concurrency_when_dram_holds_everything() -> None:
    plan = planned(Workload(16_384, concurrency=2, reuse=0.5, return_s=5.0))
    verdict = ssd_of(plan)
    assert not verdict.worth
    assert verdict.constraints[0].holds
    assert not verdict.constraints[1].holds
    assert "the nearer tiers already find 50 % of 50 %" in verdict.reason


def test_an_ssd_is_judged_where_there_is_none() -> None:
    plan = planned(LONG, machine="8x-80gb")
    verdict = ssd_of(plan)
    assert verdict.worth
    assert not verdict.there
    assert "SSD (which the machine lacks)" in verdict_lines(plan)[0]
    assert "ssd" not in plan.worth
    assert any("usual drives; the machine has none" in line for line in verdict_lines(plan))
    assert plan.wear is None


def test_weights_that_do_not_fit_are_said_first() -> None:
    plan = planned(LONG, model="llama-3.1-405b")
    assert verdict_lines(plan)[0].startswith("Impossible: 101 GB of weights for each accelerator of 80 GB")
    assert plan.chosen is None
    assert plan.verdicts == ()


def test_a_sequence_that_hbm_does_not_hold() -> None:
    plan = planned(replace(LONG, concurrency=1), machine="2x-80gb-ssd")
    assert plan.chosen is None
    assert verdict_lines(plan)[0].startswith("HBM holds not one sequence")
    assert [one.tier for one in plan.decoding.spills] == ["dram", "ssd"]


def test_impossible_steps_name_the_link_and_the_factor() -> None:
    # 9 sequences of 80 GiB are 773 GB; in 10 ms that is 77.3 TB/s, of which HBM carries 8 x 3.35 x 0.8 = 21.4.
    load = Workload(32_768, concurrency=9, tpot_s=0.01)
    lines = " ".join(verdict_lines(planned(load, model="mha-70b")))
    assert "Impossible: 773 GB of KV in a step of 10 ms is 77.3 TB/s; HBM carries 21.4 TB/s" in lines
    assert "short by a factor of 3.6" in lines
    assert "accelerator link, one of 8 (1,610.6 x)" in lines  # 77.3e12 / 48e9
    assert "ssd (1,533.9 x)" in lines  # 77.3e12 / 50.4e9


def test_gains_by_concurrency_are_those_of_the_sweep() -> None:
    plan = planned(Workload(32_768, concurrency=16, reuse=0.8), model="qwen3-coder-480b", machine="8x-h200")
    without, with_ssd = plan.points[("hbm", "dram")], plan.points[("hbm", "dram", "ssd")]
    gains = [b.output_tokens_per_s / a.output_tokens_per_s - 1 for a, b in zip(without, with_ssd, strict=True)]
    assert gains[0] < gains[3]  # a single request gains less than eight
    at = next(one for one in with_ssd if plan.chosen is not None and one.requests == plan.chosen.requests)
    assert ssd_of(plan).gain == pytest.approx(gains[with_ssd.index(at)])


def test_a_point_of_the_sweep_by_hand() -> None:
    """One request, nothing reused: prefill, then 512 steps."""
    plan = planned(Workload(131_072, concurrency=1))
    engine = plan.setup.engine
    point = plan.points[()][0]
    assert point.ttft_s == pytest.approx(engine.prefill_s(0, 130_560))
    assert point.tpot_s == pytest.approx(engine.step_s(1, 131_072))
    assert point.output_tokens_per_s == pytest.approx(512 / (point.ttft_s + 512 * point.tpot_s))
    assert point.put_bytes_per_s == pytest.approx(point.requests_per_s * 131_072 * 327_680)


def test_reuse_by_capacity_without_a_trace() -> None:
    load = Workload(10_000, reuse=0.5, return_s=100.0)
    assert load.found_share(0, 1000) == 0
    # 100,000 tokens at 1,000 a second are kept for 100 s: 1 - 1/e of what comes back after 100 s on average.
    assert load.found_share(100_000, 1000) == pytest.approx(0.5 * (1 - math.exp(-1)))
    assert load.found_share(1e12, 1000) == pytest.approx(0.5)


def test_reuse_by_capacity_from_a_trace() -> None:
    distances = np.array([0.0, 10.0, 100.0, 1000.0])
    trace = TraceProfile(4, 8, 4, 1.0, 16, 64, 64, 64, 10.0, 0.5, 1.0, 1.0, 1.0, distances, 8)
    load = Workload(10_000, reuse=0.5, trace=trace)
    assert load.found_share(16 * 50, 1e9) == pytest.approx(2 / 8)
    assert load.found_share(16 * 5000, 1e9) == pytest.approx(4 / 8)
    plan = make_plan(load_model("llama-3.1-8b"), load_machine("8x-h100"), load)
    assert plan.split_source.startswith("the trace")
    assert sum(plan.split.values()) == plan.total_nbytes
    assert plan.needed_reuse is None


@pytest.mark.parametrize(
    ("model", "count", "tp"),
    [
        ("llama-3.1-70b", 8, 8),
        ("llama-3.1-70b", 16, 8),  # 16 would hold the KV of 8 heads twice
        ("smollm2-135m", 8, 1),  # 9 heads: no divisor but 1
        ("smollm2-135m", 6, 3),  # 3 KV heads
        ("qwen2.5-32b", 16, 8),  # 40 heads over 16: no
        ("deepseek-v3", 16, 16),  # 8 would do for the weights of 673 GB, but not on 80 GB each
        ("llama-3.1-405b", 8, 8),  # fits on none: the largest
    ],
)
def test_default_ranks_hold_most_sequences(model: str, count: int, tp: int) -> None:
    machine = load_machine("8x-h100")
    machine = replace(machine, accelerator=replace(machine.accelerator, count=count))
    assert default_parallel(load_model(model), machine, 8192) == Parallel(tp)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"context_tokens": 0}, "--context 0"),
        ({"context_tokens": -1}, "--context -1"),
        ({"context_tokens": 1 << 40}, "--context"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"concurrency": 10**9}, "--concurrency"),
        ({"output_tokens": 0}, "--output 0"),
        ({"output_tokens": 131_072}, "--output 131072"),
        ({"reuse": 1.5}, "--reuse 1.5"),
        ({"reuse": -0.1}, "--reuse -0.1"),
        ({"reuse": float("nan")}, "--reuse nan"),
        ({"ttft_s": 0.0}, "--ttft 0.0 s"),
        ({"tpot_s": float("inf")}, "--tpot inf s"),
        ({"return_s": -1.0}, "--return -1.0 s"),
    ],
)
def test_loads_that_cannot_be(changes: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(LONG, **changes)  # type: ignore[arg-type]
    assert str(refused.value).startswith(option)


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("llama-3.1-70b", "8x-h100"),
        ("gpt-oss-120b", "8x-h100-cxl"),
        ("deepseek-v3.2", "8x-h200"),
        ("qwen3-next-80b-a3b", "8x-h100-array"),
        ("llama-3.1-70b", "2x-80gb-ssd"),
        ("llama-3.1-405b", "8x-h100"),
        ("gemma-3n-e4b", "1x-rtx-4090"),
    ],
)
def test_each_step_of_the_arithmetic_evaluates_to_its_result(model: str, machine: str) -> None:
    plan = planned(Workload(32_768, concurrency=4, reuse=0.5), model, machine)
    shown = steps(plan)
    assert len(shown) > 8
    for step in shown:
        value = eval(step.expression.replace(" x ", " * "), {"floor": math.floor, "max": max, "min": min})
        assert value == pytest.approx(step.result, rel=1e-9), step.title
        assert step.source
    titles = [step.title for step in shown]
    on_rank = [step for step in shown if step.title == "KV of a sequence on the fullest accelerator"]
    assert len(on_rank) == plan.budget.weights_fit
    assert all(" x " in step.expression for step in on_rank)
    total = next(step for step in shown if step.title == "KV of all 4")
    assert total.result == plan.total_nbytes
    assert titles.index("KV of all 4") < titles.index("weights on one accelerator")


def test_a_tier_has_to_gain_its_part_of_the_price() -> None:
    machine = load_machine("8x-h100-array")  # $350,000, of which the array is 40,000: 12.9 % of the rest
    assert least_gain(machine, "remote") == pytest.approx((40_000 / 310_000, 40_000))
    assert least_gain(machine, "dram") == (0.05, 0.0)
    dear = replace(machine, storage=tuple(replace(one, price_usd=200_000.0) for one in machine.storage))
    load = Workload(32_768, concurrency=16, reuse=0.8)
    model = load_model("qwen3-235b-a22b")
    cheap_verdict, dear_verdict = (
        next(one for one in make_plan(model, box, load).verdicts if one.tier == "remote") for box in (machine, dear)
    )
    assert cheap_verdict.worth  # gains 26 %
    assert not dear_verdict.worth
    assert dear_verdict.gain == cheap_verdict.gain
    assert "of the machine's price" in dear_verdict.reason


def test_wear_is_a_price() -> None:
    """Drives that wear out are bought anew, if that costs less of the machine than they gain."""
    plan = planned(LONG)
    verdict, wear = ssd_of(plan), plan.wear
    assert wear is not None
    assert verdict.constraints[-1].name == "endurance"
    # Four drives of 7.68 TB at 1 DWPD are rated for 56.1 PB; at 2.56 GB/s, 221 TB a day, that is 254 days. A store
    # stops with a fifth of the life left, after 203. To serve a year they take 0.557 of it, and three sets of $4,400 go
    # in three years, 4.26 % of the $310,000 of the rest: less than the 20 % that this gains.
    assert wear.life_days == pytest.approx(4 * 7.68e12 * 1825 / (wear.written_bytes_per_s * 86_400))
    assert wear.needed_dwpd == pytest.approx(1825 / wear.life_days)
    assert wear.service_days == pytest.approx(0.8 * wear.life_days)
    assert f"${3 * 4400:,} of them in 3 years, {100 * 3 * 4400 / 310_000:.2f} % of the machine's" in verdict.reason
    assert verdict.worth
    assert verdict.gain_in_budget < LEAST_GAIN < verdict.gain_in_service < verdict.gain
    point, tiers = plan.chosen, ("hbm", "dram", "ssd")
    assert point is not None
    year = evaluate(plan.setup, point.requests, tiers, written=0.8 * wear.life_days / 365)
    nearer = evaluate(plan.setup, point.requests, tiers[:2])
    assert year is not None
    assert nearer is not None
    assert verdict.gain_in_service == pytest.approx(year.output_tokens_per_s / nearer.output_tokens_per_s - 1)
    # Without a price only what a write budget leaves counts, and that is too little.
    machine = load_machine("8x-h100")
    free = replace(machine, storage=tuple(replace(one, price_usd=0.0) for one in machine.storage))
    unpriced = ssd_of(make_plan(load_model("llama-3.1-70b"), free, LONG))
    assert unpriced.gain_in_budget == verdict.gain_in_budget
    assert not unpriced.worth
    assert "is not known without a price: give price_usd; drives of 7.2 DWPD would live" in unpriced.reason


def test_drives_that_serve_a_year_are_bought_anew_as_they_wear_out() -> None:
    """Four times the drives live 1,016 days, and serve 813: nothing is held back for their sake."""
    machine = load_machine("8x-h100")
    more = replace(
        machine,
        storage=tuple(
            replace(one, capacity_nbytes=4 * one.capacity_nbytes, price_usd=4 * one.price_usd)
            if one.name == "ssd" else one for one in machine.storage
        ),
    )  # fmt: skip
    plan = make_plan(load_model("llama-3.1-70b"), more, LONG)
    verdict, wear = ssd_of(plan), plan.wear
    assert wear is not None
    assert wear.service_days == pytest.approx(813, rel=0.01)
    assert verdict.gain_in_service == verdict.gain
    dollars = 4 * 4400 * 3 * 365 / wear.service_days
    assert f"${dollars:,.0f} of them in 3 years" in verdict.reason
    assert "lets them serve" not in verdict.reason


def test_a_consumer_drive_is_worn_out_in_weeks() -> None:
    verdict = ssd_of(planned(Workload(8192, concurrency=16, reuse=0.5), "smollm2-135m", "1x-rtx-4090"))
    assert verdict.gain > LEAST_GAIN
    assert not verdict.worth
    assert "last 21 of 1,825 days" in verdict.reason
    assert "neither is worth it; drives of" in verdict.reason


def test_notes_on_ranks() -> None:
    small = Workload(32_768, concurrency=16)
    machine, model = load_machine("8x-h100"), load_model("llama-3.1-8b")
    chosen, given = make_plan(model, machine, small), make_plan(model, machine, small, Parallel(8))
    assert chosen.setup.parallel == given.setup.parallel == Parallel(8)
    assert [note for note in chosen.notes if "--tp 1" in note] == list(chosen.notes)
    assert given.notes == ()
    assert planned(small).notes == ()  # 141 GB of weights: on one accelerator they do not lie
    latent = planned(small, "deepseek-v3", "8x-h200").notes
    assert "ranks hold the same KV 8 times over" in latent[0]
    assert "data-parallel attention" in latent[1]


def test_parts_without_a_price_are_named() -> None:
    machine = load_machine("8x-h100-cxl")
    storage = tuple(replace(one, price_usd=0.0) if one.name in {"dram", "cxl"} else one for one in machine.storage)
    model = load_model("llama-3.1-70b")
    note = "no price_usd is given for dram, cxl: prices are without them"
    assert note in make_plan(model, replace(machine, storage=storage), LONG).notes
    assert make_plan(model, machine, LONG).notes == ()


def test_less_written_is_less_found() -> None:
    plan = planned(LONG)
    tiers = ("hbm", "dram", "ssd")
    half, whole = (evaluate(plan.setup, 4, tiers, written=part) for part in (0.5, 1.0))
    assert half is not None
    assert whole is not None
    assert half.found["ssd"] == pytest.approx(whole.found["ssd"] / 2)
    assert half.found["dram"] == whole.found["dram"]
    assert half.output_tokens_per_s < whole.output_tokens_per_s


def test_a_nearer_tier_has_its_part_in_meeting_the_target() -> None:
    """DRAM alone misses 10 s at 16 requests, DRAM and SSD together meet it: DRAM is not turned down for that."""
    plan = planned(Workload(32_768, concurrency=16, reuse=0.5, ttft_s=10.0), "qwen3-32b")
    dram, ssd = plan.verdicts
    assert dram.ttft_with_s > 10.0 > ssd.ttft_with_s
    assert dram.constraints[0].holds
    assert "with the tiers behind it" in dram.constraints[0].reason


def test_requests_beyond_hbm_wait_for_those_that_run() -> None:
    plan = planned(LONG)
    by_count = {one.requests: one for one in plan.points[()]}
    eight, sixteen = by_count[8], by_count[16]
    assert (sixteen.running, sixteen.output_tokens_per_s) == (8, eight.output_tokens_per_s)
    # Eight more wait until as many were answered, at the rate of eight.
    assert sixteen.ttft_s == pytest.approx(eight.ttft_s + 8 / eight.requests_per_s)


def test_instances_compute_at_the_same_time() -> None:
    model, machine, load = load_model("llama-3.1-8b"), load_machine("8x-h100"), Workload(32_768, concurrency=8)
    four = make_plan(model, machine, load, Parallel(2))
    point = next(one for one in four.points[()] if one.requests == 8)
    assert four.budget.instances == 4
    assert point.ttft_s == pytest.approx(2 * four.setup.engine.prefill_s(0, load.prompt_tokens))  # two on each
    assert point.tpot_s == pytest.approx(four.setup.engine.step_s(2, 32_768))


def test_idle_kv_in_hbm_counts_by_what_it_takes_there() -> None:
    """Eight ranks hold a latent eight times: room for idle KV in HBM keeps an eighth of that in tokens."""
    load = Workload(65_536, concurrency=1, reuse=0.5, return_s=60.0)
    plan = make_plan(load_model("deepseek-v3"), load_machine("8x-h200"), load)
    assert plan.setup.copies == pytest.approx(8)
    point = plan.points[("hbm",)][0]
    budget = plan.budget
    tokens = (budget.kv_nbytes - budget.sequence_nbytes) / (8 * 70_272)
    cycle_s = plan.setup.engine.prefill_s(32_512, 32_512) + 512 * point.tpot_s  # if all that is reused were there
    kept_s = tokens / (65_536 / cycle_s)
    assert point.found["hbm"] == pytest.approx(0.5 * (1 - math.exp(-kept_s / 60.0)), rel=1e-6)


def test_a_tier_that_is_too_small_for_the_rest() -> None:
    plan = planned(Workload(131_072, concurrency=64), machine="8x-80gb")
    (dram,) = plan.decoding.spills  # 2.4 TB beyond HBM, and 512 GiB of DRAM
    assert not dram.fits
    assert not any("out of dram" in line for line in verdict_lines(plan))
    side = side_of(plan)
    assert side.tpot_exact_s is None
    assert side.tpot_sparse_s is None


def test_a_machine_that_does_not_hold_the_weights_decodes_nothing() -> None:
    side = side_of(planned(Workload(8192, concurrency=1), model="llama-3.1-405b", machine="2x-80gb-ssd"))
    assert (side.holds, side.tpot_exact_s, side.tpot_sparse_s) == (0, None, None)


def test_hbm_that_holds_all_sequences_is_no_news() -> None:
    lines = " ".join(verdict_lines(planned(replace(LONG, concurrency=8))))
    assert "HBM holds 8 at once" not in lines
    assert "Of 9 sequences HBM holds 8 at once; the KV of 1 is idle." in verdict_lines(
        planned(replace(LONG, concurrency=9))
    )


def test_less_reuse_than_the_trace_has_can_be_asked_for() -> None:
    distances = np.array([0.0, 10.0, 100.0, 1000.0])
    trace = TraceProfile(4, 8, 4, 1.0, 16, 64, 64, 64, 10.0, 0.5, 1.0, 1.0, 1.0, distances, 8)
    assert Workload(10_000, reuse=0.2, trace=trace).found_share(16 * 5000, 1e9) == 0.2


def test_a_point_of_hot_hits_in_restores() -> None:
    plan = planned(LONG)
    hot, point = plan.hot_restore, plan.chosen
    assert hot is not None
    assert point is not None
    # Of 60 % of a prompt, 0.02 % is found in HBM; a point of these 25.7 GB at 50.4 GB/s.
    found_nbytes = int(point.found_share * 130_560) * 327_680
    assert hot.tier == "ssd"
    assert hot.hit_rate == pytest.approx(point.found["hbm"] / point.found_share)
    assert hot.point_saves_s == pytest.approx(0.01 * found_nbytes / 50.4e9)
    assert hot.doubling_saves_s == pytest.approx((1 - hot.hit_rate) * found_nbytes / 50.4e9 / 2)
    assert not hot.point_is_worth_more
    assert planned(replace(LONG, reuse=0.0)).hot_restore is None


def test_beyond_hbm_a_model_that_chooses_tokens_reads_its_choice() -> None:
    """DeepSeek-V3.2: of 131,072 tokens 2,048 latents of 576 elements and all index keys of 128, in 61 layers."""
    plan = planned(Workload(131_072, concurrency=8), "deepseek-v3.2", "8x-h200")
    per_rank = 61 * 2 * (2048 * 576 + 131_072 * 128)
    assert plan.decoding.read_nbytes == 8 * 8 * per_rank
    assert plan.decoding.active_nbytes == 8 * 8 * 61 * 2 * 131_072 * (576 + 128)
    ssd = next(one for one in plan.decoding.spills if one.tier == "ssd")
    below = ssd.overflow_nbytes / 8
    assert ssd.exact_read_nbytes == pytest.approx(below * per_rank / (61 * 2 * 131_072 * 704))


def test_a_sequence_has_the_links_of_its_own_instance_alone() -> None:
    """Llama-3.1-8B once on each of 8 accelerators: 4 GiB of KV come over one x16 link, 64 GB/s x 0.75, not over 8."""
    load = Workload(32_768, concurrency=8, reuse=0.8)
    plan = make_plan(load_model("llama-3.1-8b"), load_machine("8x-h100"), load, Parallel(1))
    dram = next(one for one in plan.choices if (one.tier, one.tokens) == ("dram", 32_768))
    assert dram.load_s == pytest.approx(20e-6 + 4 * 2**30 / 48e9)
    # The drives carry 50.4 GB/s, so that link is the narrow one for a request alone; eight of them share the drives.
    assert plan.setup.paths()[-1].bottleneck == "accelerator link"
    assert plan.setup.paths(8)[-1].bottleneck == "ssd"
    alone = plan.points["hbm", "dram"][0]
    assert alone.requests == 1
    assert alone.own_link_s > alone.restore_s
    assert alone.ttft_s == pytest.approx(alone.first_byte_s + alone.own_link_s + alone.compute_s)


def test_a_tier_forgets_as_fast_as_it_is_written() -> None:
    """Gemma 3: of 507,904 B that are put for a token, windows keep few for long; the room is taken all the same. A tier
    is passed through in capacity / bytes put, and of the reuse 1 - exp(-that / return) is found.
    """
    load = Workload(131_072, concurrency=16, reuse=0.6)
    plan = planned(load, "gemma-3-27b")
    point = evaluate(plan.setup, 16, ("dram",))
    assert point is not None
    assert plan.setup.token_nbytes == 507_904
    drive = plan.setup.machine.tier("dram")
    assert drive is not None
    # Tokens that are found are touched, not put again: the time is the least one, so what is found is, too.
    put = point.put_bytes_per_s / (1 - point.found_share)
    most = 0.6 * (1 - math.exp(-drive.kv_nbytes / put / load.return_s))
    assert point.found_share <= most * 1.01


def test_a_sequence_lies_in_one_instance() -> None:
    """Llama-3.1-70B twice on 8 x 80 GB: each has 4 x 0.7 x 44.7 = 125 GB for KV, no room for 160 GiB, but both have."""
    plan = make_plan(load_model("llama-3.1-70b"), load_machine("8x-h100"), Workload(524_288, 1), Parallel(4))
    assert plan.budget.sequences == 0
    assert plan.budget.kv_nbytes > plan.decoding.active_nbytes
    assert not plan.decoding.fits
    assert plan.decoding.overflow_nbytes == pytest.approx(160 * 2**30 - 4 * 0.7 * (80e9 - 141.1e9 / 4), rel=1e-3)
    side = side_of(plan)
    assert side.decodes_from != "hbm"


def test_a_sequence_has_the_hbm_bandwidth_of_its_own_instance() -> None:
    """16 GiB of KV in 2 ms: 8.6 TB/s, a third of what eight H100 carry, and 3.2 times what one does."""
    load = Workload(131_072, concurrency=1, tpot_s=0.002)
    plan = make_plan(load_model("llama-3.1-8b"), load_machine("8x-h100"), load, Parallel(1))
    hbm = next(one for one in plan.shortfalls if one.link == "hbm")
    assert hbm.factor == pytest.approx(16 * 2**30 / 0.002 / (3.35e12 * 0.8))
    assert any("short by a factor of 3.2" in line for line in verdict_lines(plan))


@pytest.mark.parametrize(
    ("model", "machine"),
    [("gemma-3-27b", "8x-h100-array"), ("mistral-7b-v0.1", "8x-b200"), ("llama-3.1-70b", "8x-h100")],
)
def test_no_more_is_written_than_links_carry(model: str, machine: str) -> None:
    """New KV of Gemma 3 would fill one port of 100 GbE twice over: what is not written is not found."""
    plan = planned(Workload(131_072, concurrency=64, reuse=0.9), model, machine)
    point = plan.chosen
    assert point is not None
    assert all(one.use <= 1 for one in plan.loads)
    far = point.tiers[-1]
    if point.written < 1:
        assert max(one.use for one in plan.loads) == pytest.approx(1, abs=0.02)  # and no less than they carry
        assert "of the new KV" in plan.verdicts[-1].reason or "of new KV" in plan.verdicts[-1].reason or far == "remote"
    else:
        assert model == "llama-3.1-70b"
    if plan.wear is not None:
        assert plan.wear.written_bytes_per_s == pytest.approx(1.02 * point.written * point.put_bytes_per_s)
