"""Hints in a replay: what is said when, and that it is of use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvterrace.errors import ConfigError
from kvterrace.io.probe import why_not_native
from kvterrace.sim.columns import TraceColumns, load_trace
from kvterrace.sim.hinted import Said, said_in
from kvterrace.sim.replay import replay
from kvterrace.types import Hint


def trace_of(tmp_path: Path, rows: list[dict[str, Any]]) -> TraceColumns:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(path)


def row(at_ms: int, session: int, stop: str | None, first: int, blocks: int, api_ms: int = 500) -> dict[str, Any]:
    """Blocks of 256 tokens: four of the trace's each."""
    return {
        "timestamp": at_ms,
        "session": session,
        "stop": stop,
        "api_ms": api_ms,
        "input_length": 256 * blocks,
        "output_length": 9,
        "hash_runs": [first, 4 * blocks],
    }


def test_what_is_said_when(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            row(0, 1, "tool_use", 0, 1, api_ms=4000),
            row(1000, 2, "end_turn", 100, 1, api_ms=500),
            row(2000, 2, None, 100, 1),
            row(3000, 2, "end_turn", 100, 1),
            row(9000, 1, "tool_use", 0, 1),
        ],
    )
    assert said_in(trace) == [
        Said(1.5, 2, Hint.RETURNS, 186.0),
        Said(3.5, 2, Hint.CLOSED, None),
        Said(4.0, 1, Hint.RETURNS, 9.0),
        Said(9.5, 1, Hint.CLOSED, None),
    ]


def test_of_wrong_hints_so_many_are_wrong(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [row(at, at, "tool_use", 100 * at, 1) for at in range(1000)])
    wrong = [said for said in said_in(trace, wrong_share=0.3) if said.kind is not Hint.CLOSED]
    assert 250 < len(wrong) < 350
    assert {said.seconds for said in wrong} == {9.0, 186.0}


def test_a_trace_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 512, "hash_ids": [1]}) + "\n")
    with pytest.raises(ConfigError, match="nothing that a client could hint at"):
        said_in(load_trace(path))


def test_closed_sessions_make_room_for_those_that_return(tmp_path: Path) -> None:
    """Sixteen blocks of room. In each round four blocks come back after eight of a session that is over: without a hint
    the least recently used are those that come back.
    """
    rows, first = [], 10_000
    for at in range(0, 200_000, 2000):
        rows.append(row(at, 1, "tool_use", 0, 4))
        for late in (300, 600):
            rows.append(row(at + late, first, "end_turn", 4 * first, 8, api_ms=10))
            first += 100
    trace = trace_of(tmp_path, rows)
    plain = replay(trace, "lru", 16).dram_hits
    assert plain == 0
    assert replay(trace, "lru", 16, hints=said_in(trace)).dram_hits == 4 * 99


@pytest.mark.skipif(why_not_native() is not None, reason="the extension module is not there")
def test_reference_policies_take_no_hints(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [row(0, 1, "tool_use", 0, 1)])
    with pytest.raises(ConfigError, match="takes no hints"):
        replay(trace, "arc", 16, hints=said_in(trace))
