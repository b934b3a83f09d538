"""Reads and copies on a drive that fails or hangs: what it costs, and what it must not cost."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, Get, chain_of, kinds

from kvterrace.engine import reader, record_reads
from kvterrace.engine.landing import Want
from kvterrace.engine.mover import STALL_S
from kvterrace.health.breaker import BreakerState, Side
from kvterrace.io import PAGE_NBYTES, IoClass, IoKind, IoRequest, IoResult, PosixEngine
from kvterrace.io.faults import Fail, FaultPlan, FlipBit, Hang
from kvterrace.types import Busy, Expired, Hit, Stored, Tier

FOUR = chain_of(SMALL, [0] * 4)
LAYER = range(1)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "store", dram_blocks=64, segments=16)


def cold(box: Box, *paths: list[int]) -> None:
    for path in paths:
        box.put_now(chain_of(SMALL, path))
    box.cool()
    box.reads.clear()


# -- a copy that is lost while it is read ------------------------------------------------------------------------------


def test_a_block_whose_copy_is_lost_while_it_lands_is_written_again(box: Box) -> None:
    chain = chain_of(SMALL, [1])
    cold(box, [1])
    box.faults.add(Fail(errno.EIO), IoKind.READ, nth=1)
    layered, whole = Get(box.store, chain, layers=LAYER), Get(box.store, chain)
    box.wait(layered.transfer)  # event by event: the copy is given up before the other read has landed
    assert not whole.transfer.done
    box.wait(whole.transfer)
    assert (kinds(layered.transfer.outcomes), whole.transfer.outcomes) == (["DeviceFailed"], [Hit(Tier.SSD)])
    whole.check()
    assert box.store._core.ledger.dirty.nbytes == SMALL_NBYTES
    box.check()
    box.cool()
    assert box.store.match(chain).tiers == (Tier.SSD,)
    assert box.reopen()
    assert box.get_now(chain) == [Hit(Tier.SSD)]


# -- reads of layers and the breaker -----------------------------------------------------------------------------------


def test_an_error_of_the_drive_costs_no_copy_that_layers_were_read_of(box: Box) -> None:
    chain = chain_of(SMALL, [1])
    cold(box, [1])
    box.faults.add(Fail(errno.ETIMEDOUT), IoKind.READ)
    assert kinds(box.get_now(chain, layers=LAYER)) == ["DeviceFailed"]
    box.faults.clear()
    assert box.get_now(chain, layers=LAYER) == [Hit(Tier.SSD)]
    box.check()


@pytest.mark.parametrize("effect", [Fail(errno.EIO), FlipBit(PAGE_NBYTES - 1, 0)], ids=["bad place", "wrong bytes"])
def test_a_bad_place_that_layers_were_read_of_is_given_up(box: Box, effect: Fail | FlipBit) -> None:
    chain = chain_of(SMALL, [1])
    cold(box, [1])
    box.faults.add(effect, IoKind.READ, nth=1)
    assert kinds(box.get_now(chain, layers=LAYER))[0] in ("DeviceFailed", "Corrupt")
    assert box.store.match(chain).blocks == 0
    box.check()


def test_reads_of_layers_stop_with_the_breaker_and_start_again(box: Box) -> None:
    paths = [[number] for number in range(20)]
    cold(box, *paths)
    gate = box.store._core.volumes[0].gate
    box.faults.add(Fail(errno.ETIMEDOUT), IoKind.READ)
    for path in paths:
        assert kinds(box.get_now(chain_of(SMALL, path), layers=LAYER)) == ["DeviceFailed"]
    assert gate.breaker.state(Side.READ) is BreakerState.OPEN
    assert len(box.reads) <= 6
    assert all(box.store.match(chain_of(SMALL, path)).blocks == 1 for path in paths)
    box.faults.clear()
    box.step(5.0)
    for path in paths[:4]:
        box.get_now(chain_of(SMALL, path), layers=LAYER)
    assert gate.breaker.state(Side.READ) is BreakerState.CLOSED
    assert box.get_now(chain_of(SMALL, [5]), layers=LAYER) == [Hit(Tier.SSD)]
    box.check()


# -- a drive that hangs ------------------------------------------------------------------------------------------------


def test_memory_of_a_read_that_expired_is_the_callers_while_the_drive_hangs(box: Box) -> None:
    chain = chain_of(SMALL, [0, 0, 0])
    box.put_now(chain)
    box.cool()
    box.faults.add(Hang(), IoKind.READ)
    out = bytearray(3 * SMALL.layout.block_nbytes)
    transfer = box.store.get(chain, out, deadline_s=0.001)
    box.wait(transfer)
    assert transfer.outcomes == [Expired()] * 3
    out.clear()  # refused while anybody holds it
    box.faults.clear()
    box.device.release()
    box.rest()
    assert box.get_now(chain) == [Hit(Tier.DRAM)] * 3
    box.check()


@pytest.fixture
def hung_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PosixEngine]:
    """Every I/O thread of it is stuck in a read."""
    release, stuck = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> int:
        stuck.release()
        release.wait(60)
        return PAGE_NBYTES

    engine = PosixEngine(threads=4)
    file = engine.create(tmp_path / "a", PAGE_NBYTES)
    monkeypatch.setattr("os.preadv", hang)
    memory = np.zeros(PAGE_NBYTES, np.uint8)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory]) for _ in range(8)])
    for _ in range(4):
        assert stuck.acquire(timeout=10)
    yield engine
    release.set()
    assert engine.close(30.0)


@pytest.mark.parametrize("io_class", [IoClass.DEMAND, IoClass.PREFETCH])
def test_copies_go_on_while_every_io_thread_hangs(hung_engine: PosixEngine, io_class: IoClass) -> None:
    ran: list[IoResult] = []
    hung_engine.submit([IoRequest(IoKind.CALL, io_class, finish=ran.append) for _ in range(20)])
    results: list[IoResult] = []
    for _ in range(20):
        if len(results) < 20:
            results += hung_engine.poll(10.0)
    assert len(results) == len(ran) == 20


@pytest.mark.parametrize(("deadline_s", "until_s"), [(0.3, 2.0), (None, STALL_S + 2.0)])
def test_a_put_whose_copies_do_not_come_ends_busy(tmp_path: Path, deadline_s: float | None, until_s: float) -> None:
    """On a drive with one thread for everything."""
    box = Box(tmp_path / "store", dram_blocks=32, faults=FaultPlan(), parallel=1)
    cold(box, [1])
    box.faults.add(Hang(), IoKind.READ, nth=1)
    get = Get(box.store, chain_of(SMALL, [1]), deadline_s=0.3)
    put = box.put(FOUR, deadline_s=deadline_s)
    box.step(until_s / 2)
    assert not put.done
    box.step(until_s / 2)
    assert put.outcomes == [Busy()] * 4
    assert kinds(get.transfer.outcomes) == ["Expired"]
    box.device.release()
    box.rest()
    box.check()
    assert box.put_now(FOUR) == [Stored(Tier.DRAM)] * 4
    assert box.get_now(FOUR) == [Hit(Tier.DRAM)] * 4
    box.check()


# -- a get that is larger than DRAM ------------------------------------------------------------------------------------


def test_a_get_larger_than_dram_looks_at_each_want_a_few_times(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(box.root, dram_blocks=16, segments=64, busy_after_s=1000.0)
    chain = chain_of(SMALL, list(range(200)))
    assert set(box.put_now(chain)) == {Stored(Tier.DRAM)}
    box.cool()
    looked: list[int] = []
    real = reader.Reader._is_gone

    def counted(self: reader.Reader, want: Want) -> bool:
        looked.append(want.index)
        return real(self, want)

    monkeypatch.setattr(reader.Reader, "_is_gone", counted)
    monkeypatch.setattr(record_reads, "_MERGE_NBYTES", 2 * SMALL_NBYTES)
    assert box.get_now(chain) == [Hit(Tier.SSD)] * 200
    assert len(looked) < 200 * 12
    box.check()
