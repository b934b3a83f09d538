"""Reference policies in native code, against models over dicts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy_models import MODELS, in_order, ladder

from kvterrace.io.probe import why_not_native

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason="the extension module is not there")

POLICIES = sorted(MODELS)
ONLINE = [name for name in POLICIES if name != "belady"]


def native() -> Any:
    import kvterrace._native

    return kvterrace._native


def turns(seed: int, requests: int, fresh: int = 6) -> list[list[int]]:
    """Paths from the roots of growing trees: chats that go on and branch, and one-off prompts. Ids from 0 on."""
    rng = random.Random(seed)
    paths: list[list[int]] = []
    ids = itertools.count()
    for _ in range(requests):
        base = rng.choice(paths[-30:]) if paths and rng.random() < 0.75 else []
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else list(base)
        paths.append(kept[:25] + list(itertools.islice(ids, rng.randint(0 if kept else 1, fresh))))
    return paths


def arrays(requests: list[list[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    flat = np.array([one for ids in requests for one in ids], np.uint32)
    return flat, np.array(list(itertools.accumulate(map(len, requests), initial=0)), np.uint64)


def replayed(
    requests: list[list[int]], policy: str, upper: int, lower: int, tokens: list[int], block: int, step: int = 10**9
) -> dict[str, Any]:
    flat, offsets = arrays(requests)
    distinct = int(flat.max()) + 1 if len(flat) else 0
    run = native().ReferenceReplay(flat, offsets, np.array(tokens, np.uint32), distinct, block, policy, upper, lower)
    left = len(requests)
    while left:
        left = run.run(step)
    found: dict[str, Any] = run.counts()
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("seed", "capacity"), [(0, 1), (1, 2), (2, 7), (3, 20), (4, 43), (5, 100), (6, 400)])
def test_one_tier_does_what_the_model_does(policy: str, seed: int, capacity: int) -> None:
    requests = turns(seed, 250)
    tokens = [max(0, 16 * len(ids) - seed) for ids in requests]
    expected = ladder(requests, policy, capacity, 0, tokens, 16)
    found = replayed(requests, policy, capacity, 0, tokens, 16)
    assert {name: count for name, count in found.items() if count} == {n: c for n, c in expected.items() if c}
    assert capacity == 1 or found["upper_hits"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("seed", "upper", "lower"), [(10, 1, 1), (11, 5, 20), (12, 12, 50), (13, 30, 10), (14, 20, 90)]
)
def test_two_tiers_do_what_the_model_does(policy: str, seed: int, upper: int, lower: int) -> None:
    requests = turns(seed, 250)
    tokens = [16 * len(ids) + 3 for ids in requests]
    expected = ladder(requests, policy, upper, lower, tokens, 16)
    found = replayed(requests, policy, upper, lower, tokens, 16, step=7)
    assert {name: count for name, count in found.items() if count} == {n: c for n, c in expected.items() if c}
    if lower >= 20:
        assert found["lower_hits"] > 0 and found["written"] > 0 and found["demoted"] > found["written"]


def test_w_tinylfu_counts_to_15() -> None:
    """Ten blocks: a window of two, eight behind it. 15 uses and 20 are the same to it: the one that is there stays."""
    directory = native().reference("w-tinylfu", 10)
    there, comes, others = 100, 200, range(9)
    for one in [there] * 15 + list(others) + [comes] * 20 + [300, 301]:
        directory.request(np.array([one], np.uint64), 0.0)
    # `others` 0 to 6 followed `there` out of the window; 7 and 8 were refused; then 300 and 301 pushed `comes` out.
    assert directory.inside(np.array([there, comes, 0, 6, 7, 8, 300, 301], np.uint64)).tolist() == [
        *(True, False, True, True),
        *(False, False, True, True),
    ]


@pytest.mark.parametrize("capacity", [3, 10, 40])
def test_nothing_beats_the_bound(capacity: int) -> None:
    requests = turns(99, 400)
    tokens = [len(ids) for ids in requests]
    hits = {name: replayed(requests, name, capacity, 0, tokens, 1)["upper_hits"] for name in POLICIES}
    assert max(hits, key=lambda name: hits[name]) == "belady"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_bound_is_the_best_of_all_choices(seed: int, capacity: int) -> None:
    """Every choice of what to keep after each request, tried out."""
    requests = turns(seed, 12, fresh=2)
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for ids in requests:
        after: dict[frozenset[int], int] = {}
        for inside, hits in states.items():
            got = next((at for at, one in enumerate(ids) if one not in inside), len(ids))
            for size in range(capacity + 1):
                for kept in itertools.combinations(sorted(inside | set(ids)), size):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, 0), hits + got)
        states = after
    tokens = [len(ids) for ids in requests]
    assert replayed(requests, "belady", capacity, 0, tokens, 1)["upper_hits"] == max(states.values()) > 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ONLINE),
    st.integers(1, 12),
    st.lists(
        st.one_of(
            st.tuples(st.just("request"), st.lists(st.integers(0, 40), max_size=8)),
            st.tuples(st.just("forget"), st.lists(st.integers(0, 40), max_size=3)),
            st.tuples(st.just("evict"), st.integers(0, 5)),
            st.tuples(st.just("resize"), st.integers(1, 15)),
        ),
        max_size=60,
    ),
)
def test_a_directory_accounts_for_every_key(policy: str, capacity: int, steps: list[tuple[str, Any]]) -> None:
    """What it tells of makes up what is inside, whatever is done to it; it never has more than it may."""
    directory = native().reference(policy, capacity)
    inside: set[int] = set()
    scale = 0x9E3779B97F4A7C15  # keys of all sizes, as the first bytes of hashes are

    def keys(ids: list[int]) -> Any:
        return np.array([one * scale % 2**64 for one in ids], np.uint64)

    everything = keys(list(range(41)))
    names = {int(key): one for one, key in enumerate(everything)}
    for what, value in steps:
        if what == "request":
            directory.request(keys(value), 1.0)
            inside |= set(value)
        elif what == "forget":
            directory.forget(keys(value))
            inside -= set(value)
        elif what == "evict":
            before = len(inside)
            gone = directory.evict(value)
            assert len(gone) == min(value, before)
            inside -= {names[int(key)] for key in gone}
        else:
            directory.resize(value)
            capacity = value
        left = [names[int(key)] for key in directory.take_evicted()]
        there = {one for one, yes in enumerate(directory.inside(everything)) if yes}
        # A key that left may have come back with a later block of the same request.
        assert there <= inside and inside - there <= set(left)
        inside = there
        assert len(directory) == len(there) <= capacity


@pytest.mark.parametrize("policy", ONLINE)
def test_a_directory_is_the_policy_of_the_replay(policy: str) -> None:
    """Keys may be any 64 bits; the order of use is the policy's own."""
    model, directory = MODELS[policy](15), native().reference(policy, 15)
    requests = turns(5, 200)
    spread = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64)
    for ids in requests:
        directory.request(spread[ids], 0.0)
        for one in in_order(policy, ids):
            model.access(one)
        assert {one for one, yes in enumerate(directory.inside(spread)) if yes} == model.inside()
    assert directory.nbytes > 15 * 8


def test_numbers_for_keys() -> None:
    rng = np.random.default_rng(3)
    pool = np.concatenate([rng.integers(0, 2**64, 500, np.uint64), np.arange(500, dtype=np.uint64) << np.uint64(40)])
    keys = rng.choice(pool, 20_000)
    ids, distinct = native().numbered(keys)
    numbers: dict[int, int] = {}
    expected = [numbers.setdefault(int(key), len(numbers)) for key in keys]
    assert (ids.tolist(), distinct) == (expected, len(numbers))


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "mru"},
        {"upper": 0},
        {"block_tokens": 0},
        {"distinct": 2},
        {"offsets": [0, 2]},
        {"offsets": [0, 2, 1, 3]},
        {"offsets": [1, 2, 2, 3]},
        {"offsets": [0, 2, 2, 4]},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    arguments = {
        "ids": [0, 1, 2],
        "offsets": [0, 2, 2, 3],
        "tokens": [2, 0, 1],
        "distinct": 3,
        "block_tokens": 1,
        "policy": "arc",
        "upper": 1,
        "lower": 0,
    } | change
    types = {"ids": np.uint32, "offsets": np.uint64, "tokens": np.uint32}
    for name, dtype in types.items():
        arguments[name] = np.array(arguments[name], dtype)
    with pytest.raises(ValueError, match=r"offset|id|policy|room"):
        native().ReferenceReplay(**arguments)


@pytest.mark.parametrize(("name", "capacity"), [("belady", 4), ("nonsense", 4), ("arc", 0)])
def test_no_directory_for_these(name: str, capacity: int) -> None:
    with pytest.raises(ValueError, match=r"foresight|room"):
        native().reference(name, capacity)
