"""Whole plans: the three constraints in order, operating points, and each step of the arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvterrace.errors import ConfigError
from kvterrace.planner.advice import TierVerdict
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


@pytest.mark.parametrize("figure", ["9" * 400, "-" + "9" * 400, "nan", "inf"])
def test_a_figure_that_is_no_float_is_refused_by_its_field(figure: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(f'use = "8x-h100"\nssd = {{ dwpd = {figure} }}\n')
    with pytest.raises(ConfigError, match="ssd: dwpd: "):
        load_machine(str(file))


def test_the_operating_point_is_the_largest_that_meets_the_target() -> None:
    plan = planned(replace(LONG, ttft_s=25.0))
    assert plan.chosen is not None
    every = list(plan.points.values())[-1]
    meeting = [one.requests for one in every if one.ttft_s <= 25.0]
    assert plan.chosen.requests == max(meeting) == 4  # 22 s; 8 take 44 s
    assert "The largest concurrency that meets the target: 4 at once" in " ".join(verdict_lines(plan))


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


def test_less_written_is_less_found() -> None:
    plan = planned(LONG)
    tiers = ("hbm", "dram", "ssd")
    half, whole = (evaluate(plan.setup, 4, tiers, written=part) for part in (0.5, 1.0))
    assert half is not None
    assert whole is not None
    assert half.found["ssd"] == pytest.approx(whole.found["ssd"] / 2)
    assert half.found["dram"] == whole.found["dram"]
    assert half.output_tokens_per_s < whole.output_tokens_per_s


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
