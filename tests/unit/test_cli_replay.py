"""`kvterrace replay`, as a user calls it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.policy_models import ladder
from tests.unit.test_references import turns
from tests.unit.test_replay import chat, numbered

from kvterrace.cli import main
from kvterrace.io.probe import why_not_native
from kvterrace.sim.replay import POLICIES

needs_native = pytest.mark.skipif(why_not_native() is not None, reason="the extension module is not there")
REQUESTS = numbered(turns(8, 200))
TOKENS = [16 * len(ids) for ids in REQUESTS]
DISTINCT = max(one for ids in REQUESTS for one in ids) + 1


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return chat(tmp_path / "chat.jsonl.gz", REQUESTS, TOKENS)


def named(value: Any) -> set[str]:
    """All keys of nested objects."""
    if isinstance(value, dict):
        return set(value) | {name for one in value.values() for name in named(one)}
    if isinstance(value, list):
        return {name for one in value for name in named(one)}
    return set()


@needs_native
def test_json_is_what_is_documented(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiers", "dram=10%,ssd=25%", "--tiers", "dram=20", "--policy", "arc,lru-tail", "--policy", "arc"]
    assert main(["replay", str(trace), str(trace), *arguments, "--block-bytes", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kvterrace.replay/1"
    assert found["costs"]["block_nbytes"] == 1000
    (one, other) = found["traces"]
    assert one == other
    assert (one["requests"], one["blocks"], one["distinct_blocks"]) == (200, sum(map(len, REQUESTS)), DISTINCT)
    assert (one["tokens"], one["block_tokens"], one["duration_s"]) == (sum(TOKENS), 16, 199.0)
    assert [(run["trace"], run["tiers"], run["policy"]) for run in found["runs"]] == [
        (trace_number, tiers, policy)
        for trace_number in (0, 1)
        for tiers in ("dram=10%,ssd=25%", "dram=20")
        for policy in ("arc", "lru-tail")
    ]
    run = found["runs"][0]
    upper, lower = DISTINCT * 10 // 100, DISTINCT * 25 // 100
    expected = ladder(REQUESTS, "arc", upper, lower, TOKENS, 16)
    assert (run["dram_blocks"], run["ssd_blocks"]) == (upper, lower)
    assert (run["hits"]["dram_blocks"], run["hits"]["ssd_blocks"]) == (expected["upper_hits"], expected["lower_hits"])
    assert run["hits"]["dram_tokens"] == expected["upper_hit_tokens"]
    assert run["misses"] == {
        "new_blocks": expected["missed_new"],
        "dropped_blocks": expected["missed_dropped"],
        "behind_blocks": expected["missed_behind"],
    }
    moves = run["moves"]
    assert (moves["up_blocks"], moves["down_blocks"]) == (expected["promoted"], expected["demoted"])
    assert moves["dropped_blocks"] == expected["dropped"]
    assert moves["ssd_written_nbytes"] == 1000 * expected["written"]
    assert moves["ssd_read_nbytes"] == 1000 * expected["lower_hits"]
    assert moves["written_per_read"] == expected["written"] / expected["lower_hits"]
    assert run["time"]["ssd_reload_s"] == pytest.approx(expected["lower_hits"] * 1000 / 7e9)
    documented = (Path(__file__).parents[2] / "docs/reference/replay.md").read_text()
    assert [name for name in sorted(named(found)) if f"`{name}`" not in documented] == []


@needs_native
def test_tables_show_each_policy_once(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--policy", "all", "--policy", "arc"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^│ ([\w-]+)", out, re.MULTILINE)
    assert rows == list(POLICIES)
    expected = ladder(REQUESTS, "lru-tail", DISTINCT * 5 // 100, DISTINCT * 30 // 100, TOKENS, 16)
    (row,) = [line for line in out.splitlines() if line.startswith("│ lru-tail")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    blocks = sum(map(len, REQUESTS))
    assert cells[2:4] == [f"{100 * expected[name] / blocks:.1f}" for name in ("upper_hits", "lower_hits")]
    assert cells[8:12] == [f"{expected[name]:,}" for name in ("promoted", "demoted", "dropped", "written")]
    assert "at 32.5 us a token" in out


def test_the_default_needs_no_extension_module(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.sim.replay.why_not_native", lambda: "not built")
    monkeypatch.setattr("kvterrace.sim.columns.why_not_native", lambda: "not built")
    assert main(["replay", str(trace), "--tiers", "dram=40,ssd=60", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["policy"] == "default"
    assert run["hits"]["dram_blocks"] > 0
    assert main(["replay", str(trace), "--policy", "arc"]) == 2
    assert capsys.readouterr().err.startswith("kvterrace: policy arc needs the extension module: not built")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tiers", "ssd=5%"], "a ladder has DRAM"),
        (["--tiers", "dram=0"], "has no room for a block"),
        (["--tiers", "dram=5%,tape=5%"], "is no tier"),
        (["--policy", "mru"], "no such policy"),
        (["--policy", ""], "no such policy"),
        (["--ssd-gb-per-s", "0"], "--ssd-gb-per-s: give a number above 0"),
        (["--token-us", "nan"], "--token-us: give a number above 0"),
        (["--block-bytes", "0"], "block-bytes"),
        (["--block-tokens", "24"], "multiple"),
        (["--plot", "/nowhere/p.png"], "--plot"),
        (["--unknown"], "(see kvterrace replay --help)"),
    ],
)
def test_bad_options_are_one_line(
    trace: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), *options]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("kvterrace: ") and words in streams.err
    assert streams.err.count("\n") == 1


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "text.jsonl", "back.jsonl", "cut.jsonl.gz", ""])
def test_bad_traces_are_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.jsonl").write_text("once upon a time\n")
    (tmp_path / "back.jsonl").write_text('{"timestamp": 2, "hash_ids": [1]}\n{"timestamp": 1, "hash_ids": [1]}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    assert main(["replay", str(tmp_path / name)]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"kvterrace: {tmp_path / name}")
    assert streams.err.count("\n") == 1


def test_a_picture_without_matplotlib_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["replay", str(tmp_path / "missing.jsonl"), "--plot", str(tmp_path / "p.png")]) == 2
    errors = capsys.readouterr().err
    assert "pip install 'kvterrace[plot]'" in errors
    assert errors.count("\n") == 1


class Recorded:
    """Stands for matplotlib: says what was asked of it."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> Recorded:
        return Recorded(self._calls, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._name, args, kwargs))
        if self._name == "subplots":
            return Recorded(self._calls, "figure"), [[Recorded(self._calls, "axis") for _ in range(args[1])]]
        return ([], []) if self._name == "get_legend_handles_labels" else None


@needs_native
def test_a_picture_has_a_line_for_each_policy(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    whole = importlib.import_module

    def instead(name: str, package: str | None = None) -> Any:
        return Recorded(calls, name) if name.startswith("matplotlib") else whole(name, package)

    monkeypatch.setattr(importlib, "import_module", instead)
    path = tmp_path / "p.png"
    tiers = ["--tiers", "dram=40%", "--tiers", "dram=10%"]
    assert main(["replay", str(trace), "--plot", str(path), "--policy", "arc,belady", *tiers]) == 0
    lines = {kwargs["label"]: args for name, args, kwargs in calls if name == "plot"}
    assert list(lines) == ["arc", "belady"]
    for policy, (shares, hits) in lines.items():
        rooms = [DISTINCT * share // 100 for share in (10, 40)]
        assert shares == pytest.approx([100 * room / DISTINCT for room in rooms])
        expected = [ladder(REQUESTS, policy, room, 0, TOKENS, 16)["upper_hits"] for room in rooms]
        assert hits == pytest.approx([100 * one / sum(map(len, REQUESTS)) for one in expected])
    assert [args for name, args, _ in calls if name == "savefig"] == [(path,)]
