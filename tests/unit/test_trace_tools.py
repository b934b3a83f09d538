"""`kvterrace trace`: figures against a pass over every block and against published ones, and conversions."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_sim import conversations

from kvterrace import ConfigError
from kvterrace.cli import main
from kvterrace.sim.columns import load_trace
from kvterrace.sim.converting import convert_trace, format_of
from kvterrace.sim.trace_info import TraceInfo, trace_info
from kvterrace.sim.traces import TraceRequest, read_trace

TRACES = os.environ.get("KVTERRACE_TRACES")


def requests_of(chains: Iterable[Sequence[int]]) -> list[TraceRequest]:
    return [TraceRequest(at * 0.5, np.array(ids, np.int64)) for at, ids in enumerate(chains)]


def distances_of(chains: Iterable[Sequence[int]]) -> list[int]:
    """Different blocks since the last touch of the same block, by counting them in a list in order of recency."""
    recent: OrderedDict[int, None] = OrderedDict()
    found = []
    for ids in chains:
        for one in ids:
            if one in recent:
                found.append(list(reversed(recent)).index(one))
            recent[one] = None
            recent.move_to_end(one)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_figures_are_those_of_a_pass_over_every_block(seed: int) -> None:
    chains = conversations(seed, 150)
    flat = [one for ids in chains for one in ids]
    distances = distances_of(chains)
    found = trace_info(requests_of(chains))
    assert found == TraceInfo(
        requests=150,
        sessions=0,
        accesses=len(flat),
        different=len(set(flat)),
        duration_s=149 * 0.5,
        hit_ratio=len(distances) / len(flat),
        once=sum(flat.count(one) == 1 for one in set(flat)) / len(set(flat)),
        reuse_distance=tuple(round(float(one)) for one in np.percentile(distances, [50, 90, 99])),
        input_tokens=0.0,
        output_tokens=0.0,
        longest=max(map(len, chains)),
    )


def test_figures_of_nothing() -> None:
    assert trace_info([]) == TraceInfo(0, 0, 0, 0, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0)
    assert trace_info(requests_of([[]])) == TraceInfo(1, 0, 0, 0, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(TRACES is None, reason="KVTERRACE_TRACES names no folder of traces")
@pytest.mark.parametrize(
    ("name", "coarsen", "wanted"),
    # traces/README.md, "Stats"
    [
        ("mooncake-conversation", 1, (12031, 288500, 182790, 3537, 36.6, 75.8, (8356, 31588, 85267), 12035, 343, 247)),
        ("mooncake-synthetic", 1, (3993, 121877, 43924, 1022, 64.0, 58.4, (6265, 20392, 33941), 15325, 149, 374)),
        ("claude-code-a", 4, (31075, 14894398, 553538, 156034, 96.3, 6.4, (7972, 19607, 54081), 122830, 448, 3493)),
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_figures_are_the_published_ones(
    tmp_path: Path, name: str, coarsen: int, wanted: tuple[Any, ...], converted: bool
) -> None:
    assert TRACES is not None
    path = Path(TRACES) / f"{name}.jsonl.gz"
    if converted:
        assert convert_trace(path, tmp_path / "t.jsonl.gz", "kvterrace") == wanted[0]
        path = tmp_path / "t.jsonl.gz"
    found = trace_info(read_trace(path, coarsen=coarsen))
    assert wanted == (
        found.requests,
        found.accesses,
        found.different,
        round(found.duration_s),
        round(100 * found.hit_ratio, 1),
        round(100 * found.once, 1),
        found.reuse_distance,
        round(found.input_tokens),
        round(found.output_tokens),
        found.longest,
    )


# -- converting --------------------------------------------------------------------------------------------------------


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain(request: TraceRequest) -> tuple[Any, ...]:
    return (
        request.at_s,
        request.ids.tolist(),
        request.session,
        request.input_tokens,
        request.output_tokens,
        request.stop,
        request.api_s,
        request.closed,
    )


AGENT = [
    {
        "timestamp": 285,
        "session": 0,
        "agent": 0,
        "input_length": 300,
        "output_length": 113,
        "stop": "tool_use",
        "api_ms": 2580,
        "think_ms": 0,
        "hash_runs": [100, 4],
    },
    {"timestamp": 1285, "session": 7, "input_length": 450, "stop": "end_turn", "hash_runs": [100, 2, 500, 3, 90, 2]},
    {"timestamp": 1286, "session": 7, "input_length": 12, "output_length": 1, "hash_runs": []},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_run_length_coded_ids_become_a_kvterrace_trace(tmp_path: Path, suffix: str) -> None:
    source, target = write_lines(tmp_path / "a.jsonl", AGENT), tmp_path / f"b{suffix}"
    assert convert_trace(source, target, "kvterrace") == 3
    assert [plain(one) for one in read_trace(target)] == [
        (0.285, [100, 101, 102, 103], 0, 300, 113, "tool_use", 2.58, False),
        (1.285, [100, 101, 500, 501, 502, 90, 91], 7, 450, 0, "end_turn", 0.0, False),
        (1.286, [], 7, 12, 1, "", 0.0, False),
    ]
    text = gzip.decompress(target.read_bytes()) if suffix == ".jsonl.gz" else target.read_bytes()
    rows = [json.loads(one) for one in text.splitlines()]
    assert rows[0]["kvterrace_trace"] == 1
    assert rows[1] == {"op": "namespace", "ns": 0, "block_tokens": 64}
    assert [row for row in rows if row.get("op") == "blocks"] == [
        {"op": "blocks", "first": 0, "after": -1, "runs": [100, 4]},
        {"op": "blocks", "first": 4, "after": 1, "runs": [500, 3, 90, 2]},
    ]
    assert (tmp_path / f"b{suffix}") in list(tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2
    assert (format_of(source), format_of(target)) == ("claude-code", "kvterrace")


def test_mooncake_and_back_is_the_same(tmp_path: Path) -> None:
    rng = random.Random(3)
    names: dict[int, int] = {}
    rows = []
    for number, ids in enumerate(conversations(9, 80)):
        rows.append(
            {
                "timestamp": number * 37,
                "input_length": 512 * len(ids) - rng.randrange(512),
                "output_length": rng.randrange(900),
                "hash_ids": [names.setdefault(one, len(names)) for one in ids],
            }
        )
    source = write_lines(tmp_path / "a.jsonl", rows)
    assert main(["trace", "convert", str(source), str(tmp_path / "b.gz")]) == 0
    assert format_of(tmp_path / "b.gz") == "kvterrace"
    assert main(["trace", "convert", str(tmp_path / "b.gz"), str(tmp_path / "c.jsonl")]) == 0
    assert [json.loads(one) for one in (tmp_path / "c.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize("block_tokens", [16, 32, 512])
def test_converted_blocks_are_as_long_as_the_prompts_say(tmp_path: Path, block_tokens: int) -> None:
    """A trace of small blocks that went to Mooncake's format and back is replayed with blocks of their own size."""
    rows = [
        {"timestamp": at, "input_length": block_tokens * count - at, "hash_ids": list(range(count))}
        for at, count in enumerate([3, 9, 5])
    ]
    source = write_lines(tmp_path / "a.jsonl", rows)
    assert main(["trace", "convert", str(source), str(tmp_path / "b.gz")]) == 0
    trace = load_trace(tmp_path / "b.gz")
    assert (trace.block_tokens, trace.tokens.tolist()) == (block_tokens, [row["input_length"] for row in rows])
    assert len(trace.ids) == 3 + 9 + 5


def test_blocks_that_hold_more_than_the_prompt_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"timestamp": 0, "input_length": 96, "hash_ids": [1, 2, 3]}])
    target = str(tmp_path / "b.gz")
    assert main(["trace", "convert", str(source), target, "--block-tokens", "512"]) == 0
    assert main(["replay", target]) == 2
    assert "3 blocks of 512 tokens are more than its 96 tokens" in capsys.readouterr().err
    uneven = [{"timestamp": 0, "input_length": one, "hash_ids": [1, 2, 3]} for one in (96, 1536)]
    assert main(["trace", "convert", str(write_lines(source, uneven)), target]) == 2
    assert "or say --block-tokens" in capsys.readouterr().err


def test_a_pipe_or_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`convert IN /dev/null`, as root, once put a file in the place of the device."""
    source, pipe = write_lines(tmp_path / "a.jsonl", AGENT), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert convert_trace(source, pipe, "kvterrace") == 3
        assert os.read(reader, 1 << 16).startswith(b'{"kvterrace_trace":1')
    finally:
        os.close(reader)
    assert pipe.is_fifo() and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match="cannot write"):
        convert_trace(source, tmp_path, "kvterrace")
    assert tmp_path.is_dir()


def test_wide_ids_are_numbered_anew_for_mooncake(tmp_path: Path) -> None:
    wide = [2**62 + 5, 3, 2**61]
    source = write_lines(
        tmp_path / "a.jsonl", [{"timestamp": 5, "hash_runs": [wide[0], 1, wide[1], 1, wide[2], 1]}] * 2
    )
    assert main(["trace", "convert", str(source), str(tmp_path / "b.jsonl"), "--to", "mooncake"]) == 0
    rows = [json.loads(one) for one in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [row["hash_ids"] for row in rows] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"timestamp": 1, "hash_ids": [1, 2]}, {"timestamp": 2, "hash_ids": [2]}], "request 2"),
        ([{"timestamp": 1, "hash_ids": [1, 2]}, {"timestamp": 2}], "line 2"),
        ([{"prompt": "x"}], "line 1"),
    ],
)
def test_what_is_no_trace_is_named_and_nothing_is_written(
    tmp_path: Path, rows: list[dict[str, Any]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", rows)
    assert main(["trace", "convert", str(source), str(tmp_path / "b.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
    assert main(["trace", "convert", str(source), str(tmp_path / "no" / "b.jsonl"), "--to", "mooncake"]) == 2
    with pytest.raises(ConfigError, match="No such file"):
        format_of(tmp_path / "none")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", AGENT)
    assert main(["trace", "info", str(source), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "schema": "kvterrace.trace-info/1",
        "path": str(source),
        "format": "claude-code",
        "requests": 3,
        "sessions": 2,
        "accesses": 11,
        "different": 9,
        "duration_s": pytest.approx(1.001),
        "hit_ratio": 2 / 11,
        "once": 7 / 9,
        "reuse_distance": {"p50": 3, "p90": 3, "p99": 3},
        "input_tokens": (300 + 450 + 12) / 3,
        "output_tokens": (113 + 1) / 2,
        "longest": 7,
    }
    assert main(["trace", "info", str(source), "--coarsen", "2"]) == 0
    shown = capsys.readouterr().out
    assert "different blocks" in shown and "│ 4 │" in " ".join(shown.split())
    assert main(["trace", "convert", str(source), str(tmp_path / "b"), "--block-tokens", "16"]) == 0
    assert '"block_tokens":16' in (tmp_path / "b").read_text()
    assert main(["trace", "convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "kvterrace"]) == 2
    assert main(["trace", "info", str(tmp_path)]) == 2
    assert "holds no trace" in capsys.readouterr().err
