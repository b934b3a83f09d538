"""Reference policies on real traces, against counts and ratios that others published with the traces."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from kvterrace.io.probe import why_not_native
from kvterrace.sim.columns import TraceColumns, load_trace
from kvterrace.sim.replay import replay

TRACES = os.environ.get("KVTERRACE_TRACES")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(TRACES is None, reason="KVTERRACE_TRACES names no folder of traces"),
    pytest.mark.skipif(why_not_native() is not None, reason="the extension module is not there"),
]

# "Reference counts" in the README of the traces: trace, share in %, capacity, then blocks hit.
COUNTED = ("fifo-head", "lru-head", "lru-tail", "belady")
COUNTS = """
    mooncake-conversation 1 1827 14559 15080 15136 71078
    mooncake-conversation 5 9139 50510 56382 56479 105710
    mooncake-conversation 10 18279 71579 80323 80466 105710
    mooncake-conversation 20 36558 90393 99403 99632 105710
    mooncake-synthetic 1 439 4400 4184 4644 22600
    mooncake-synthetic 5 2196 18429 18861 19087 48215
    mooncake-synthetic 10 4392 30055 31668 31973 61707
    mooncake-synthetic 20 8784 45120 47597 47907 74100
    claude-code-a 1 5535 4491262 4764414 5079372 9796214
    claude-code-a 5 27676 12854632 13755484 13771461 14166498
    claude-code-a 10 55353 13711202 14206266 14209827 14340860
    claude-code-a 20 110707 14134573 14321752 14321821 14340860
"""

# "Hit ratios by policy" there: trace, share in %, then % of block accesses. `density` is none of ours.
RATED = ("fifo", "lru-head", "lru-tail", "lfu", "2q", "arc", "s3-fifo", "sieve", "w-tinylfu", "density", "belady")
RATIOS = """
    mooncake-conversation 1 5.1 5.2 5.2 5.8 6.8 6.5 7.5 5.8 9.0 10.1 24.6
    mooncake-conversation 2 7.7 7.9 7.9 8.3 8.6 9.0 10.7 8.3 11.0 14.4 31.4
    mooncake-conversation 5 17.6 19.5 19.6 12.8 17.6 21.0 18.7 12.8 15.4 22.0 36.6
    mooncake-conversation 10 24.8 27.8 27.9 19.5 25.0 28.4 24.5 19.5 20.3 28.7 36.6
    mooncake-conversation 20 31.3 34.5 34.5 30.7 31.9 32.0 32.8 30.7 27.2 34.5 36.6
    mooncake-conversation 50 35.6 36.3 36.3 36.3 35.6 36.3 36.2 36.3 34.3 36.3 36.6
    mooncake-synthetic 1 4.0 3.4 3.8 1.2 3.8 4.2 3.8 1.9 3.2 4.6 18.5
    mooncake-synthetic 2 7.4 7.6 7.8 3.6 7.2 8.2 7.6 3.6 5.2 8.1 26.1
    mooncake-synthetic 5 15.2 15.5 15.7 10.6 15.4 16.3 15.4 10.6 12.9 16.5 39.6
    mooncake-synthetic 10 24.8 26.0 26.2 17.7 25.7 26.6 26.1 17.7 20.9 25.7 50.6
    mooncake-synthetic 20 37.1 39.1 39.3 33.0 38.7 40.6 38.3 33.0 34.7 39.6 60.8
    mooncake-synthetic 50 55.0 58.9 58.9 60.3 55.1 60.3 57.5 60.3 57.1 59.1 64.0
    claude-code-a 1 32.1 32.0 34.1 1.6 42.0 44.0 44.2 1.6 37.8 44.9 65.8
    claude-code-a 2 62.1 65.4 67.6 2.9 65.0 68.3 64.2 2.9 55.5 68.7 83.8
    claude-code-a 5 86.9 92.4 92.5 6.2 87.6 91.2 89.1 6.2 82.4 92.4 95.1
    claude-code-a 10 92.1 95.4 95.4 12.5 91.8 95.2 94.6 12.5 91.4 95.3 96.3
    claude-code-a 20 94.9 96.2 96.2 22.3 94.7 96.1 95.9 22.3 94.9 96.2 96.3
    claude-code-a 50 96.2 96.3 96.3 52.2 96.2 96.2 96.2 52.2 96.3 96.3 96.3
"""


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


@functools.cache
def trace(name: str) -> TraceColumns:
    assert TRACES is not None
    return load_trace(Path(TRACES) / f"{name}.jsonl.gz")


@pytest.mark.parametrize("row", rows(COUNTS), ids=lambda row: f"{row[0]}-{row[1]}%")
def test_counts_to_the_block(row: list[str]) -> None:
    name, share, capacity, *counts = row
    assert int(share) * trace(name).distinct // 100 == int(capacity)
    found = {policy: replay(trace(name), policy, int(capacity)).hits for policy in COUNTED}
    assert found == dict(zip(COUNTED, map(int, counts), strict=True))


@pytest.mark.parametrize("row", rows(RATIOS), ids=lambda row: f"{row[0]}-{row[1]}%")
def test_ratios_as_far_as_they_were_rounded(row: list[str]) -> None:
    name, share, *ratios = row
    expected = dict(zip(RATED, map(float, ratios), strict=True))
    del expected["density"]
    capacity = int(share) * trace(name).distinct // 100
    found = {policy: 100 * replay(trace(name), policy, capacity).hit_ratio for policy in expected}
    assert found == pytest.approx(expected, abs=0.06, rel=0)


@pytest.mark.parametrize(
    ("name", "requests", "accesses", "distinct", "tokens_mean"),
    [  # "Stats" there
        ("mooncake-conversation", 12_031, 288_500, 182_790, 12_035),
        ("mooncake-synthetic", 3_993, 121_877, 43_924, 15_325),
        ("claude-code-a", 31_075, 14_894_398, 553_538, 122_830),
    ],
)
def test_the_traces_are_read_as_they_are_described(
    name: str, requests: int, accesses: int, distinct: int, tokens_mean: int
) -> None:
    one = trace(name)
    assert (len(one), len(one.ids), one.distinct) == (requests, accesses, distinct)
    assert round(float(one.tokens.mean())) == tokens_mean
