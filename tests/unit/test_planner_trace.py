"""Reuse by capacity, from traces: against brute force and published counts."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvterrace.errors import ConfigError
from kvterrace.planner.trace import profile_trace
from kvterrace.sim.traces import read_trace


@dataclass(frozen=True)
class Asked:
    at_s: float
    ids: npt.NDArray[np.int64] = field(repr=False)
    input_tokens: int = 0
    output_tokens: int = 0


def asked(at_s: float, *ids: int, block: int = 16) -> Asked:
    return Asked(at_s, np.array(ids, np.int64), block * len(ids), 5)


def lru_hits(requests: list[Asked], capacity: int) -> int:
    """By brute force: look the resident prefix up, then touch all blocks tail first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.ids.tolist():
            if block not in kept:
                break
            hits += 1
        for block in reversed(request.ids.tolist()):
            kept.pop(block, None)
            kept[block] = None
            while len(kept) > capacity:
                kept.popitem(last=False)
    return hits


def conversations(seed: int) -> list[Asked]:
    """Sessions that grow by some blocks with each turn, interleaved; all share their first block."""
    rng = random.Random(seed)
    chains: dict[int, list[int]] = {}
    requests, fresh = [], 1
    for turn in range(200):
        session = rng.randrange(12)
        chain = chains.setdefault(session, [0])
        for _ in range(rng.randrange(1, 4)):
            chain.append(fresh)
            fresh += 1
        requests.append(asked(float(turn), *chain))
        if rng.random() < 0.1:
            del chains[session]
    return requests


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [1, 2, 5, 17, 60, 10_000])
def test_hits_are_those_of_an_lru_cache(seed: int, capacity: int) -> None:
    requests = conversations(seed)
    profile = profile_trace(requests, "made")
    ours = profile.hit_share(capacity * profile.block_tokens) * profile.blocks
    assert round(ours) == lru_hits(requests, capacity)


def test_a_small_trace_by_hand() -> None:
    profile = profile_trace([asked(0, 1, 2), asked(10, 1, 3), asked(40, 1, 2)], "made")
    assert (profile.requests, profile.blocks, profile.distinct_blocks, profile.block_tokens) == (3, 6, 3, 16)
    # Seen before: 1 at once, then 1 and 2. The stack, most recent first, before each: (1 2), (1 3 2).
    assert profile.reuse == pytest.approx(3 / 6)
    assert profile.distances.tolist() == [0, 0, 2]
    assert profile.hit_share(16) == pytest.approx(2 / 6)
    assert profile.hit_share(48) == pytest.approx(3 / 6)
    assert (profile.return_p50_s, profile.duration_s) == (30.0, 40.0)  # 10, 30 and 40 s
    assert profile.tokens_for(0.5) == 16
    assert profile.tokens_for(0.99) == 48
    assert profile.split() == pytest.approx({"hbm": 1 / 3, "dram": 2 / 3, "ssd": 0.0})


def test_sampled_distances_are_close_to_all_of_them() -> None:
    rng = random.Random(7)
    # 300 chains of 40 blocks; some are asked for much more often than others.
    requests = [
        asked(turn, *range(1000 * (one := int(300 * rng.random() ** 3)), 1000 * one + 40)) for turn in range(3000)
    ]
    exact = profile_trace(requests, "made")
    part = profile_trace(requests, "made", sampled_accesses=12_000)
    assert part.sampled == pytest.approx(0.1)
    for blocks in (400, 2000, 6000):
        assert part.hit_share(16 * blocks) == pytest.approx(exact.hit_share(16 * blocks), abs=0.06)


def test_traces_that_say_nothing() -> None:
    with pytest.raises(ConfigError, match="no request"):
        profile_trace([], "empty")
    with pytest.raises(ConfigError, match="input_length"):
        profile_trace([Asked(0.0, np.array([1, 2], np.int64))], "no lengths")
    once = profile_trace([asked(0, 1), asked(1, 2)], "once")
    assert once.reuse == 0
    assert once.hit_share(1e9) == 0
    with pytest.raises(ConfigError, match="asked for twice"):
        once.split()


@pytest.mark.skipif("KVTERRACE_TRACES" not in os.environ, reason="KVTERRACE_TRACES names no folder with traces")
@pytest.mark.parametrize(
    ("name", "capacity", "hits"),
    [  # published: LRU, tail first, from an empty cache
        ("mooncake-conversation", 1827, 15_136),
        ("mooncake-conversation", 9139, 56_479),
        ("mooncake-conversation", 36_558, 99_632),
        ("mooncake-synthetic", 439, 4644),
        ("mooncake-synthetic", 8784, 47_907),
    ],
)
def test_published_hits_to_the_block(name: str, capacity: int, hits: int) -> None:
    requests = read_trace(Path(os.environ["KVTERRACE_TRACES"]) / f"{name}.jsonl.gz")
    profile = profile_trace(requests, name)
    assert round(profile.hit_share(capacity * profile.block_tokens) * profile.blocks) == hits
