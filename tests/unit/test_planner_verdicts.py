"""Verdicts: the three constraints in order, wear and prices, what is impossible, and the guide's worked examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvterrace.planner.advice import LEAST_GAIN, TierVerdict, least_gain
from kvterrace.planner.compare import side_of
from kvterrace.planner.hardware import load_machine
from kvterrace.planner.ladder import evaluate
from kvterrace.planner.layers import Parallel
from kvterrace.planner.models import load_model
from kvterrace.planner.plan import Plan, make_plan
from kvterrace.planner.sizing import hbm_budget
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


def test_a_nearer_tier_has_its_part_in_meeting_the_target() -> None:
    """DRAM alone misses 10 s at 16 requests, DRAM and SSD together meet it: DRAM is not turned down for that."""
    plan = planned(Workload(32_768, concurrency=16, reuse=0.5, ttft_s=10.0), "qwen3-32b")
    dram, ssd = plan.verdicts
    assert dram.ttft_with_s > 10.0 > ssd.ttft_with_s
    assert dram.constraints[0].holds
    assert "with the tiers behind it" in dram.constraints[0].reason


def test_the_worked_examples_of_the_guide() -> None:
    guide = " ".join((Path(__file__).parent.parent.parent / "docs" / "guide" / "sizing.md").read_text().split())

    def said(text: str) -> None:
        assert text in guide, text

    plan = planned(LONG)
    dram, ssd = plan.verdicts
    assert plan.wear is not None
    said(f"{plan.budget.sequences} at once: {dram.ttft_without_s:.0f} s to the first token computed")
    said(f"{dram.ttft_with_s:.0f} s with DRAM, {ssd.ttft_with_s:.0f} s with four drives behind it")
    said(
        f"{100 * ssd.gain:.0f} % more output. At {plan.wear.written_bytes_per_s / 1e9:.1f} GB/s of new KV these drives"
    )
    said(f"these drives last {plan.wear.life_days:.0f} of their 1,825 days")
    said(f"With {100 * plan.wear.service_days / 365:.0f} % of it written they serve a year")
    said(f"the gain is {100 * ssd.gain_in_service:.0f} % at least")
    said(f"{plan.wear.budget_bytes_per_s / 1e6:.0f} MB/s the gain would be {100 * ssd.gain_in_budget:.1f} %")
    short = planned(Workload(4096, reuse=0.9), "llama-3.1-8b")
    prefill_s = short.setup.engine.prefill_s(0, 3584)
    said(
        f"computes a prompt of 3,584 tokens in {1000 * prefill_s:.1f} ms there; HBM holds {short.budget.sequences} such"
    )
    one = replace(LONG, concurrency=1)
    two, eight = (side_of(planned(one, machine=name)) for name in ("2x-80gb-ssd", "8x-80gb"))
    assert two.ttft_loaded_s is not None
    assert two.tpot_exact_s is not None
    assert two.tpot_sparse_s is not None
    assert eight.tpot_exact_s is not None
    said(f"{100 * two.price_usd / eight.price_usd:.0f} % of the price. Loaded from the drive the first token takes")
    said(f"{two.ttft_loaded_s:.1f} s, computed {two.ttft_computed_s:.0f} s ({eight.ttft_computed_s:.0f} s on eight)")
    said(f"{two.tpot_exact_s:.1f} s exactly, {1000 * two.tpot_sparse_s:.0f} ms sparsely (2,048 tokens)")
    said(f"against {1000 * eight.tpot_exact_s:.1f} ms")
    small = load_model("llama-3.1-8b")
    held = [hbm_budget(small, load_machine("8x-h100"), Parallel(tp), 32_768).sequences for tp in (8, 1)]
    said(f"(Llama-3.1-8B, 32 K, 8 x H100: {held[0]} sequences against {held[1]})")
