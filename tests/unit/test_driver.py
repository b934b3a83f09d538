"""Who waits for a store, and what wakes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvterrace.clock import SystemClock
from kvterrace.engine.driver import Driver
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


def in_background(driver: Driver, done: object, ended: list[bool]) -> threading.Thread:
    thread = threading.Thread(target=lambda: ended.append(driver.wait_for(done, 30.0)))  # type: ignore[arg-type]
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
