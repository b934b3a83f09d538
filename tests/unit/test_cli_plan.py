"""`kvterrace plan` from the outside: tables, JSON, the page, golden files, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.json_schema import faults

from kvterrace.cli import main

GOLDEN = Path(__file__).parent.parent / "fixtures" / "planner"
#: What each golden file was made from: `kvterrace plan ... --json`.
GOLDEN_ARGUMENTS = {
    "llama-128k": ["--model", "llama-3.1-70b", "--context", "128k", "--concurrency", "32", "--reuse", "60%"],
    "qwen-array": ["--model", "qwen3-235b-a22b", "--context", "32k", "--reuse", "0.8", "--hardware", "8x-h100-array"],
    "eight-instances": [
        *("--model", "llama-3.1-8b", "--context", "32k", "--concurrency", "64", "--reuse", "50%", "--tp", "1"),
    ],
    "gpt-oss-windows": ["--model", "gpt-oss-120b", "--context", "128k", "--concurrency", "48", "--reuse", "60%"],
    "short": [
        "--model",
        "llama-3.1-8b",
        "--context",
        "4k",
        "--reuse",
        "0.9",
        "--hardware",
        "1x-l40s",
        "--tpot",
        "50ms",
    ],
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    made = json.loads(run(capsys, *arguments, "--json"))
    assert isinstance(made, dict)
    return made


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf with the way to it."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from flat(one, f"{path}.{key}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from flat(one, f"{path}[{index}]")
    else:
        yield path, value


@pytest.mark.parametrize("name", sorted(GOLDEN_ARGUMENTS))
def test_golden_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan does not change by accident. Where it changes on purpose, make the file anew with the arguments above."""
    golden = dict(flat(json.loads((GOLDEN / f"{name}.json").read_text())))
    made = dict(flat(planned(capsys, *GOLDEN_ARGUMENTS[name])))
    assert set(made) == set(golden)
    for path, value in golden.items():
        if isinstance(value, float):
            assert made[path] == pytest.approx(value, rel=1e-9), path
        else:
            assert made[path] == value, path


def test_tables_begin_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, *GOLDEN_ARGUMENTS["llama-128k"])
    assert shown.startswith("- Worth having below HBM: DRAM, SSD.\n")
    assert "hbm 256 GiB, dram 640 GiB, ssd 384 GiB" in shown
    assert "327,680" in shown
    assert "40 GiB = 42.9 GB" in shown


def test_what_a_step_reads_of_active_kv(capsys: pytest.CaptureFixture[str]) -> None:
    dense = run(capsys, "--model", "deepseek-v3", "--context", "128k", "--hardware", "8x-h200")
    assert "all of it is read at each step" in dense
    # Of 131,072 tokens 2,048 latents of 576 elements, and all index keys of 128: 19.5 % of 131,072 x 704.
    chosen = run(capsys, "--model", "deepseek-v3.2", "--context", "128k", "--hardware", "8x-h200")
    assert "the model reads 19.5 % of it at each step" in chosen


def test_explain_shows_units(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, *GOLDEN_ARGUMENTS["llama-128k"], "--explain")
    assert "80 x (8 x (128 + 128)) x 2\n" in shown
    assert "327,680 B = 320 KiB = 328 kB" in shown
    assert "1,374,389,534,720 B = 1.25 TiB = 1.37 TB" in shown


def test_json_holds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    made = dict(flat(planned(capsys, *GOLDEN_ARGUMENTS["llama-128k"], "--explain", "--against", "8x-h200")))
    assert made[".schema"] == "kvterrace.plan/1"
    assert made[".kv.nbytes_per_token"] == 327_680
    assert made[".kv.total_nbytes"] == 1280 * 2**30
    assert made[".kv.split_nbytes.dram"] == 640 * 2**30
    assert made[".against[1].machine"] == "8x-h200"
    assert made[".steps[0].expression"] == "80 x (8 x (128 + 128)) x 2"


def test_every_key_of_the_json_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    reference = (Path(__file__).parent.parent.parent / "docs" / "reference" / "plan.md").read_text()
    documented = set(re.findall(r"`([a-z_0-9]+)`", reference))
    keys = set()
    for name in GOLDEN_ARGUMENTS:
        for path, _ in flat(planned(capsys, *GOLDEN_ARGUMENTS[name], "--explain", "--against", "8x-h200")):
            keys.update(re.findall(r"\.([a-z_0-9]+)(?=[.\[]|$)", path))
    keys -= {"hbm", "dram", "cxl", "ssd", "remote", "network"}  # names of tiers and links
    assert keys <= documented, sorted(keys - documented)


SCHEMA = json.loads((Path(__file__).parent.parent.parent / "docs" / "reference" / "plan.schema.json").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        *GOLDEN_ARGUMENTS.values(),
        ["--model", "llama-3.1-405b", "--context", "128k"],  # weights do not fit
        ["--model", "jamba-1.5-mini", "--context", "256k", "--concurrency", "200", "--explain", "--against", "8x-h200"],
        ["--model", "smollm2-135m", "--context", "8k", "--hardware", "8x-80gb", "--ttft", "1ms"],
    ],
)
def test_json_is_as_its_schema_says(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert list(faults(planned(capsys, *arguments), SCHEMA, SCHEMA)) == []


@pytest.mark.parametrize(
    ("way", "value", "fault"),
    [
        (("schema",), "kvterrace.plan/2", ".schema: 'kvterrace.plan/2', not 'kvterrace.plan/1'"),
        (("kv", "nbytes_per_token"), 327_680.5, ".kv.nbytes_per_token: 327680.5, not integer"),
        (("kv", "nbytes_per_token"), True, ".kv.nbytes_per_token: True, not integer"),
        (("kv", "more"), 1, ".kv: more is not in the schema"),
        (("workload", "reuse"), 60, ".workload.reuse: 60, out of range"),
        (("workload", "trace"), [], ".workload.trace: [], not ['object', 'null']"),
        (("paths", 0, "tier"), "tape", ".paths[0].tier: 'tape', not one of ['dram', 'cxl', 'ssd', 'remote']"),
        (("operating_point", "found", "ssd"), -1, ".operating_point: none of what it may be"),
        (("endurance", "life_days_with", "x"), "long", ".endurance.life_days_with.x: 'long', not ['number', 'null']"),
    ],
)  # fmt: skip
def test_the_validator_finds_what_is_wrong(way: tuple[str | int, ...], value: object, fault: str) -> None:
    plan = json.loads((GOLDEN / "llama-128k.json").read_text())
    inner = plan
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    assert list(faults(plan, SCHEMA, SCHEMA)) == [fault]


def test_a_key_that_is_missing_is_found() -> None:
    plan = json.loads((GOLDEN / "llama-128k.json").read_text())
    del plan["hbm"]["sequences"]
    assert list(faults(plan, SCHEMA, SCHEMA)) == [".hbm: sequences is missing"]


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in {"script", "link", "img", "iframe"}
        assert not any(name in {"src", "href"} for name, _ in attrs)


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    run(capsys, *GOLDEN_ARGUMENTS["llama-128k"], "--html", str(page), "--against", "2x-80gb-ssd", "--ttft", "20s")
    text = page.read_text("utf-8")
    checker = _Checker()
    checker.feed(text)
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 6
    for plot in plots:
        ElementTree.fromstring(plot)  # well-formed
    assert text.count("<polyline") == 4 + 4 + 3  # tiers twice, and computed, DRAM, SSD
    assert "256 GiB" in text
    assert "Worth having" in text


def test_names_are_escaped_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "_name_or_path": "<script>alert(1)</script>[bold]", "num_hidden_layers": 2,
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 99, "vocab_size": 9,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = tmp_path / "plan.html"
    shown = run(capsys, "--model", str(tmp_path), "--context", "8k", "--html", str(page))
    assert "<script>alert(1)</script>[bold]" in shown
    assert "<script" not in page.read_text("utf-8")


def test_a_machine_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        name = "mine"
        gpudirect = true
        accelerator = { use = "h100-pcie", count = 2, price_usd = 1 }
        accelerator_link = { use = "pcie5-x16" }
        io_die = { gb_per_s = 100, efficiency = 1, other_gb_per_s = 97 }
        dram = { capacity_gib = 512, gb_per_s = 300 }
        ssd = { use = "nvme-gen4-3840gb", count = 2, dwpd = 3 }
        """
    )
    made = dict(
        flat(planned(capsys, "--model", "llama-3.1-8b", "--context", "32k", "--hardware", str(tmp_path / "mine.toml")))
    )
    assert made[".hardware.name"] == "mine"
    assert made[".cost.price_usd"] == 2 * 1 + 2 * 500
    assert made[".endurance.rated_nbytes"] == pytest.approx(2 * 3.84e12 * 3 * 5 * 365)
    # GPUDirect: the IO die is crossed once, and 3 GB/s of it are left beside the others' traffic.
    assert made[".paths[1].bottleneck"] == "io die"
    assert made[".paths[1].bytes_per_s"] == pytest.approx(3e9)


def test_machine_files_of_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = (Path(__file__).parent.parent.parent / "docs" / "reference" / "plan.md").read_text()
    files = re.findall(r"```toml\n(.*?)```", reference, re.DOTALL)
    made = []
    for text in files:
        (tmp_path / "own.toml").write_text(text)
        own = planned(capsys, "--model", "llama-3.1-8b", "--context", "32k", "--hardware", str(tmp_path / "own.toml"))
        made.append(dict(flat(own))[".cost.price_usd"])
    # 8x-h100 with eight drives in place of four; and the one that is written out, part by part.
    assert made == [314_400 + 4 * 1100, 12_000 + 2 * 28_000 + 5000 + 4 * 500]


def test_a_known_machine_with_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "more.toml"
    own.write_text('use = "8x-h100"\nssd = { count = 8 }\n[dram]\ncapacity_gib = 512\n')
    made = dict(flat(planned(capsys, "--model", "llama-3.1-8b", "--context", "32k", "--hardware", str(own))))
    assert made[".hardware.name"] == "more"
    assert made[".hardware.tiers[0].capacity_nbytes"] == 512 * 2**30
    assert made[".hardware.tiers[0].read_bytes_per_s"] == pytest.approx(600e9 * 0.8)  # as it was
    assert made[".hardware.tiers[1].capacity_nbytes"] == 8 * 7_680 * 10**9
    own.write_text('use = "9x-h9000"')
    assert main(["plan", "--model", "llama-3.1-8b", "--context", "8k", "--hardware", str(own)]) == 2
    assert "use: '9x-h9000' is no known machine" in capsys.readouterr().err


def test_figures_of_the_bench_take_the_place_of_the_datasheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tmp_path / "bench.json"
    phases = {"put": {"gb_per_s": 1.5}, "get_cold": {"gb_per_s": 2.5}}
    bench.write_text(json.dumps({"schema": "kvterrace.bench-store/1", "phases": phases}))
    made = dict(flat(planned(capsys, "--model", "llama-3.1-8b", "--context", "32k", "--bench", str(bench))))
    tiers = {made[f".hardware.tiers[{index}].name"]: index for index in range(2)}
    ssd = f".hardware.tiers[{tiers['ssd']}]"
    assert made[f"{ssd}.read_bytes_per_s"] == 2.5e9
    assert made[f"{ssd}.write_bytes_per_s"] == 1.5e9
    assert made[f"{ssd}.source"] == f"measured: {bench}"


def test_a_trace_gives_lengths_and_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * turn, "input_length": 512 * 40, "output_length": 100,
         "hash_ids": [1000 * (turn % 5) + block for block in range(40)]}
        for turn in range(50)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = dict(flat(planned(capsys, "--model", "llama-3.1-8b", "--trace", str(trace))))
    assert made[".workload.context_tokens"] == 512 * 40 + 100
    assert made[".workload.output_tokens"] == 100
    assert made[".workload.reuse"] == pytest.approx(45 / 50)  # five chains, each new once
    assert made[".workload.trace.return_p50_s"] == 5.0
    # A chain comes back when the four others were asked for: 160 blocks since, and its own of up to 40.
    assert made[".workload.trace.tokens_for_hits.0.99"] == 200 * 512


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-3.1-8b"], "--context: missing"),
        (["--model", "nothing", "--context", "1k"], "--model nothing: no file"),
        (["--model", "llama-3.1-8b", "--context", "many"], "--context: 'many' is no number of tokens"),
        (["--model", "llama-3.1-8b", "--context", "0"], "--context 0"),
        (["--model", "llama-3.1-8b", "--context", "1"], "--output 1"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--concurrency", "0"], "--concurrency 0"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--reuse", "60"], "--reuse: '60' is more than all"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--ttft", "soon"], "--ttft: 'soon' is no time"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--ttft", "0"], "--ttft 0.0 s"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--tp", "3"], "--tp 3: llama-3.1-8b has 32 attention heads"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--tp", "0"], "--tp 0"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--tp", "16"], "--tp 16 x --pp 1 wants 16 accelerators"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--pp", "99"], "--pp 99"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--kv-dtype", "int4"], "--kv-dtype int4"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--weights", "heavy"], "--weights: 'heavy' is no size"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--weights", "0"], "--weights 0"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--hardware", "abacus"], "--hardware abacus: no file"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--against", "abacus"], "--against abacus: no file"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--html", "/nonexistent/x"], "--html /nonexistent/x"),
        (["--model", "llama-3.1-8b", "--trace", "/nonexistent/x"], "/nonexistent/x"),
        (["--model", "llama-3.1-8b", "--context", "8k", "--bench", "/nonexistent/x"], "/nonexistent/x"),
    ],
)
def test_refusals_are_one_line_that_names_the_field(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "cannot be read as TOML"),
        ("", "accelerator: missing"),
        ("accelerator = 7", "accelerator: 7 is no section"),
        ('accelerator = { use = "h9000" }', "use: 'h9000' is no known accelerator"),
        ('accelerator = { use = "h100-sxm", count = -1 }', "count: -1 is no whole number"),
        ('accelerator = { use = "h100-sxm", cuont = 8 }', "cuont: unknown"),
        ('accelerator = { use = "h100-sxm", memory_gib = 80 }', "memory_gib: give memory_gb or memory_gib, not both"),
    ],
)
def test_machines_that_cannot_be(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    assert main(["plan", "--model", "llama-3.1-8b", "--context", "8k", "--hardware", str(path)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert str(path) in shown
    assert words in shown


def test_the_names_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--list")
    assert "llama-3.1-70b" in shown
    assert "8x-h100" in shown
