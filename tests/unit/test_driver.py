"""Who waits for a store, and what wakes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness import Box

from kvterrace.clock import SystemClock
from kvterrace.engine.driver import Driver, _Wait
from kvterrace.io.base import IoClass, IoKind, IoRequest
from kvterrace.io.posix import PosixEngine
from kvterrace.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(
        dram_nbytes=1 << 20, ssd_nbytes=0, directory=None, engine=PosixEngine(), clock=SystemClock(), background=True
    ) as store:
        yield store


def turn(store: Store) -> None:
    """Have the driver's thread take in a result, and wait until it has."""
    taken = threading.Event()
    store._engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, tag=lambda _: taken.set())])
    assert taken.wait(30.0)


def in_background(driver: Driver, done: object, ended: list[bool], *, urgent: bool = False) -> threading.Thread:
    thread = threading.Thread(
        target=lambda: ended.append(driver.wait_for(done, 30.0, urgent=urgent))  # type: ignore[arg-type]
    )
    thread.start()
    return thread


def test_what_was_so_once_counts_even_if_it_is_not_any_more(store: Store) -> None:
    asked: list[int] = []
    once = threading.Event()

    def done() -> bool:
        asked.append(threading.get_ident())
        once.set()
        return len(asked) == 2  # the second time, and never again

    ended: list[bool] = []
    waiter = in_background(store._driver, done, ended)
    assert once.wait(30.0)
    with store._driver.lock:
        pass  # the waiter has let go of it: it is in line
    turn(store)
    waiter.join(30.0)
    assert ended == [True]
    assert len(asked) == 2 and asked[0] != asked[1]  # by the waiter first, then by the driver


def test_a_waiter_sleeps_through_results_that_are_not_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, once = threading.Event(), threading.Event()
    woken: list[bool] = []
    notify = store._driver.lock.notify_all

    def noted() -> None:
        woken.append(flag.is_set())
        notify()

    monkeypatch.setattr(store._driver.lock, "notify_all", noted)

    def done() -> bool:
        once.set()
        return flag.is_set()

    ended: list[bool] = []
    waiter = in_background(store._driver, done, ended)
    assert once.wait(30.0)
    for _ in range(5):
        turn(store)
    flag.set()
    turn(store)
    waiter.join(30.0)
    assert ended == [True]
    assert woken and all(woken)


def test_all_who_wait_are_told_of_a_failed_store(store: Store) -> None:
    ended: list[bool] = []
    once = threading.Event()

    def done() -> bool:
        once.set()
        return False

    waiters = [in_background(store._driver, done, ended) for _ in range(3)]
    assert once.wait(30.0)

    def fail(_: object) -> None:
        raise RuntimeError("made up")

    store._engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, tag=fail)])
    for waiter in waiters:
        waiter.join(30.0)
    assert ended == [False] * 3


def test_who_waits_is_woken_before_writes_are_looked_after(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, once, written = threading.Event(), threading.Event(), threading.Event()
    writes: list[bool] = []
    pump = store._mover.pump

    def noted(**options: bool) -> None:
        if flag.is_set():
            writes.append(options.get("writes", True))
            if writes[-1]:
                written.set()
        pump(**options)

    monkeypatch.setattr(store._mover, "pump", noted)

    def done() -> bool:
        once.set()
        return flag.is_set()

    ended: list[bool] = []
    waiter = in_background(store._driver, done, ended, urgent=True)
    assert once.wait(30.0)
    with store._driver.lock:
        flag.set()
    turn(store)
    waiter.join(30.0)
    assert ended == [True]
    assert written.wait(30.0)  # in a turn of its own, without a result
    assert writes[0] is False


def test_writes_do_not_wait_for_ever_behind_those_who_are_woken(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    driver, pumped = box.store._driver, list[bool]()
    pump = box.store._mover.pump

    def noted(**options: bool) -> None:
        pumped.append(options.get("writes", True))
        pump(**options)

    box.store._mover.pump = noted  # type: ignore[method-assign]
    for _ in range(12):
        driver._waits = [_Wait(lambda: True, urgent=True)]  # somebody new each time
        driver._step(0.0)
        box.clock.advance(0.002)
    driver._waits = []
    assert pumped == [False, False, False, True] * 3
    box.store._mover.pump = pump  # type: ignore[method-assign]
    box.store.close()
