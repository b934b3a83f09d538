"""One transfer: which word counts, and who may touch the caller's memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.types import Busy, Expired, Hit, Miss, Pending, Tier

HIT = Hit(Tier.DRAM)


def transfer(start: int = 0, stop: int = 3) -> Transfer:
    buffers: Any = object()
    return Transfer(TransferKind.GET, None, start, stop, buffers=buffers, submitted_s=0.0, deadline_s=None)


def test_a_new_transfer_is_pending() -> None:
    one = transfer(2, 5)
    assert (one.total_blocks, one.done_blocks, one.done) == (3, 0, False)
    assert one.outcomes == [Pending()] * 3
    assert all(one.is_open(index) for index in (2, 3, 4))


def test_an_empty_transfer_is_done() -> None:
    assert transfer(4, 4).done
    assert transfer(4, 4).outcomes == []


def test_the_first_word_counts() -> None:
    one = transfer(2, 5)
    one.settle(3, HIT)
    one.settle(3, Miss())
    assert one.outcomes == [Pending(), HIT, Pending()]
    assert not one.is_open(3)
    assert one.done_blocks == 1


def test_buffers_are_let_go_of_with_the_last_block() -> None:
    one = transfer()
    for index in range(3):
        assert one.buffers is not None and not one.done
        one.settle(index, HIT)
    assert one.buffers is None and one.done


def test_giving_up_settles_what_is_open_and_waits_for_copies() -> None:
    one = transfer()
    one.settle(0, HIT)
    assert one.begin_copy(1)
    one.give_up()
    assert one.outcomes == [HIT, Pending(), Expired()]
    assert one.done_blocks == 2 and one.buffers is not None  # block 1 is being copied
    assert one.is_open(1)
    with pytest.raises(RuntimeError, match="while it is copied"):
        one.settle(1, HIT)
    one.end_copy(1)
    one.give_up(Busy())  # what was copied has its outcome on the way
    assert one.is_open(1)
    one.settle(1, HIT)
    assert one.done_blocks == 3
    assert one.outcomes == [HIT, HIT, Expired()]


def test_a_block_is_copied_by_one_and_never_after_its_outcome() -> None:
    one = transfer()
    assert one.begin_copy(0)
    assert not one.begin_copy(0)
    one.settle(1, Miss())
    assert not one.begin_copy(1)
    one.give_up(Busy())
    assert not one.begin_copy(2)


@pytest.mark.parametrize("seed", range(3))
def test_copies_and_expiry_from_many_threads_agree(seed: int) -> None:
    """A block is either copied and hit, or expired and never copied."""
    blocks = 2000
    one = transfer(0, blocks)
    copied: list[list[int]] = [[] for _ in range(4)]
    start = threading.Barrier(5)

    def copy(mine: list[int]) -> None:
        start.wait()
        for index in range(blocks):
            if one.begin_copy(index):
                mine.append(index)
                one.end_copy(index)
                one.settle(index, HIT)

    def expire() -> None:
        start.wait()
        for _ in range(200 * seed):
            one.is_open(0)
        one.give_up()

    threads = [threading.Thread(target=copy, args=(mine,)) for mine in copied] + [threading.Thread(target=expire)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(index for mine in copied for index in mine)
    assert len(set(every)) == len(every)
    assert one.done
    assert [index for index, outcome in enumerate(one.outcomes) if outcome == HIT] == every
    assert all(outcome in (HIT, Expired()) for outcome in one.outcomes)
