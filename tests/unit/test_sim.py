"""The production ledger on traces, against counts that others published and against a cache of ten lines."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvterrace.errors import ConfigError
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.sim.traces import read_trace

TRACES = os.environ.get("KVTERRACE_TRACES")


def conversations(seed: int, requests: int) -> list[list[int]]:
    """Chats that go on and branch: each request is a path from the root of a growing tree of ids."""
    rng = random.Random(seed)
    paths: list[list[int]] = []
    fresh = iter(range(1, 10**9))
    for _ in range(requests):
        base = list(rng.choice(paths)) if paths and rng.random() < 0.7 else []
        keep = rng.randint(0, len(base))
        paths.append(base[:keep] + [next(fresh) for _ in range(rng.randint(1, 6))])
    return paths


def lru_tail_first(requests: list[list[int]], capacity: int) -> int:
    """Blocks hit: the rules of the published counts, over a plain OrderedDict."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        prefix = next((at for at, one in enumerate(ids) if one not in cache), len(ids))
        hits += prefix
        for one in reversed(ids):
            cache[one] = None
            cache.move_to_end(one)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [40, 150])
def test_dram_alone_is_lru_tail_first(seed: int, capacity: int) -> None:
    requests = conversations(seed, 400)
    assert max(map(len, requests)) < capacity
    ladder = LedgerLadder(capacity, 0)
    hits = sum(ladder.request(np.array(ids), float(at)) for at, ids in enumerate(requests))
    assert hits == lru_tail_first(requests, capacity)
    assert ladder.counts.dram_hits == hits
    assert ladder.counts.accesses == sum(map(len, requests))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(TRACES is None, reason="KVTERRACE_TRACES names no folder of traces")
@pytest.mark.parametrize(
    ("name", "capacity", "hits"),
    # traces/README.md, "Reference counts", LRU tail-first at 1 % and 5 % of the different blocks
    [("mooncake-synthetic", 439, 4644), ("mooncake-synthetic", 2196, 19087), ("mooncake-conversation", 1827, 15136)],
)
def test_the_ledger_gives_the_published_counts(name: str, capacity: int, hits: int) -> None:
    assert TRACES is not None
    ladder = LedgerLadder(capacity, 0)
    for request in read_trace(Path(TRACES) / f"{name}.jsonl.gz"):
        ladder.request(request.ids, request.at_s)
    assert ladder.counts.dram_hits == hits


def test_an_ssd_below_only_adds_hits_and_writes_little_twice() -> None:
    requests = conversations(7, 1500)
    alone, tiered = LedgerLadder(64, 0), LedgerLadder(64, 1024)
    for at, ids in enumerate(requests):
        alone.request(np.array(ids), at * 0.5)
        tiered.request(np.array(ids), at * 0.5)
    assert tiered.counts.dram_hits + tiered.counts.ssd_hits > alone.counts.dram_hits
    assert tiered.counts.reclaimed_segments > 0
    assert tiered.counts.write_amplification <= 1.3


def test_both_trace_formats_are_read(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(json.dumps({"timestamp": 1500, "hash_ids": [4, 5, 9]}) + "\n")
    with gzip.open(packed, "wt") as file:
        file.write(json.dumps({"timestamp": 250, "session": 3, "hash_runs": [10, 4, 70, 2]}) + "\n")
    (one,) = read_trace(plain)
    assert (one.at_s, one.ids.tolist(), one.session) == (1.5, [4, 5, 9], -1)
    (two,) = read_trace(packed)
    assert (two.at_s, two.ids.tolist(), two.session) == (0.25, [10, 11, 12, 13, 70, 71], 3)
    assert [request.ids.tolist() for request in read_trace(packed, coarsen=2)] == [[11, 13, 71]]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"timestamp": 1}', '{"timestamp": 1, "hash_runs": [1]}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 1, "hash_ids": []}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="missing"):
        list(read_trace(tmp_path / "missing"))
