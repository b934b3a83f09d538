"""Claims on a caller's memory: the states of `Transfer`, without the GIL."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.types import Hit, Pending, Tier

native: Any = pytest.importorskip("kvterrace._native", reason="the native module is not built")

BLOCKS = 4


def test_a_block_is_copied_by_one_and_never_after_it_is_settled() -> None:
    claims = native.Claims(3)
    assert len(claims) == 3
    assert claims.begin_copy(0) and not claims.begin_copy(0)
    assert claims.settle(1) and not claims.begin_copy(1)
    assert claims.give_up() == [2]
    assert not claims.begin_copy(2)
    claims.end_copy(0)
    assert not claims.begin_copy(0)  # it was copied: once is enough
    assert claims.settle(0)


def test_a_block_is_not_settled_while_it_is_copied() -> None:
    claims = native.Claims(2)
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


def test_the_first_word_counts() -> None:
    claims = native.Claims(1)
    assert claims.settle(0)
    assert not claims.settle(0)
    assert claims.give_up() == []


def test_an_end_without_a_copy_is_a_bug() -> None:
    claims = native.Claims(2)
    with pytest.raises(RuntimeError, match="no copy of block 1 is under way"):
        claims.end_copy(1)
    assert claims.begin_copy(1)  # and it changed nothing


@pytest.mark.parametrize("call", ["begin_copy", "end_copy", "settle", "is_open"])
def test_blocks_that_are_not_there(call: str) -> None:
    with pytest.raises(IndexError, match="no block 4"):
        getattr(native.Claims(4), call)(4)


@given(st.lists(st.tuples(st.sampled_from(["begin", "settle", "give_up"]), st.integers(0, BLOCKS - 1)), max_size=30))
def test_a_transfer_says_the_same(steps: list[tuple[str, int]]) -> None:
    """Whoever copies a block ends that before it is settled, as a transfer asks."""
    claims, twin = (
        native.Claims(BLOCKS),
        Transfer(TransferKind.GET, None, 0, BLOCKS, buffers=None, submitted_s=0.0, deadline_s=None),
    )
    copying: set[int] = set()
    for step, at in steps:
        if step == "begin":
            won = claims.begin_copy(at)
            assert won == twin.begin_copy(at)
            copying |= {at} if won else set()
        elif step == "settle":
            if at in copying:
                copying.remove(at)
                claims.end_copy(at)
            assert claims.settle(at) == twin.is_open(at)
            twin.settle(at, Hit(Tier.DRAM))
        else:
            before = twin.outcomes
            twin.give_up()
            assert claims.give_up() == [
                index for index, was in enumerate(before) if was == Pending() and twin.outcomes[index] != Pending()
            ]
        assert [claims.is_open(index) for index in range(BLOCKS)] == [twin.is_open(index) for index in range(BLOCKS)]


@pytest.mark.parametrize("seed", range(3))
def test_copies_and_expiry_from_many_threads_agree(seed: int) -> None:
    """A block is either copied by one thread, or given up by one; never both."""
    blocks = 2000
    claims = native.Claims(blocks)
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
