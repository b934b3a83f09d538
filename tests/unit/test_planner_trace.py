"""Reuse by capacity, from traces: against brute force and published counts."""

from __future__ import annotations

import gzip
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
    profile = profile_trace(lambda: requests, "made")
    ours = profile.hit_share(capacity * profile.block_tokens) * profile.blocks
    assert round(ours) == lru_hits(requests, capacity)


def test_a_small_trace_by_hand() -> None:
    profile = profile_trace(lambda: [asked(0, 1, 2), asked(10, 1, 3), asked(40, 1, 2)], "made")
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
    exact = profile_trace(lambda: requests, "made")
    part = profile_trace(lambda: requests, "made", sampled_accesses=12_000)
    assert part.sampled == pytest.approx(0.1)
    for blocks in (400, 2000, 6000):
        assert part.hit_share(16 * blocks) == pytest.approx(exact.hit_share(16 * blocks), abs=0.06)


def test_traces_that_say_nothing() -> None:
    with pytest.raises(ConfigError, match="no request"):
        profile_trace(list, "empty")
    with pytest.raises(ConfigError, match="input_length"):
        profile_trace(lambda: [Asked(0.0, np.array([1, 2], np.int64))], "no lengths")
    once = profile_trace(lambda: [asked(0, 1), asked(1, 2)], "once")
    assert once.reuse == 0
    assert once.hit_share(1e9) == 0
    with pytest.raises(ConfigError, match="asked for twice"):
        once.split()


@pytest.mark.parametrize(("whole", "tokens"), [(True, 512 * 20 - 100), (False, 512 * 20 + 100)])
def test_blocks_that_are_not_full_do_not_change_their_size(whole: bool, tokens: int) -> None:
    """The last block of a prompt may be there and not full, or not be there."""
    requests = [Asked(turn, np.arange(20), tokens + 7 * turn % 90, 5) for turn in range(40)]
    requests.append(Asked(41, np.arange(1), 512 - 500 if whole else 512 + 500, 5))
    assert profile_trace(lambda: requests, "made").block_tokens == pytest.approx(512, rel=0.02)


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": Infinity, "hash_ids": [1], "input_length": 9}',
        '{"timestamp": NaN, "hash_ids": [1], "input_length": 9}',
        '{"timestamp": 1, "hash_ids": [1], "input_length": Infinity}',
        '{"timestamp": 1, "hash_ids": [1], "input_length": -9}',
        '{"timestamp": 1, "hash_ids": [1], "input_length": 9, "output_length": -9}',
        '{"timestamp": 1, "hash_ids": [1], "input_length": 99999999999}',
        '{"timestamp": 1, "hash_ids": [[1]], "input_length": 9}',
        '{"timestamp": 1, "hash_ids": [1e400], "input_length": 9}',
        '{"timestamp": 1, "hash_ids": [99999999999999999999], "input_length": 9}',
        '{"timestamp": 1, "hash_ids": [], "input_length": 9}',
        '{"timestamp": 1, "hash_runs": [1], "input_length": 9}',
        '{"timestamp": 1, "hash_runs": [1, -1], "input_length": 9}',
        '{"timestamp": 1}',
        "[]",
        "7",
        '"x"',
        "[" * 100_000,
        "\x00\udcff",
    ],
)
def test_lines_that_are_no_request_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ConfigError) as refused:
        profile_trace(lambda: read_trace(path), str(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(b'{"timestamp": 1, "hash_ids": [1], "input_length": 9}\n' * 1000)
    for cut in (whole[: len(whole) // 2], whole[:20] + b"\xff" * 20 + whole[40:], b"no archive"):
        path.write_bytes(cut)
        with pytest.raises(ConfigError, match=r"trace\.jsonl\.gz"):
            profile_trace(lambda: read_trace(path), str(path))


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
    path = Path(os.environ["KVTERRACE_TRACES"]) / f"{name}.jsonl.gz"
    profile = profile_trace(lambda: read_trace(path), name)
    assert round(profile.hit_share(capacity * profile.block_tokens) * profile.blocks) == hits
