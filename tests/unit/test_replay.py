"""What a replay is given and what it makes of its counts: traces as columns, sizes of ladders, time saved."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policy_models import ladder
from tests.unit.test_references import turns

from kvterrace.errors import ConfigError
from kvterrace.io.probe import why_not_native
from kvterrace.sim import columns
from kvterrace.sim.columns import TraceColumns, load_trace
from kvterrace.sim.outcome import CostModel, Outcome
from kvterrace.sim.replay import POLICIES, replay
from kvterrace.sim.sizes import parse_ladder
from kvterrace.sim.traces import read_trace


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def chat(path: Path, requests: list[list[int]], tokens: list[int]) -> Path:
    """A trace in Mooncake's format, a request a second."""
    rows = [
        {"timestamp": 1000 * at, "input_length": length, "output_length": 1, "hash_ids": ids}
        for at, (ids, length) in enumerate(zip(requests, tokens, strict=True))
    ]
    return write(path, rows)


def test_columns_of_mooncakes_format(tmp_path: Path) -> None:
    path = chat(tmp_path / "t.jsonl.gz", [[70, 71, 5], [70, 9], []], [1025, 1024, 0])
    trace = load_trace(path)
    assert trace.ids.tolist() == [0, 1, 2, 0, 3]
    assert trace.offsets.tolist() == [0, 3, 5, 5]
    assert trace.at_s.tolist() == [0.0, 1.0, 2.0]
    assert (trace.tokens.tolist(), trace.output_tokens.tolist()) == ([1025, 1024, 0], [1, 1, 1])
    assert (trace.distinct, trace.block_tokens, len(trace)) == (4, 512, 3)
    whole = load_trace(path, block_tokens=1024)  # every second id stands for both blocks; the rest goes
    assert (whole.ids.tolist(), whole.offsets.tolist(), whole.block_tokens) == ([0, 1], [0, 1, 2, 2], 1024)


@pytest.mark.parametrize("coarsen", [1, 2, 3, 4, 7])
def test_run_length_coded_ids(tmp_path: Path, coarsen: int) -> None:
    runs = [[100, 5], [100, 3, 900, 1, 300, 11], [], [7, 1, 8, 1, 9, 1, 100, 6]]
    rows = [{"timestamp": 5, "input_length": 64 * sum(one[1::2]) + 9, "hash_runs": one} for one in runs]
    path = write(tmp_path / "t.jsonl", rows)
    trace = load_trace(path, block_tokens=64 * coarsen)
    numbers: dict[int, int] = {}
    for number, one in enumerate(runs):
        ids = [first + at for first, count in zip(one[::2], one[1::2], strict=True) for at in range(count)]
        expected = [numbers.setdefault(id_, len(numbers)) for id_ in ids[coarsen - 1 :: coarsen]]
        assert trace.ids[trace.offsets[number] : trace.offsets[number + 1]].tolist() == expected
    assert trace.distinct == len(numbers)
    assert load_trace(path).block_tokens == 256


def test_without_the_extension_module_ids_are_numbered_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [[3 * one + 10 for one in ids] for ids in turns(4, 60)]
    path = chat(tmp_path / "t.jsonl", requests, [16 * len(ids) for ids in requests])
    one = load_trace(path)
    monkeypatch.setattr(columns, "why_not_native", lambda: "not built")
    other = load_trace(path)
    assert (one.ids.tolist(), one.distinct, one.ids.dtype) == (other.ids.tolist(), other.distinct, other.ids.dtype)
    assert one.block_tokens == other.block_tokens == 16


BAD = [
    ("", "no request in it"),
    ('{"timestamp": 1, "input_length": 5, "hash_ids": []}', "no request has a whole block"),
    ('{"timestamp": 9, "hash_ids": [1]}\n{"timestamp": 8, "hash_ids": [1]}', "line 2: at 0.008 s"),
    ('{"timestamp": 9, "hash_ids": [1]}\n\n{"timestamp": 9, "hash_ids": [-1]}', "line 3: not a request"),
    ('{"timestamp": 9, "hash_ids": [1]}\n{"timestamp": 9, "hash_runs": [1, 9]}', "blocks of two sizes"),
    ('{"timestamp": -9, "hash_ids": [1]}', "line 1"),
    ('{"timestamp": 9, "hash_ids": [18446744073709551616]}', "line 1"),
    ('{"timestamp": 9, "hash_ids": ["a"]}', "line 1"),
    ('{"timestamp": 9, "hash_runs": [1, 900000000000]}', "line 1: .*blocks in one request"),
    ('{"timestamp": 9, "hash_runs": [1]}', "line 1"),
    ('{"timestamp": 9, "input_length": 100, "hash_ids": [1, 2, 3, 4, 5]}', "request 1: 5 blocks for 100 tokens"),
    ("\x00\x01", "line 1"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_trace_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_trace(path)


def test_a_file_that_is_cut_or_no_gzip_is_refused(tmp_path: Path) -> None:
    path = chat(tmp_path / "t.jsonl.gz", turns(1, 400), [512 * len(ids) for ids in turns(1, 400)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="damaged or cut off"):
        load_trace(path)
    path.write_bytes(b"plain")
    with pytest.raises(ConfigError, match="damaged or cut off"):
        load_trace(path)
    with pytest.raises(ConfigError, match="holds no trace"):
        load_trace(tmp_path)


def test_requests_say_what_the_trace_knows(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "session": 4, "input_length": 200, "output_length": 7, "stop": "tool_use"}
    (one,) = read_trace(write(tmp_path / "t.jsonl", [row | {"hash_runs": [5, 3]}]))
    assert (one.at_s, one.session, one.input_tokens, one.output_tokens) == (1.5, 4, 200, 7)
    assert (one.stop, one.block_tokens, one.ids.tolist()) == ("tool_use", 64, [5, 6, 7])


def test_sizes_of_a_ladder() -> None:
    assert parse_ladder("dram=5%,ssd=30%").blocks_of(43_924, 1) == (2196, 13_177)  # 2196.2, 13177.2
    assert parse_ladder(" ssd = 1000 , dram = 12.5% ").blocks_of(80, 1) == (10, 1000)
    assert parse_ladder("dram=1GiB").blocks_of(1, 3 << 20) == (341, 0)
    assert parse_ladder("dram=1GB,ssd=2GiB").blocks_of(1, 10**6) == (1000, 2147)
    assert parse_ladder("dram=0.29%").blocks_of(10_000, 1) == (29, 0)  # in floats it is 28.999...


@pytest.mark.parametrize(
    "text",
    ["", "dram", "dram=", "ssd=5%", "dram=5%,dram=6%", "hbm=3%,dram=5%", "dram=x", "dram=-1", "dram=5%%", "dram=5%,"],
)
def test_a_ladder_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="dram"):
        parse_ladder(text)


@pytest.mark.parametrize("text", ["dram=0", "dram=1%", "dram=4,ssd=0", "dram=100B"])
def test_a_tier_without_room(text: str) -> None:
    with pytest.raises(ConfigError, match="has no room for a block"):
        parse_ladder(text).blocks_of(99, 101)


def outcome(**given: Any) -> Outcome:
    nothing: dict[str, Any] = dict.fromkeys(Outcome.__dataclass_fields__, 0)
    return Outcome(**nothing | {"policy": "arc", "block_tokens": 100} | given)


def test_time_saved_by_hand() -> None:
    """Two prompts of 1,000 tokens: one not hit, one hit for 600 tokens, 400 of them from DRAM."""
    costs = CostModel(block_nbytes=10**9, dram_gb_per_s=50.0, ssd_gb_per_s=5.0, token_us=1000.0, attention_us=200.0)
    seen = outcome(
        requests=2,
        blocks=20,
        tokens=2000,
        tokens_squared=2e6,
        dram_hits=4,
        ssd_hits=2,
        dram_hit_tokens=400,
        ssd_hit_tokens=200,
        hit_tokens_squared=360_000.0,
        ssd_written=3,
    )
    saving = seen.saving(costs)
    # 1 ms a token; 0.2 ms more for each 1,000 before it: 0.2 ms x 1000 / 2 on average, over 1,000 tokens 0.1 s
    assert saving.without_s == pytest.approx(2 * (1.0 + 0.1))
    assert saving.avoided_s == pytest.approx(0.6 + 0.2e-3 * 0.6 / 2 * 600)
    assert saving.dram_reload_s == pytest.approx(4 / 50)
    assert saving.ssd_reload_s == pytest.approx(2 / 5)
    assert saving.saved_s == pytest.approx(0.636 - 0.08 - 0.4)
    assert saving.saved_share == pytest.approx(0.156 / 2.2)
    assert (seen.hits, seen.hit_ratio, seen.token_hit_ratio, seen.written_per_read) == (6, 0.3, 0.3, 1.5)
    assert outcome().written_per_read is None
    assert CostModel().nbytes(16) == 2 * 32 * 8 * 128 * 2 * 16


@pytest.mark.parametrize(
    "change", [{"block_nbytes": 0}, {"ssd_gb_per_s": 0.0}, {"token_us": -1.0}, {"attention_us": -0.1}]
)
def test_costs_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give"):
        CostModel(**change)
    with pytest.raises(ConfigError, match="give"):
        CostModel(dram_gb_per_s=float("nan"))


def made(tmp_path: Path, seed: int) -> tuple[TraceColumns, list[list[int]], list[int]]:
    requests = turns(seed, 250)
    tokens = [max(0, 16 * len(ids) - seed % 16) for ids in requests]
    return load_trace(chat(tmp_path / "t.jsonl", requests, tokens)), requests, tokens


def numbered(requests: list[list[int]]) -> list[list[int]]:
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in ids] for ids in requests]


@pytest.mark.parametrize("policy", ["lru"])
@pytest.mark.parametrize(("seed", "capacity"), [(1, 60), (2, 200)])
def test_the_production_ledger_in_dram_is_lru(tmp_path: Path, policy: str, seed: int, capacity: int) -> None:
    trace, requests, tokens = made(tmp_path, seed)
    steps: list[int] = []
    found = replay(trace, policy, capacity, on_step=steps.append)
    expected = ladder(requests, "lru-tail", capacity, 0, tokens, 16)
    assert (found.dram_hits, found.ssd_hits) == (expected["upper_hits"], 0)
    assert (found.missed_new, found.missed_dropped) == (expected["missed_new"], expected["missed_dropped"])
    assert (found.dram_hit_tokens, found.tokens) == (expected["upper_hit_tokens"], expected["tokens"])
    assert (found.hit_tokens_squared, found.tokens_squared) == (
        expected["hit_tokens_squared"],
        expected["tokens_squared"],
    )
    assert (found.requests, found.blocks) == (expected["requests"], expected["blocks"])
    assert sum(steps) == len(trace)


def test_the_production_ledger_on_two_tiers_adds_up(tmp_path: Path) -> None:
    trace, requests, tokens = made(tmp_path, 3)
    found = replay(trace, "default", 40, 100)
    assert found.ssd_hits > 0
    assert found.hits + found.missed_new + found.missed_dropped + found.missed_behind == found.blocks
    assert found.missed_new == trace.distinct
    whole = sum(min(tokens[at], 16 * len(ids)) for at, ids in enumerate(requests))
    assert 0 < found.dram_hit_tokens + found.ssd_hit_tokens < whole
    assert 16 * found.hits - len(requests) * 15 <= found.dram_hit_tokens + found.ssd_hit_tokens <= 16 * found.hits


@pytest.mark.skipif(why_not_native() is not None, reason="the extension module is not there")
def test_a_reference_replay_is_told_as_it_was_counted(tmp_path: Path) -> None:
    trace, requests, tokens = made(tmp_path, 5)
    steps: list[int] = []
    found = replay(trace, "arc", 30, 90, on_step=steps.append)
    expected = ladder(numbered(requests), "arc", 30, 90, tokens, 16)
    names = {
        "dram_hits": "upper_hits",
        "ssd_hits": "lower_hits",
        "dram_hit_tokens": "upper_hit_tokens",
        "ssd_hit_tokens": "lower_hit_tokens",
        "ssd_written": "written",
        "moved_up": "promoted",
        "moved_down": "demoted",
    }
    same = ("requests", "blocks", "tokens", "tokens_squared", "hit_tokens_squared", "dropped")
    for ours, theirs in [*names.items(), *((name, name) for name in (*same, "missed_new", "missed_behind"))]:
        assert getattr(found, ours) == expected[theirs], ours
    assert found.hits + found.missed_new + found.missed_dropped + found.missed_behind == found.blocks
    assert sum(steps) == len(trace)
    assert (found.dram_blocks, found.ssd_blocks, found.policy) == (30, 90, "arc")


def test_what_cannot_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, *_ = made(tmp_path, 6)
    with pytest.raises(ConfigError, match="no such policy"):
        replay(trace, "mru", 4)
    for policy in POLICIES:
        with pytest.raises(ConfigError, match="give DRAM one at least"):
            replay(trace, policy, 0)
    with pytest.raises(ConfigError, match="a store's has 32 at least"):
        replay(trace, "default", 4, 31)
    monkeypatch.setattr("kvterrace.sim.replay.why_not_native", lambda: "not built")
    with pytest.raises(ConfigError, match="needs the extension module: not built"):
        replay(trace, "arc", 4)
    assert replay(trace, "lru", 4).blocks == len(trace.ids)
    assert np.array_equal(np.unique(trace.ids), np.arange(trace.distinct))
