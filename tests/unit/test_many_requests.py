"""More is asked for than there is room: what waits, what goes first, what stays (C17, C18, C21 of `docs/cases.md`)."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import all_hits, opened, stored
from tests.crash.kit import chain_of as real_chain_of
from tests.harness import LARGE, LARGE_NBYTES, SMALL, SMALL_NBYTES, Box, Get, chain_of, kinds

from kvterrace.engine.dram import AWAITED_S
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail, Hang, Slow
from kvterrace.keys import KeyChain
from kvterrace.types import Busy, Hit, Tier

IN_DRAM, ON_SSD = (Tier.DRAM,) * 4, (Tier.SSD,) * 4


def chains_on_the_drive(box: Box, count: int, blocks: int) -> list[KeyChain]:
    """Chains of `blocks` blocks each, on the drive alone."""
    chains = [chain_of(SMALL, [way] * blocks) for way in range(count)]
    for chain in chains:
        assert kinds(box.put_now(chain)) == ["Stored"] * blocks
    box.cool()
    box.reads.clear()
    return chains


# -- C17: a read behind the store's own writes -------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 2, 3, 4])
def test_a_get_goes_before_the_writes_that_wait(tmp_path: Path, parallel: int) -> None:
    """What the drive has begun ends; of what it has not, no write goes before the read."""
    box = Box(tmp_path / "store", dram_blocks=200, segments=40, parallel=parallel, batch_nbytes=SMALL_NBYTES)
    (wanted,) = chains_on_the_drive(box, 1, 4)
    for way in range(100, 120):
        assert kinds(box.put_now(chain_of(SMALL, [way] * 6))) == ["Stored"] * 6
    ended: list[IoKind] = []
    carry_out = box.device._carry_out

    def watched(active: Any) -> Any:
        if active.request.kind is not IoKind.CALL:
            ended.append(active.request.kind)
        return carry_out(active)

    box.device._carry_out = watched  # type: ignore[method-assign]
    box.faults.add(Slow(1.0), IoKind.WRITE)
    box.step(30.0)  # all of it is due
    for _ in range(1000):
        if writes_in_flight(box) >= 2:
            break
        box.step(1e-5)
    asked = writes_in_flight(box)
    begun = len(box.device._running)
    assert asked >= 2
    assert begun == min(asked, parallel)
    ended.clear()
    get = Get(box.store, wanted)
    box.wait(get.transfer)
    get.check()
    assert get.transfer.outcomes == [Hit(Tier.SSD)] * 4
    # those that had begun, if there was no other way for the read
    assert ended.index(IoKind.READ) <= (begun if begun == parallel else 0)
    box.faults.clear()
    box.rest()
    assert ended.count(IoKind.WRITE) > 20
    box.check()


def writes_in_flight(box: Box) -> int:
    waiting = [given.request for given in itertools.chain(*box.device._queues)]
    requests = [*(active.request for active in box.device._running), *waiting]
    return sum(request.kind is IoKind.WRITE for request in requests)


def test_a_get_is_answered_while_every_write_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on files."""
    monkeypatch.setenv("KVTERRACE_ENGINE", "posix")  # the native engines call no function that could be replaced
    wanted = real_chain_of(0, 8)
    with opened(tmp_path / "kv") as store:
        stored(store, wanted)
    go_on, begun, ended = threading.Event(), threading.Event(), threading.Event()
    pwritev = os.pwritev

    def hanging(*arguments: Any) -> int:
        begun.set()
        go_on.wait()
        ended.set()
        return pwritev(*arguments)

    with opened(tmp_path / "kv", write_behind_s=0.0) as store:
        monkeypatch.setattr(os, "pwritev", hanging)
        try:
            for conversation in range(1, 20):
                stored(store, real_chain_of(conversation, 8))
            assert begun.wait(60.0)
            assert set(store.match(wanted).tiers) == {Tier.SSD}
            all_hits(store, wanted)
            assert not ended.is_set()
        finally:
            go_on.set()
        assert store.flush(60.0)


# -- C18: more than DRAM holds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("requests", [1, 3])
def test_many_requests_for_more_than_dram_holds_read_each_block_once(
    tmp_path: Path, parallel: int, requests: int
) -> None:
    """Ninety-six blocks through twelve slots: requests for one block share its read, however far apart they stand."""
    box = Box(tmp_path / "store", dram_blocks=12, segments=40, parallel=parallel)
    chains = chains_on_the_drive(box, 16, 6)
    gets = [Get(box.store, chain) for _ in range(requests) for chain in chains]
    under_way = 0
    while not all(get.transfer.done for get in gets):
        under_way = max(under_way, int((box.store._core.ledger.table.state == 2).sum()))
        box.wait(next(get.transfer for get in gets if not get.transfer.done), 1e-4)
        assert box.clock.monotonic_s() < 1001.0, "they wait for each other"
    for get in gets:
        get.check()
        assert get.transfer.outcomes == [Hit(Tier.SSD)] * 6
    assert 1 <= under_way <= 12
    places = Counter(
        (name, at) for name, start, nbytes in box.reads for at in range(start, start + nbytes, SMALL_NBYTES)
    )
    assert len(places) == 96 and set(places.values()) == {1}
    box.rest()
    box.check()


def test_requests_for_single_layers_and_whole_blocks_do_not_hold_each_other_up(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=40)
    chains = chains_on_the_drive(box, 16, 6)
    gets = [Get(box.store, chain, layers=layers) for layers in (None, range(1), None) for chain in chains]
    for get in gets:
        box.wait(get.transfer, 1.0)
        get.check()
        assert kinds(get.transfer.outcomes) == ["Hit"] * 6
    assert box.clock.monotonic_s() < 1001.0
    box.rest()
    box.check()


@pytest.mark.parametrize("given_up", [0, 1, 2])
def test_one_of_those_that_wait_together_is_given_up_and_the_others_go_on(tmp_path: Path, given_up: int) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    wanted, pinned = chains_on_the_drive(box, 2, 4)
    box.get_now(pinned)
    pin = box.store.pin(pinned)
    gets = [Get(box.store, wanted, deadline_s=1.0 if number == given_up else None) for number in range(3)]
    box.wait(gets[given_up].transfer, 2.0)
    assert kinds(gets[given_up].transfer.outcomes) == ["Expired"] * 4
    box.step(0.1)
    pin.release()
    box.rest()
    for number, get in enumerate(gets):
        get.check()
        assert kinds(get.transfer.outcomes) == (["Expired"] if number == given_up else ["Hit"]) * 4
    assert sum(nbytes for _, _, nbytes in box.reads) == 8 * SMALL_NBYTES  # `pinned`, and `wanted` once
    box.check()


def test_what_fails_fails_for_all_that_waited_together(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    wanted, pinned = chains_on_the_drive(box, 2, 4)
    box.get_now(pinned)
    pin = box.store.pin(pinned)
    gets = [Get(box.store, wanted) for _ in range(3)]
    box.faults.add(Fail(5), IoKind.READ)
    pin.release()
    box.rest()
    for get in gets:
        get.check()
        assert kinds(get.transfer.outcomes) == ["DeviceFailed"] * 4
    box.check()


def test_those_that_wait_together_are_told_together_that_there_is_no_room(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16, busy_after_s=5.0)
    wanted, pinned = chains_on_the_drive(box, 2, 4)
    box.get_now(pinned)
    with box.store.pin(pinned):
        first = Get(box.store, wanted)
        box.step(1.0)
        second = Get(box.store, wanted)
        for get in (first, second):
            box.wait(get.transfer, 20.0)
            get.check()
            assert get.transfer.outcomes == [Busy()] * 4
    assert box.clock.monotonic_s() <= 1005.1
    box.rest()
    box.check()


def test_what_was_prefetched_stays_until_it_is_used(tmp_path: Path) -> None:
    """The second prefetch gets what room there is and no more; once the first was used, a third one gets its."""
    box = Box(tmp_path / "store", dram_blocks=6, segments=16)
    first, second, third = chains_on_the_drive(box, 3, 4)
    outcomes = []
    for chain in (first, second):
        prefetch = box.store.prefetch(chain)
        box.wait(prefetch)
        outcomes.append(kinds(prefetch.outcomes))
    assert outcomes == [["Hit"] * 4, ["Hit"] * 2 + ["Busy"] * 2]
    assert box.store.match(first).tiers == IN_DRAM
    box.check()
    assert box.get_now(first) == [Hit(Tier.DRAM)] * 4
    prefetch = box.store.prefetch(third)
    box.wait(prefetch)
    assert kinds(prefetch.outcomes) == ["Hit"] * 4
    assert box.store.match(first).tiers == ON_SSD
    assert box.store.match(second).tiers[:2] == (Tier.DRAM,) * 2
    box.check()


def test_a_prefetch_of_what_dram_holds_keeps_it_there(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    first, second = chains_on_the_drive(box, 2, 4)
    box.get_now(first)
    assert box.store.prefetch(first).outcomes == [Hit(Tier.DRAM)] * 4
    assert box.store.prefetch(second).outcomes == [Busy()] * 4
    box.check()


def test_a_prefetch_that_a_get_joins_is_used(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    first, second = chains_on_the_drive(box, 2, 4)
    prefetch, get = box.store.prefetch(first), Get(box.store, first)
    box.wait(prefetch)
    box.wait(get.transfer)
    later = box.store.prefetch(second)
    box.wait(later)
    assert later.outcomes == [Hit(Tier.SSD)] * 4
    box.check()


def test_demand_takes_what_was_used_before_what_was_prefetched(tmp_path: Path) -> None:
    """What was prefetched has been idle for longest, yet goes last; but it goes: no request waits for its use."""
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    prefetched, used, wanted, more = chains_on_the_drive(box, 4, 4)
    box.wait(box.store.prefetch(prefetched))
    box.step(1.0)
    box.get_now(used)
    assert box.get_now(wanted) == [Hit(Tier.SSD)] * 4
    assert box.store.match(prefetched).tiers == IN_DRAM
    assert box.store.match(used).tiers == ON_SSD
    with box.store.pin(wanted):
        started_s = box.clock.monotonic_s()
        assert box.get_now(more) == [Hit(Tier.SSD)] * 4
        assert box.clock.monotonic_s() - started_s < 0.01
        assert box.store.match(prefetched).tiers == ON_SSD
    box.check()


def test_what_is_not_used_for_long_is_as_any_other_block(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    first, second = chains_on_the_drive(box, 2, 4)
    box.wait(box.store.prefetch(first))
    box.step(AWAITED_S - 0.1)
    assert box.store.prefetch(second).outcomes == [Busy()] * 4
    box.step(0.2)
    box.step()
    prefetch = box.store.prefetch(second)
    box.wait(prefetch)
    assert prefetch.outcomes == [Hit(Tier.SSD)] * 4
    box.check()


def test_what_was_prefetched_leaves_with_an_invalidation(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=16)
    first, second = chains_on_the_drive(box, 2, 4)
    box.wait(box.store.prefetch(first))
    box.store.invalidate(first)
    box.check()
    prefetch = box.store.prefetch(second)
    box.wait(prefetch)
    assert prefetch.outcomes == [Hit(Tier.SSD)] * 4
    box.check()


# -- C21: nothing to stage in ------------------------------------------------------------------------------------------


def test_a_read_of_single_layers_that_finds_no_staging_is_busy_in_time(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=24, busy_after_s=5.0)
    wanted = chain_of(LARGE, [7] * 2)
    box.put_now(wanted)
    pinned = chain_of(SMALL, [8] * 8)
    box.put_now(pinned)
    box.cool()
    box.get_now(pinned)
    box.reads.clear()
    started_s = box.clock.monotonic_s()
    with box.store.pin(pinned):
        get = Get(box.store, wanted, layers=range(1, 2))
        box.wait(get.transfer, 4.9)
        assert kinds(get.transfer.outcomes) == ["Pending"] * 2
        box.wait(get.transfer, 20.0)
        get.check()
        assert get.transfer.outcomes == [Busy()] * 2
        assert box.clock.monotonic_s() - started_s == pytest.approx(5.0, abs=0.1)
        assert box.reads == []
        box.rest()
        box.check()
    assert box.get_now(wanted, layers=range(1, 2)) == [Hit(Tier.SSD)] * 2
    assert sum(nbytes for _, _, nbytes in box.reads) < 2 * LARGE_NBYTES
    box.check()


@pytest.mark.parametrize("what", ["get", "layers", "put"])
def test_waiting_for_room_asks_fifty_times_a_second(tmp_path: Path, what: str) -> None:
    """Counted in calls of `poll` of the engine, by a clock that goes on by what was waited for."""
    box = Box(tmp_path / "store", dram_blocks=4, segments=24, busy_after_s=5.0)
    wanted, pinned = chains_on_the_drive(box, 2, 4)
    box.get_now(pinned)
    polls = itertools.count()
    poll = box.device.poll

    def counted(timeout_s: float) -> Any:
        next(polls)
        before_s = box.clock.monotonic_s()
        results = poll(timeout_s)
        if not results:  # a fake drive that has nothing to do comes back at once
            box.clock.advance(max(0.0, before_s + timeout_s - box.clock.monotonic_s()))
        return results

    box.device.poll = counted  # type: ignore[method-assign]
    with box.store.pin(pinned):
        match what:
            case "get":
                transfer = Get(box.store, wanted).transfer
            case "layers":
                transfer = Get(box.store, wanted, layers=range(1)).transfer
            case _:
                transfer = box.put(chain_of(SMALL, [9] * 4))
        box.wait(transfer, 20.0)
    assert transfer.outcomes == [Busy()] * 4
    assert box.clock.monotonic_s() == pytest.approx(1005.0, abs=0.1)
    assert 10 <= next(polls) <= 5.0 / 0.02 + 10


@pytest.mark.parametrize("what", ["get", "put"])
def test_the_thread_of_a_store_does_not_spin_while_something_waits(tmp_path: Path, what: str) -> None:
    """As above, on files and threads: no more calls than fit between the first and the last of them."""
    pinned, wanted = real_chain_of(0, 8), real_chain_of(1, 4)
    with opened(tmp_path / "kv") as store:
        stored(store, pinned)
        stored(store, wanted)
    with opened(tmp_path / "kv", dram_bytes=64 << 10, busy_after_s=2.5) as store:
        all_hits(store, pinned)
        with store.pin(pinned):
            polls: list[float] = []
            poll = store._engine.poll

            def counted(timeout_s: float) -> Any:
                polls.append(time.monotonic())
                return poll(timeout_s)

            store._engine.poll = counted  # type: ignore[method-assign]
            started_s = time.monotonic()
            nbytes = wanted.namespace.layout.block_nbytes
            if what == "get":
                transfer = store.get(wanted, bytearray(4 * nbytes))
            else:
                transfer = store.put(real_chain_of(2, 4), bytes(4 * nbytes))
            assert store.wait(transfer, 60.0) == [Busy()] * 4
            took_s = time.monotonic() - started_s
            del store._engine.poll
        assert 1 <= len(polls) <= took_s / 0.02 + 20


def test_a_drive_that_hangs_is_waited_for_without_spinning(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    (wanted,) = chains_on_the_drive(box, 1, 4)
    box.faults.add(Hang(), IoKind.READ)
    polls = itertools.count()
    poll = box.device.poll

    def counted(timeout_s: float) -> Any:
        next(polls)
        box.clock.advance(timeout_s)
        return poll(0.0)

    box.device.poll = counted  # type: ignore[method-assign]
    get = Get(box.store, wanted, deadline_s=20.0)
    box.wait(get.transfer, 100.0)
    get.check()
    assert kinds(get.transfer.outcomes) == ["Expired"] * 4
    assert next(polls) <= 20 / 0.1 + 10
    box.faults.clear()
    box.device.release()
    del box.device.poll
    box.rest()
    box.check()
