"""Sizing, links, time and endurance: hand arithmetic and the figures of the requirements (R2-R8, R30)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvterrace.errors import ConfigError
from kvterrace.planner.cost import all_in_hbm, usd_per_million_tokens
from kvterrace.planner.decode import hot_hit
from kvterrace.planner.endurance import endurance, life_days, what_would_help
from kvterrace.planner.hardware import Accelerator, Machine, load_machine
from kvterrace.planner.layers import Layer, Model, Parallel
from kvterrace.planner.links import Path, link_loads, paths, step_shortfall
from kvterrace.planner.models import load_model
from kvterrace.planner.restore import break_even, choose, first_token_s
from kvterrace.planner.sizing import STARTING_SPLIT, hbm_budget, split_nbytes
from kvterrace.planner.timing import Engine, Sparse, attended_tokens, prefill_flops

GIB = 2**30
GB = 10**9


def a_model(**changes: object) -> Model:
    """Two layers of 2 heads of 4, one KV head each; 100 weights a layer, 10 for output; 16 B of KV a token, each."""
    layer = Layer("full attention", 1, 4, 4, query_heads=2, qk_dim=4, v_dim=4, params=100, active_params=100)
    made = Model("toy", "by hand", (layer, layer), "bfloat16", 2 * 220, 20, 10)
    return replace(made, **changes)  # type: ignore[arg-type]


def an_accelerator(count: int = 1, **changes: object) -> Accelerator:
    """1,000 B, 100 B/s, 1,000 FLOP/s, all of which can be reached."""
    made = Accelerator("toy", count, 1000, 100.0, 1000.0, 0.0, 1.0, 1.0, 5.0, "by hand")
    return replace(made, **changes)  # type: ignore[arg-type]


# Sizing


def test_the_published_split() -> None:
    total = 32 * 40 * GIB
    assert split_nbytes(total, STARTING_SPLIT) == {"hbm": 256 * GIB, "dram": 640 * GIB, "ssd": 384 * GIB}


@pytest.mark.parametrize("total", [0, 1, 2, 3, 7, 10**15 + 1])
def test_a_split_loses_no_byte(total: int) -> None:
    assert sum(split_nbytes(total, STARTING_SPLIT).values()) == total


@pytest.mark.parametrize("shares", [{}, {"hbm": 0.5}, {"hbm": 1.5, "ssd": -0.5}])
def test_shares_that_cannot_be(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="split"):
        split_nbytes(100, shares)


def test_hbm_holds_70_percent_of_what_the_weights_leave() -> None:
    machine = load_machine("8x-h100")
    budget = hbm_budget(load_model("llama-3.1-70b"), machine, Parallel(8), 131_072)
    weights = 70_552_387_584 * 2 // 8  # counted by hand: embeddings 2 x 128,256 x 8,192, 80 x 855,638,016
    assert budget.rank_weights_nbytes == pytest.approx(weights, abs=1)
    free = 80 * GB - budget.rank_weights_nbytes
    assert budget.rank_kv_nbytes == int(0.7 * free)
    assert budget.rank_sequence_nbytes == 5 * GIB
    assert budget.sequences == 8  # 43.65e9 B / 5.37e9 B
    assert budget.instances == 1


def test_instances_each_hold_their_own() -> None:
    budget = hbm_budget(load_model("llama-3.1-8b"), load_machine("8x-h100"), Parallel(2), 32_768)
    # 80 GB - 8.03 GB; 70 % of it: 50.4 GB; a sequence of 4 GiB on two ranks: 2.147 GB each
    assert budget.instances == 4
    assert budget.sequences == 4 * 23


def test_weights_that_do_not_fit() -> None:
    budget = hbm_budget(load_model("llama-3.1-405b"), load_machine("8x-h100"), Parallel(8), 1000)  # 101 GB on 80
    assert not budget.weights_fit
    assert budget.sequences == 0
    assert budget.kv_nbytes == 0


def test_more_ranks_than_accelerators() -> None:
    with pytest.raises(ConfigError, match="wants 16 accelerators; 8 there"):
        hbm_budget(load_model("llama-3.1-8b"), load_machine("8x-h100"), Parallel(8, 2), 1000)


# Links


def a_machine(**changes: object) -> Machine:
    return replace(load_machine("8x-h100"), **changes)  # type: ignore[arg-type]


def test_without_gpudirect_a_restore_crosses_the_io_die_twice() -> None:
    staged = {path.tier: path for path in paths(a_machine())}
    assert staged["ssd"].crossings == {"ssd": 1, "accelerator link": 1, "io die": 2, "dram": 2}
    assert staged["dram"].crossings == {"dram": 1, "accelerator link": 1, "io die": 1}
    direct = {path.tier: path for path in paths(a_machine(gpudirect=True))}
    assert direct["ssd"].crossings == {"ssd": 1, "accelerator link": 1, "io die": 1}


def test_bandwidth_of_a_path_is_that_of_its_narrowest_link() -> None:
    by_tier = {path.tier: path for path in paths(a_machine())}
    # 4 drives x 14 GB/s x 0.9; DRAM: the IO dies, 2 x 200 GB/s x 0.8; accelerators: 8 x 64 GB/s x 0.75 = 384
    assert by_tier["ssd"].bytes_per_s == pytest.approx(50.4e9)
    assert by_tier["dram"].bytes_per_s == pytest.approx(320e9)
    assert (by_tier["ssd"].bottleneck, by_tier["dram"].bottleneck) == ("ssd", "io die")


def test_a_shared_io_die_starves_a_fast_drive() -> None:
    machine = load_machine("2x-80gb-ssd")
    alone = paths(machine)[-1].bytes_per_s
    # The die carries 160 GB/s; others take all but 4 of them, and a restore crosses it twice: 2 GB/s are left of 6.3.
    crowded = replace(machine, io_die=replace(machine.io_die, other_bytes_per_s=156e9))
    path = paths(crowded)[-1]
    assert alone == pytest.approx(6.3e9)
    assert path.bytes_per_s == pytest.approx(2e9)
    assert path.bottleneck == "io die"


def test_a_network_is_the_ceiling_of_an_array() -> None:
    path = paths(load_machine("8x-h100-array"))[-1]
    assert path.tier == "remote"
    assert path.bottleneck == "network"
    assert path.bytes_per_s == pytest.approx(12.5e9 * 0.9)  # one port of 100 GbE


def test_ranks_that_need_the_same_bytes_each_take_them() -> None:
    eight = {path.tier: path for path in paths(a_machine(), copies=8)}
    assert eight["ssd"].crossings == {"ssd": 1, "accelerator link": 8, "io die": 9, "dram": 9}
    assert eight["ssd"].bytes_per_s == pytest.approx(320e9 / 9)


def test_loads_add_up_over_the_tiers() -> None:
    machine = a_machine()
    loads = {one.link: one for one in link_loads(machine, {"dram": 3e9, "ssd": 2e9}, {"dram": 1e9, "ssd": 1e9}, 1)}
    assert loads["accelerator link"].need_bytes_per_s == pytest.approx(5e9)
    assert loads["io die"].need_bytes_per_s == pytest.approx(3e9 + 2 * 2e9)
    # A drive that writes half as fast as it reads is busy twice as long with a byte written.
    assert loads["ssd"].need_bytes_per_s == pytest.approx(2e9 + 2 * 1e9)
    # DRAM moves what comes from the SSD twice; what is put comes to it once, and is read once for the SSD.
    assert loads["dram"].need_bytes_per_s == pytest.approx((3e9 + 2 * 2e9) + (1e9 + 1e9))


def test_what_is_put_leaves_the_accelerators_once() -> None:
    loads = {one.link: one for one in link_loads(a_machine(), {}, {"dram": 4e9, "ssd": 4e9}, 8)}
    assert loads["accelerator link"].need_bytes_per_s == pytest.approx(4e9)
    assert loads["io die"].need_bytes_per_s == pytest.approx(8e9)
    bare = replace(a_machine(), storage=tuple(one for one in a_machine().storage if one.name == "ssd"))
    without = {one.link: one for one in link_loads(bare, {}, {"ssd": 4e9}, 8)}
    assert without["accelerator link"].need_bytes_per_s == pytest.approx(4e9)


def test_768_gb_in_a_step_of_10_ms_is_impossible() -> None:
    by_link = {one.link: one for one in step_shortfall(load_machine("8x-h100"), 768e9, 0.01)}
    need = 76.8e12
    assert by_link["hbm"].need_bytes_per_s == pytest.approx(need)
    assert by_link["hbm"].factor == pytest.approx(need / (8 * 3.35e12 * 0.8))  # 3.6
    assert by_link["accelerator link, one of 8"].factor == pytest.approx(need / 48e9)  # 1,600
    assert by_link["ssd"].factor == pytest.approx(need / 50.4e9)  # 1,524
    ordered = [one.factor for one in step_shortfall(load_machine("8x-h100"), 768e9, 0.01)]
    assert ordered == sorted(ordered)
    with pytest.raises(ConfigError, match="step"):
        step_shortfall(load_machine("8x-h100"), 1, 0)


# Time


@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("cached", [0, 1, 5, 50])
@pytest.mark.parametrize("new", [0, 1, 4, 60])
def test_attended_tokens_are_those_of_a_loop(cached: int, new: int, window: int) -> None:
    counted = sum(min(cached + i, window) if window else cached + i for i in range(1, new + 1))
    assert attended_tokens(cached, new, window) == counted


def test_prefill_flops_by_hand() -> None:
    # 3 tokens x 200 weights x 2, and 2 x 10 for the output; 2 layers x 2 heads x (4 + 4) x 2 x (1 + 2 + 3) pairs
    assert prefill_flops(a_model(), 0, 3) == (2 * 3 * 200 + 2 * 10, 2 * 2 * 8 * 2 * 6)


def test_prefill_takes_the_longer_of_arithmetic_and_reading() -> None:
    engine = Engine(a_model(), an_accelerator(), Parallel())
    # One token: 2 x 200 + 20 + 64 = 484 FLOP at 1,000/s; weights: 440 B less 20 unread at 100 B/s = 4.2 s
    assert engine.prefill_s(0, 1) == pytest.approx(4.2)
    flops = 2 * 100 * 200 + 20 + 64 * 5050
    assert engine.prefill_s(0, 100) == pytest.approx(flops / 1000)
    assert engine.prefill_s(100, 0) == 0.0
    assert Engine(a_model(), an_accelerator(2), Parallel(2)).prefill_s(0, 100) == pytest.approx(flops / 2000)


def test_a_decoding_step_reads_the_weights_and_all_active_kv() -> None:
    engine = Engine(a_model(), an_accelerator(flops=1e12), Parallel())
    # 420 B of weights, and for each of 3 sequences 50 tokens x 2 layers x 16 B
    assert engine.step_s(3, 50) == pytest.approx((420 + 3 * 50 * 32) / 100)
    sparse = Sparse(tokens=10, digest=0.5)
    assert engine.sparse_step_s(3, 50, sparse) == pytest.approx((420 + 3 * 10 * 32 + 3 * 50 * 32 * 0.5) / 100)


def test_a_model_that_chooses_tokens_reads_these_and_all_index_keys() -> None:
    layer = Layer(
        "MLA latent with index", 1, 6, replicated=True, indexer_dim=2, index_heads=3, chosen=10, query_heads=2,
        qk_dim=4, v_dim=4, params=100, active_params=100,
    )  # fmt: skip
    model = a_model(layers=(layer,), weights_nbytes=240)
    # 50 tokens are kept: 8 elements each; 10 latents of 6 are read, and 50 index keys of 2. Two ranks each do so.
    assert model.sequence_nbytes(50) == 50 * 8 * 2
    assert model.read_nbytes(50, 1) == (10 * 6 + 50 * 2) * 2
    assert model.read_nbytes(50, 2) == 2 * model.read_nbytes(50, 1)
    assert model.read_nbytes(4, 1) == model.sequence_nbytes(4)
    engine = Engine(model, an_accelerator(flops=1e12), Parallel())
    assert engine.step_s(3, 50) == pytest.approx((220 + 3 * 320) / 100)
    # 20 tokens of a prompt attend to 1, 2, ... 10, 10, ... tokens: 155 pairs; the choice looks at 210.
    assert prefill_flops(model, 0, 20)[1] == 2 * 2 * 8 * 155 + 2 * 3 * 2 * 210


def test_dense_attention_reads_all_that_it_holds() -> None:
    for name in ("llama-3.1-70b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b"):
        model = load_model(name)
        assert model.read_nbytes(50_000, 8) == model.held_nbytes(50_000, Parallel(8))


def test_experts_that_no_token_was_sent_to_are_not_read() -> None:
    layer = Layer(
        "experts", 1, 4, 4, params=1010, active_params=210, experts=10, experts_per_token=2, expert_params=100
    )
    model = Model("toy", "by hand", (layer,), "bfloat16", 2020, 0, 0, experts_nbytes=2000)
    assert model.touched_nbytes(1) == pytest.approx(20 + 0.2 * 2000)
    assert model.touched_nbytes(2) == pytest.approx(20 + (1 - 0.8**2) * 2000)
    assert model.touched_nbytes(10_000) == pytest.approx(2020)


def test_eight_bit_weights_use_eight_bit_arithmetic() -> None:
    fast = an_accelerator(flops_8bit=2000.0)
    assert Engine(a_model(), fast, Parallel()).matrix_flops == 1000
    assert Engine(a_model(weights_nbytes=220), fast, Parallel()).matrix_flops == 2000


# Load or compute


def test_break_even_is_where_the_choice_turns() -> None:
    engine = Engine(a_model(), an_accelerator(), Parallel())
    # 32 B a token over 40 B/s: 0.8 s a token; computing n tokens takes (400 n + 20 + 32 n (n + 1)) / 1,000 s, which
    # is more from n = 12 on (0.4 n + 0.02 + 0.032 n (n + 1) > 0.8 n).
    path = Path("ssd", {"ssd": 1.0}, {"ssd": 40.0}, 0.0)
    found = break_even(engine, path, 4096)
    assert found.tokens == 16
    slow = Path("ssd", {"ssd": 1.0}, {"ssd": 10.0}, 0.0)  # 3.2 n: 0.432 n + 0.032 n^2 + 0.02 > 3.2 n from n = 87 on
    assert break_even(engine, slow, 4096).tokens == 96
    assert not choose(engine, slow, 80).load
    assert choose(engine, slow, 96).load
    assert choose(engine, slow, 96).break_even_bytes_per_s == pytest.approx(96 * 32 / engine.prefill_s(0, 96))
    never = Path("ssd", {"ssd": 1.0}, {"ssd": 0.1}, 0.0)
    assert break_even(engine, never, 4096).tokens is None


def test_requests_that_pass_two_stages() -> None:
    # Of 3 requests with 2 s on the links and 5 s on the accelerators: these start after 2 s and work 3 x 5.
    assert first_token_s(3, 2.0, 5.0, local=3) == 17.0
    assert first_token_s(3, 5.0, 2.0, local=3) == 17.0
    assert first_token_s(1, 2.0, 5.0, local=1) == 7.0
    # On three instances, each computes one of them: the links are the slower stage now.
    assert first_token_s(3, 2.0, 5.0, local=1, first_byte_s=0.5) == 0.5 + 2 * 3 + 5
    # Of four requests on two instances, each pair shares its accelerators' links, 7 s for each: slower than all else.
    assert first_token_s(4, 2.0, 5.0, local=2, own_link_s=7.0) == 7 * 2 + 5


# Endurance


@pytest.mark.parametrize(("dwpd", "days"), [(1, 34), (3, 101)])
def test_2_5_gb_a_second_kills_a_4_tb_drive(dwpd: float, days: int) -> None:
    assert 2.5e9 * 86_400 / 1e12 == 216  # TB a day
    assert round(life_days(4e12, dwpd, 5, 2.5e9)) == days  # 4 TB x DWPD x 1,825 days / 216 TB


def test_what_gqa_8_bits_and_admission_make_of_it() -> None:
    days = life_days(4e12, 1, 5, 1000 * 2_621_440)  # 1,000 tokens a second of a 64-head model: 32.2 days
    assert days == pytest.approx(32.23, abs=0.01)
    helped = what_would_help(days, kv_element_nbytes=2, query_heads=64, kv_heads=64)
    assert helped["GQA: 8 KV heads"] == pytest.approx(life_days(4e12, 1, 5, 1000 * 327_680))
    assert helped["8-bit KV"] == pytest.approx(2 * days)
    assert helped["admission: second put"] == pytest.approx(2 * days)
    assert "GQA: 8 KV heads" not in what_would_help(days, kv_element_nbytes=1, query_heads=64, kv_heads=8)
    assert "8-bit KV" not in what_would_help(days, kv_element_nbytes=1, query_heads=64, kv_heads=8)


def test_a_drive_that_nothing_is_written_to_lives_for_ever() -> None:
    drive = load_machine("2x-80gb-ssd").tier("ssd")
    assert drive is not None
    idle = endurance(drive, 0.0)
    assert idle.life_days == float("inf")
    assert idle.lasts
    # The budget is 1 DWPD: 4 TB a day.
    assert idle.budget_bytes_per_s * 86_400 == pytest.approx(4e12)
    busy = endurance(drive, 2.5e9)
    assert busy.life_days == pytest.approx(33.8 / 1.02, rel=1e-3)
    assert not busy.lasts
    with pytest.raises(ConfigError, match="negative"):
        life_days(1, 1, 1, -1)


# Cost


def test_eight_accelerators_against_two_and_a_drive() -> None:
    eight, two = load_machine("8x-80gb"), load_machine("2x-80gb-ssd")
    assert two.price_usd < eight.price_usd / 3  # R8: under a third
    model, tokens = load_model("llama-3.1-70b"), 131_072
    # 141.1 GB of weights, 43 GB of KV under 70 % of what they leave: two of 80 GB hold it not, four do.
    found = all_in_hbm(model, two, tokens, 1)
    assert found.accelerators == 4
    assert found.price_usd == 4 * 30_000 + 10_000 + 2_500
    assert hbm_budget(model, eight, Parallel(8), tokens).sequences == 8


def test_more_accelerators_than_a_host_takes_need_more_hosts() -> None:
    # 32 sequences of 40 GiB, 8 on each 8 x 80 GB: 32 accelerators in four hosts with their DRAM
    found = all_in_hbm(load_model("llama-3.1-70b"), load_machine("8x-h100"), 131_072, 32)
    assert found.accelerators == 32
    assert found.price_usd == 32 * 30_000 + 4 * (60_000 + 10_000)


def test_accelerators_are_doubled_until_they_hold_everything() -> None:
    # 3 sequences of 40 GiB on accelerators of 80 GB: 4 hold 2, 8 hold 8; 5 to 7 are not tried.
    two = load_machine("2x-80gb-ssd")
    assert all_in_hbm(load_model("llama-3.1-70b"), two, 131_072, 3).accelerators == 8
    # 9 heads are not divided over two: each accelerator holds the model. 70 % of 80 - 0.27 GB, 8 K of 23,040 B: 295.
    small = load_model("smollm2-135m")
    assert [all_in_hbm(small, two, 8192, count).accelerators for count in (295, 296, 590, 591, 1180, 1181)] == [
        1, 2, 2, 4, 4, 8,
    ]  # fmt: skip
    assert all_in_hbm(small, two, 8192, 10**8).accelerators is None


def test_price_of_a_million_tokens() -> None:
    # 94,608 $ over three years of 1,000 tokens/s: 94.608e9 tokens
    assert usd_per_million_tokens(94_608.0, 1000.0) == pytest.approx(1.0)
    assert usd_per_million_tokens(94_608.0, 0.0) is None
    assert usd_per_million_tokens(0.0, 10.0) is None


def test_a_token_passes_the_stages_of_a_pipeline_one_after_the_other() -> None:
    accelerator, model = load_machine("8x-h100").accelerator, load_model("llama-3.1-8b")
    one, four = (Engine(model, accelerator, Parallel(1, pp)) for pp in (1, 4))
    # A sequence alone: each stage reads a quarter of the weights, and waits for the one before it.
    assert four.step_s(1, 32_768) == pytest.approx(one.step_s(1, 32_768))
    assert four.sparse_step_s(1, 32_768, Sparse()) == pytest.approx(one.sparse_step_s(1, 32_768, Sparse()))
    # Eight: two are in each stage, so a step takes what two take on one accelerator, and there are four times as many.
    assert four.step_s(8, 32_768) == pytest.approx(one.step_s(2, 32_768))
    assert four.step_s(8, 32_768) < one.step_s(8, 32_768)
    # Where arithmetic is what takes long, too: 800 short sequences.
    assert four.step_s(800, 1) == pytest.approx(one.step_s(200, 1))
    # A prompt is computed in chunks, on all stages at a time; but no faster than the weights are read in turn.
    assert four.prefill_s(0, 32_768) == pytest.approx(one.prefill_s(0, 32_768) / 4)
    assert four.prefill_s(0, 1) == pytest.approx(one.prefill_s(0, 1))


# A point of hot hit rate


def test_a_point_of_hit_rate_beats_twice_the_bandwidth_only_above_98_percent() -> None:
    path = Path("ssd", {"ssd": 1.0, "io die": 2.0}, {"ssd": 7e9, "io die": 1e12}, 0.0)
    at_90 = hot_hit(path, 7e9, 0.90)  # 10 % of 7 GB at 7 GB/s: 100 ms to wait
    assert at_90.wait_s == pytest.approx(0.1)
    assert at_90.point_saves_s == pytest.approx(0.01)
    assert at_90.doubling_saves_s == pytest.approx(0.05)
    assert at_90.break_even_hit_rate == pytest.approx(0.98)
    assert not at_90.point_is_worth_more
    assert hot_hit(path, 7e9, 0.985).point_is_worth_more
    assert hot_hit(path, 7e9, 0.9999).point_saves_s == pytest.approx(0.0001)  # no more than there is


def test_a_faster_drive_behind_a_narrow_link_saves_nothing() -> None:
    narrow = Path("ssd", {"ssd": 1.0, "io die": 2.0}, {"ssd": 7e9, "io die": 8e9}, 0.0)
    found = hot_hit(narrow, 4e9, 0.5)
    assert found.doubling_saves_s == 0.0
    assert found.point_is_worth_more
    assert found.break_even_hit_rate == 0.0
