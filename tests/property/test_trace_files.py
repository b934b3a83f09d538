"""What is written to a trace comes back, wherever it was cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvterrace.sim.converting import write_trace
from kvterrace.sim.traces import TraceRequest, read_trace
from kvterrace.tracing.files import pack


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests whose ids stand for prefixes: paths from the root of a growing tree, ids anything."""
    ids = st.integers(-(2**63), 2**63 - 1)
    used: set[int] = set()
    paths: list[list[int]] = [[]]
    found = []
    at_ms = 0
    for _ in range(draw(st.integers(0, 12))):
        base = draw(st.sampled_from(paths))
        path = base[: draw(st.integers(0, len(base)))]
        for _ in range(draw(st.integers(0, 4))):
            # often the one behind the last, as ids of real traces are
            one = path[-1] + 1 if path and path[-1] < 2**63 - 1 and draw(st.booleans()) else draw(ids)
            if one not in used:
                used.add(one)
                path.append(one)
        paths.append(path)
        at_ms += draw(st.integers(0, 10**6))
        found.append(
            TraceRequest(
                at_ms / 1e3,
                np.array(path, np.int64),
                draw(st.integers(-1, 2**40)),
                draw(st.integers(0, 2**40)),
                draw(st.integers(0, 2**40)),
                draw(st.sampled_from(["", "tool_use", "end_turn"])),
                draw(st.integers(0, 10**6)) / 1e3,
                draw(st.booleans()),
            )
        )
    return found


def fields(request: TraceRequest) -> tuple[object, ...]:
    names = ("at_s", "session", "output_tokens", "stop", "api_s", "closed")
    return request.ids.tolist(), *(getattr(request, name) for name in names)


@settings(max_examples=150, deadline=None)
@given(requests=traces(), data=st.data())
def test_a_trace_comes_back_and_a_cut_one_in_part(requests: list[TraceRequest], data: st.DataObject) -> None:
    lines = [text for _, text in write_trace(requests, 16, origin="test")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl.gz"
        packed = [pack(text) for text in lines]
        path.write_bytes(b"".join(packed))
        whole = list(read_trace(path))
        assert [fields(one) for one in whole] == [fields(one) for one in requests]
        for one, wanted in zip(whole, requests, strict=True):
            assert one.input_tokens == (wanted.input_tokens or 16 * len(wanted.ids))
        # any cut behind the header's member: requests before it are there, and nothing else
        everything = b"".join(packed)
        cut = data.draw(st.integers(len(packed[0]), len(everything)))
        path.write_bytes(everything[:cut])
        part = list(read_trace(path))
        assert [fields(one) for one in part] == [fields(one) for one in requests[: len(part)]]
        if cut == len(everything):
            assert len(part) == len(requests)


def test_runs_do_not_go_round() -> None:
    most, least = 2**63 - 1, -(2**63)
    request = TraceRequest(0.0, np.array([most - 1, most, least, least + 1], np.int64))
    lines = b"".join(text for _, text in write_trace([request], 16, origin="test"))
    assert f'"runs":[{most - 1},2,{least},2]'.encode() in lines
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(lines)
        assert [one.ids.tolist() for one in read_trace(path)] == [request.ids.tolist()]
