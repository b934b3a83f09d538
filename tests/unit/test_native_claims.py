"""Claims on a caller's memory: those of the native module, and their twin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.engine.claims import PythonClaims

BLOCKS = 4
New = Callable[[int], Any]


@pytest.fixture(params=["native", "python"])
def new(request: pytest.FixtureRequest) -> New:
    return PythonClaims if request.param == "python" else native_claims()


def native_claims() -> New:
    module: Any = pytest.importorskip("kvterrace._native", reason="the native module is not built")
    new: New = module.Claims
    return new


def test_a_block_is_copied_by_one_and_never_after_it_is_settled(new: New) -> None:
    claims = new(3)
    assert claims.begin_copy(0) and not claims.begin_copy(0)
    assert claims.settle(1) and not claims.begin_copy(1)
    assert claims.give_up() == [2]
    assert not claims.begin_copy(2)
    claims.end_copy(0)
    assert not claims.begin_copy(0)  # it was copied: once is enough
    assert claims.settle(0)


def test_a_block_is_not_settled_while_it_is_copied(new: New) -> None:
    claims = new(2)
    assert claims.begin_copy(1)
    with pytest.raises(RuntimeError, match="block 1 cannot be settled while it is copied"):
        claims.settle(1)
    assert claims.is_open(1)
    assert claims.give_up() == [0]
    assert claims.is_open(1)
    claims.end_copy(1)
    assert claims.is_open(1)
    assert claims.give_up() == []  # copied is not given up: its outcome is on the way
    assert claims.settle(1) and not claims.is_open(1)


def test_a_copy_that_came_to_nothing_leaves_its_block_open(new: New) -> None:
    claims = new(2)
    with pytest.raises(RuntimeError, match="no copy of block 0 is under way"):
        claims.abandon_copy(0)
    assert claims.begin_copy(0) and claims.begin_copy(1)
    claims.abandon_copy(0)
    claims.end_copy(1)
    with pytest.raises(RuntimeError, match="no copy of block 1 is under way"):
        claims.abandon_copy(1)
    assert claims.is_open(0) and claims.begin_copy(0)
    claims.abandon_copy(0)
    assert claims.give_up() == [0]
    assert not claims.begin_copy(0)


def test_the_first_word_counts(new: New) -> None:
    claims = new(1)
    assert claims.settle(0)
    assert not claims.settle(0)
    assert claims.give_up() == []


def test_an_end_without_a_copy_is_a_bug(new: New) -> None:
    claims = new(2)
    with pytest.raises(RuntimeError, match="no copy of block 1 is under way"):
        claims.end_copy(1)
    assert claims.begin_copy(1)  # and it changed nothing


@pytest.mark.parametrize("call", ["begin_copy", "end_copy", "settle", "is_open"])
def test_blocks_that_are_not_there(new: New, call: str) -> None:
    with pytest.raises(IndexError):
        getattr(new(4), call)(4)


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin_copy", "end_copy", "settle", "give_up"]), st.integers(0, BLOCKS - 1)),
        max_size=30,
    )
)
def test_both_say_the_same(steps: list[tuple[str, int]]) -> None:
    """Whatever is called in whatever order, errors included."""
    claims, twin = native_claims()(BLOCKS), PythonClaims(BLOCKS)
    for step, at in steps:
        assert answer(claims, step, at) == answer(twin, step, at)
        assert [claims.is_open(index) for index in range(BLOCKS)] == [twin.is_open(index) for index in range(BLOCKS)]


def answer(claims: Any, step: str, at: int) -> Any:
    try:
        return claims.give_up() if step == "give_up" else getattr(claims, step)(at)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(3))
def test_copies_and_expiry_from_many_threads_agree(new: New, seed: int) -> None:
    """A block is either copied by one thread, or given up by one; never both."""
    blocks = 2000
    claims = new(blocks)
    copied: list[list[int]] = [[] for _ in range(3)]
    given_up: list[list[int]] = [[] for _ in range(2)]
    start = threading.Barrier(5)

    def copy(mine: list[int]) -> None:
        start.wait()
        for index in range(seed, blocks):
            if claims.begin_copy(index):
                mine.append(index)
                claims.end_copy(index)

    def expire(mine: list[int]) -> None:
        start.wait()
        mine += claims.give_up()

    threads = [threading.Thread(target=copy, args=[mine]) for mine in copied]
    threads += [threading.Thread(target=expire, args=[mine]) for mine in given_up]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = sorted(index for mine in (*copied, *given_up) for index in mine)
    assert ends == list(range(blocks))
    settled = sorted(index for mine in given_up for index in mine)
    assert [index for index in range(blocks) if not claims.is_open(index)] == settled
