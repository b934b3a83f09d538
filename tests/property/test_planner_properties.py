"""Whatever the configuration, the machine and the load: a plan or a refusal of one line; and more never costs less."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvterrace.cli import main
from kvterrace.errors import KVTerraceError
from kvterrace.planner.endurance import life_days
from kvterrace.planner.explain import steps
from kvterrace.planner.families_hybrid import HYBRID
from kvterrace.planner.families_known import LATENT, PLAIN
from kvterrace.planner.hardware import load_machine, machine_from, machine_names
from kvterrace.planner.html import plan_html
from kvterrace.planner.ladder import Setup, evaluate
from kvterrace.planner.layers import Parallel
from kvterrace.planner.links import paths
from kvterrace.planner.models import load_model, model_from_config, shipped_models
from kvterrace.planner.plan import make_plan
from kvterrace.planner.report import plan_json
from kvterrace.planner.restore import choose
from kvterrace.planner.sizing import default_parallel, hbm_budget
from kvterrace.planner.timing import Engine
from kvterrace.planner.units import bandwidth, duration, gb, gib, parse_duration, parse_share, parse_tokens
from kvterrace.planner.verdict import verdict_lines
from kvterrace.planner.workload import Workload

MODELS = sorted({str(entry["name"]) for entry in shipped_models().values()})
FAMILIES = sorted(PLAIN | LATENT | set(HYBRID) | {"unknown"})
NAMES = [
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "torch_dtype", "sliding_window", "layer_types",
    "kv_lora_rank", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "quantization_config",
    "text_config", "tie_word_embeddings", "num_kv_shared_layers", "attention_chunk_size", "no_rope_layers",
    "mamba_d_state", "full_attention_interval", "linear_num_key_heads", "hybrid_override_pattern",
    "use_sliding_window", "max_window_layers", "per_layer_config", "attn_layer_period", "conv_L_cache",
    "first_k_dense_replace", "mlp_layer_types", "sliding_window_pattern",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**13),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([1, 2, 64, 4096]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)


def one_line(error: KVTerraceError, start: str = "") -> None:
    message = str(error)
    assert message
    assert message.startswith(start)
    assert "\n" not in message


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(MODELS), changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), data=st.data()
)
def test_a_changed_configuration_is_read_or_refused_by_name(
    name: str, changes: dict[str, object], data: st.DataObject
) -> None:
    entry = shipped_models()[name]["config"]
    assert isinstance(entry, dict)
    config = {**entry, **changes}
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config["text_config"] = {**inner, **{key: value for key, value in changes.items() if key != "text_config"}}
    try:
        model = model_from_config(config, "fuzzed", "config.json")
    except KVTerraceError as error:
        one_line(error, "config.json: ")
        return
    tokens = data.draw(st.integers(0, 10**7))
    assert model.sequence_nbytes(tokens) >= 0
    assert model.sequence_nbytes(tokens) <= model.sequence_nbytes(tokens + 1)
    assert model.weights_nbytes > 0


@settings(max_examples=200, deadline=None)
@given(family=st.sampled_from(FAMILIES), fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=20))
def test_a_made_up_configuration_is_read_or_refused(family: str, fields: dict[str, object]) -> None:
    try:
        model_from_config({"model_type": family, **fields}, "fuzzed", "config.json")
    except KVTerraceError as error:
        one_line(error)


METHODS = ["fp8", "mxfp4", "gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "magic"]
QUANTISED = {
    **dict.fromkeys(["bits", "load_in_4bit", "bnb_4bit_use_double_quant", "ignore", "exclude_modules"], VALUES),
    "quant_algo": st.one_of(VALUES, st.sampled_from(["FP8", "NVFP4"])),
    "kv_cache_quant_algo": st.one_of(VALUES, st.just("FP8")),
    "kv_cache_scheme": st.one_of(VALUES, st.fixed_dictionaries({"num_bits": VALUES}, optional={"type": VALUES})),
    "config_groups": st.one_of(
        VALUES,
        st.dictionaries(
            st.text(max_size=2),
            st.fixed_dictionaries(
                {"weights": st.fixed_dictionaries({"num_bits": VALUES}, optional={"group_size": VALUES})},
                optional={"targets": VALUES},
            ),
            max_size=2,
        ),
    ),
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({"quant_method": st.sampled_from(METHODS)}, optional=QUANTISED))
def test_quantised_weights_are_no_larger_than_plain_ones_or_refused(section: dict[str, object]) -> None:
    entry = shipped_models()["llama-3.1-8b"]["config"]
    assert isinstance(entry, dict)
    try:
        model = model_from_config({**entry, "quantization_config": section}, "fuzzed", "config.json")
    except KVTerraceError as error:
        one_line(error, "config.json: quantization_config: ")
        return
    assert 0 < model.weights_nbytes <= 2.2 * model.params  # 16 bits, and scales
    assert model.nbytes_per_token() in {65_536, 131_072}


MACHINE_FIELDS = [
    "count",
    "gb_per_s",
    "capacity_gb",
    "capacity_gib",
    "efficiency",
    "use",
    "dwpd",
    "price_usd",
    "memory_gb",
]
SECTIONS = [
    "accelerator",
    "accelerator_link",
    "io_die",
    "dram",
    "cxl",
    "ssd",
    "remote",
    "gpudirect",
    "name",
    "nonsense",
]


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from(machine_names()),
    changes=st.dictionaries(
        st.sampled_from(SECTIONS),
        st.one_of(VALUES, st.dictionaries(st.sampled_from(MACHINE_FIELDS), VALUES)),
        max_size=3,
    ),
)
def test_a_changed_machine_is_read_or_refused(base: str, changes: dict[str, object]) -> None:
    from kvterrace.planner.hardware import _catalog

    try:
        machine = machine_from({**_catalog()["machine"][base], **changes}, "fuzzed", "machine.toml")
    except KVTerraceError as error:
        one_line(error, "machine.toml: ")
        return
    for path in paths(machine):
        assert path.bytes_per_s > 0


LOADS = st.builds(
    Workload,
    context_tokens=st.integers(2, 1 << 24),
    concurrency=st.integers(1, 10_000),
    output_tokens=st.just(1),
    reuse=st.floats(0, 1),
    return_s=st.floats(1e-3, 1e7),
    ttft_s=st.one_of(st.none(), st.floats(1e-3, 1e4)),
    tpot_s=st.one_of(st.none(), st.floats(1e-3, 10)),
)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(MODELS), machine=st.sampled_from(machine_names()), load=LOADS)
def test_a_plan_of_anything_is_whole(name: str, machine: str, load: Workload) -> None:
    """Tables, JSON, page and steps come out of every plan, and its parts agree."""
    plan = make_plan(load_model(name), load_machine(machine), load)
    assert plan.total_nbytes == plan.active_nbytes + plan.idle_nbytes == sum(plan.split.values())
    lines = verdict_lines(plan)
    assert all(line and "\n" not in line and "nan" not in line for line in lines)
    text = json.dumps(plan_json(plan, explain=True), allow_nan=False)
    assert json.loads(text)["schema"] == "kvterrace.plan/1"
    assert "nan" not in plan_html(plan)
    assert steps(plan)
    for points in plan.points.values():
        for point in points:
            assert 0 < point.ttft_s < float("inf")
            assert -1e-9 <= point.found_share <= load.reuse + 1e-9
            assert point.running <= plan.budget.sequences


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    tokens=st.integers(1, 1 << 22),
    more=st.integers(1, 1 << 20),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_more_tokens_are_never_less_bytes_or_time(name: str, tokens: int, more: int, tp: int) -> None:
    model, machine = load_model(name), load_machine("8x-h100")
    engine = Engine(model, machine.accelerator, Parallel(1))
    assert model.sequence_nbytes(tokens) <= model.sequence_nbytes(tokens + more)
    assert model.sequence_nbytes(tokens, tp) * tp >= model.sequence_nbytes(tokens)
    assert model.sequence_nbytes(tokens, tp) <= model.sequence_nbytes(tokens)
    assert engine.prefill_s(0, tokens) <= engine.prefill_s(0, tokens + more)
    assert engine.prefill_s(tokens, more) <= engine.prefill_s(0, tokens + more) + 1e-12
    assert engine.step_s(1, tokens) <= engine.step_s(2, tokens)
    assert engine.step_s(3, tokens) <= engine.step_s(3, tokens + more)
    for path in paths(machine):
        assert choose(engine, path, tokens).load_s <= choose(engine, path, tokens + more).load_s


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["llama-3.1-70b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b"]),
    load=LOADS,
    requests=st.integers(1, 500),
)
def test_more_requests_and_less_reuse_never_speed_up_a_first_token(name: str, load: Workload, requests: int) -> None:
    model, machine = load_model(name), load_machine("8x-h200")
    parallel = default_parallel(model, machine, load.context_tokens)
    setup = Setup(model, machine, parallel, hbm_budget(model, machine, parallel, load.context_tokens), load)
    tiers = ("hbm", "dram", "ssd")
    fewer, more = evaluate(setup, requests, tiers), evaluate(setup, requests + 1, tiers)
    if fewer is None or more is None:
        return
    assert fewer.ttft_s <= more.ttft_s * (1 + 1e-9)
    without = evaluate(setup, requests, ())
    none = evaluate(replace(setup, workload=replace(load, reuse=0.0)), requests, tiers)
    assert without is not None
    assert none is not None
    assert none.ttft_s == pytest.approx(without.ttft_s)


@given(
    capacity=st.floats(1e9, 1e15), dwpd=st.floats(0.1, 10), years=st.floats(1, 10), rate=st.floats(1e3, 1e11),
    factor=st.floats(1.1, 10),
)  # fmt: skip
def test_life_grows_with_the_rating_and_falls_with_the_writes(
    capacity: float, dwpd: float, years: float, rate: float, factor: float
) -> None:
    days = life_days(capacity, dwpd, years, rate)
    assert life_days(capacity * factor, dwpd, years, rate) == pytest.approx(days * factor)
    assert life_days(capacity, dwpd * factor, years, rate) == pytest.approx(days * factor)
    assert life_days(capacity, dwpd, years, rate * factor) == pytest.approx(days / factor)


UNITS = {"B": 1}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", 1)}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@given(nbytes=st.integers(0, 10**21))
def test_shown_bytes_are_right_to_three_digits(nbytes: int) -> None:
    for shown in (gib(nbytes), gb(nbytes), bandwidth(nbytes).removesuffix("/s")):
        number, unit = shown.split(" ")
        assert float(number.replace(",", "")) * UNITS[unit] == pytest.approx(nbytes, rel=0.006, abs=0.5)
    assert gib(nbytes).split(" ")[1] in {"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
    assert gb(nbytes).split(" ")[1] in {"B", "kB", "MB", "GB", "TB", "PB"}


@given(seconds=st.floats(1e-6, 1e9))
def test_shown_times_are_right_to_two_digits(seconds: float) -> None:
    number, unit = duration(seconds).split(" ")
    assert float(number.replace(",", "")) * TIMES[unit] == pytest.approx(seconds, rel=0.06)


@given(text=st.text(max_size=12))
def test_any_text_is_a_figure_or_refused(text: str) -> None:
    for parse in (parse_tokens, parse_duration, parse_share):
        try:
            assert parse(text, "--option") >= 0
        except KVTerraceError as error:
            one_line(error, "--option: ")


@pytest.mark.parametrize(("text", "tokens"), [("128k", 131_072), ("1m", 1_048_576), ("32768", 32_768), ("0.5K", 512)])
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), ("2s", 2), ("500ms", 0.5), ("10min", 600), ("20us", 2e-5)])
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text, "--ttft") == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "part"), [("0.6", 0.6), ("60%", 0.6), ("1", 1.0), ("0", 0.0), ("100%", 1.0)])
def test_shares(text: str, part: float) -> None:
    assert parse_share(text, "--reuse") == pytest.approx(part)


def test_one_percent_is_not_taken_for_all() -> None:
    with pytest.raises(KVTerraceError, match="more than all"):
        parse_share("60", "--reuse")


OPTIONS = ["--model", "--context", "--concurrency", "--hardware", "--reuse", "--ttft", "--tpot", "--output", "--return"]
OPTIONS += ["--tp", "--pp", "--kv-dtype", "--weights", "--against"]
WORDS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    st.sampled_from(
        ["0", "1", "-1", "128k", "60%", "1e9", "nan", "inf", "2s", "0.5", "auto", "8x-h100", "llama-3.1-8b"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    given=st.dictionaries(
        st.sampled_from(OPTIONS),
        WORDS,
        max_size=4,
    )
)  # fmt: skip
def test_any_command_line_plans_or_refuses_in_one_line(given: dict[str, str]) -> None:
    options = {"--model": "llama-3.1-8b", "--context": "8k", **given}
    arguments = ["plan", "--json", *(f"{option}={value}" for option, value in options.items())]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    assert status in {0, 2}
    if status:
        assert out.getvalue() == ""
        assert err.getvalue().count("\n") == 1
    else:
        assert json.loads(out.getvalue())["schema"] == "kvterrace.plan/1"
