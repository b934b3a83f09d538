"""What holds of the default policy's directories whatever they are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

#: Paths in a tree of blocks: block n hangs on n // 3, so each key has one chain.
nodes = st.integers(3, 400)
times = st.one_of(st.floats(0, 5000), st.floats(allow_nan=False, allow_infinity=False))
events = st.lists(
    st.one_of(
        st.tuples(st.just("request"), nodes, times, st.integers(-1, 2**31 - 1), st.booleans()),
        st.tuples(
            st.just("hint"), nodes, times, st.sampled_from(["closed", "one_off", "returns", "shared", "priority"])
        ),
        st.tuples(st.just("evict"), st.integers(0, 60)),
        st.tuples(st.just("resize"), st.integers(0, 60)),
    ),
    max_size=60,
)
policies = st.sampled_from([native.IndexDirectory, native.ReturnIndex])


def chain_of(node: int) -> list[int]:
    return [*chain_of(node // 3), node] if node >= 3 else [node]


def keys_of(keys: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


ALL = list(range(401))


def inside(directory: Any) -> set[int]:
    return {key for key, there in zip(ALL, directory.inside(keys_of(ALL)), strict=True) if there}


def tell(directory: Any, event: tuple[Any, ...]) -> list[int]:
    """What it says has left."""
    match event:
        case "request", node, now_s, output_tokens, extend:
            directory.request(keys_of(chain_of(node)), now_s, output_tokens=output_tokens, extend=extend)
        case "hint", node, seconds, kind:
            directory.hint(node, kind, abs(seconds), seconds)
        case "evict", n:
            return list(directory.evict(n).tolist())
        case "resize", n:
            directory.resize(n)
    return list(directory.take_evicted().tolist())


@given(policies, st.integers(0, 40), events)
def test_what_came_and_did_not_leave_is_inside_and_fits(
    policy: Any, capacity: int, told: list[tuple[Any, ...]]
) -> None:
    directory, there = policy(capacity, 7), set[int]()
    for event in told:
        before = len(there)
        gone = tell(directory, event)
        if event[0] == "request":
            there |= set(chain_of(event[1]))
        if event[0] == "resize":
            capacity = event[1]
        if event[0] == "evict":
            assert len(gone) == min(event[1], before)
        assert len(set(gone)) == len(gone)
        assert set(gone) <= there
        there -= set(gone)
        assert inside(directory) == there
        assert len(directory) == len(there) <= capacity


@given(st.integers(0, 40), events)
def test_prefixes_stay_whole(capacity: int, told: list[tuple[Any, ...]]) -> None:
    directory = native.IndexDirectory(capacity, 7)
    for event in told:
        tell(directory, event)
        there = inside(directory)
        assert all(set(chain_of(key)) <= there for key in there)


@given(policies, st.integers(0, 40), events)
def test_the_same_calls_give_the_same_decisions(policy: Any, capacity: int, told: list[tuple[Any, ...]]) -> None:
    one, two = policy(capacity, 7), policy(capacity, 7)
    assert [tell(one, event) for event in told] == [tell(two, event) for event in told]


@given(policies, st.integers(0, 12), st.lists(st.tuples(st.lists(st.integers(0, 15), max_size=20), times), max_size=40))
def test_keys_in_any_order_and_more_than_once_do_no_harm(
    policy: Any, capacity: int, told: list[tuple[list[int], float]]
) -> None:
    directory, there = policy(capacity, 7), set[int]()
    for keys, now_s in told:
        directory.request(keys_of(keys), now_s)
        there = (there | set(keys)) - set(directory.take_evicted().tolist())
        assert inside(directory) <= there
        assert len(inside(directory)) == len(directory) <= capacity
        directory.forget(keys_of(keys[:2]))
        assert not inside(directory) & set(keys[:2])


@pytest.mark.parametrize("policy", [native.IndexDirectory, native.ReturnIndex])
def test_what_makes_no_sense_is_refused_and_changes_nothing(policy: Any) -> None:
    directory, twin = policy(3, 7), policy(3, 7)
    for one in (directory, twin):
        one.request(keys_of([1, 2, 3]), 5.0)
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="now_s must be a finite time"):
            directory.request(keys_of([9]), bad)
        with pytest.raises(ValueError, match="must be finite"):
            directory.hint(3, "closed", 0.0, bad)
        with pytest.raises(ValueError, match="must be finite"):
            directory.hint(3, "returns", bad, 6.0)
    with pytest.raises(ValueError, match="at least 0"):
        directory.hint(3, "returns", -1.0, 6.0)
    with pytest.raises(ValueError, match="not 'open'"):
        directory.hint(3, "open", 1.0, 6.0)
    for bad in (float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError, match="depth_worth"):
            policy(3, 7, bad)
    for at in range(20):
        for one in (directory, twin):
            one.request(keys_of([at, at + 1]), 6.0 + at)
        assert directory.take_evicted().tolist() == twin.take_evicted().tolist()


def test_ghosts_and_with_them_memory_are_bounded() -> None:
    """131,072 ghosts at this capacity, 32 B each and their place in the table, in vectors that may be half full."""
    directory = native.IndexDirectory(100, 7)
    sizes = []
    for start in range(0, 600_000, 1000):
        directory.request(np.arange(start, start + 1000, dtype=np.uint64), start / 1000.0)
        directory.take_evicted()
        sizes.append(directory.nbytes)
    assert sizes[-1] == sizes[len(sizes) // 2]
    assert sizes[-1] < 131_072 * (2 * 32 + 2 * 12) + 2_000_000
