"""Faults over any engine: each effect on real files and on the fake drive; clocks that leap; the stepper."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock, ManualClock, SystemClock
from kvterrace.engine.dirty import WritePolicy
from kvterrace.errors import StoreClosedError
from kvterrace.io import PAGE_NBYTES, IoClass, IoFile, IoKind, IoRequest, IoResult, PosixEngine
from kvterrace.io.fake import FakeDevice
from kvterrace.keys import Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.store import Store
from kvterrace.testing.clock_jump import ClockJump
from kvterrace.testing.engine_suite import aligned
from kvterrace.testing.faults import (
    Astray,
    Effect,
    Fail,
    FaultPlan,
    FaultyEngine,
    FileCall,
    FlipBit,
    Hang,
    PretendDone,
    Short,
    Slow,
    Torn,
)
from kvterrace.testing.scheduler import Stepper
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Hit, Present, Stored

PAGE = PAGE_NBYTES
DEMAND = IoClass.DEMAND


def page(value: int, count: int = 1) -> Bytes:
    memory = aligned(1, count * PAGE)[0]
    memory[:] = value
    return memory


@pytest.fixture(params=["posix", "fake"])
def engine(request: pytest.FixtureRequest) -> Iterator[FaultyEngine]:
    clock: Clock = SystemClock()
    if request.param == "fake":
        clock = ManualClock()
        made = FaultyEngine(FakeDevice(clock), clock=clock)
    else:
        made = FaultyEngine(PosixEngine(threads=2), clock=clock)
    yield made
    made.release()
    assert made.close(10.0)


def do(engine: FaultyEngine, kind: IoKind, file: IoFile, offset: int = 0, *memory: Bytes) -> IoResult:
    engine.submit([IoRequest(kind, DEMAND, file, offset, memory)])
    return drain(engine, 1)[0]


def drain(engine: FaultyEngine, count: int) -> list[IoResult]:
    results: list[IoResult] = []
    for _ in range(100):
        if len(results) >= count:
            return results
        results += engine.poll(10.0)
    raise AssertionError(f"{len(results)} of {count} results")


def on_medium(engine: FaultyEngine, path: Path) -> Bytes:
    file = engine.open(path)
    memory = page(77, 4)
    nbytes = engine._inner.read_now(file, 0, memory)
    engine.close_file(file)
    return memory[:nbytes]


@pytest.mark.parametrize(
    ("effect", "kind", "error", "nbytes", "seen"),
    [
        (Fail(errno.EIO), IoKind.READ, errno.EIO, 0, [9, 9]),
        (Short(PAGE + 7), IoKind.READ, None, PAGE + 7, [1, None]),
        (PretendDone(), IoKind.READ, None, 2 * PAGE, [9, 9]),
        (Slow(0.01), IoKind.READ, None, 2 * PAGE, [1, 2]),
        (Fail(errno.ENOSPC), IoKind.WRITE, errno.ENOSPC, 0, [1, 2]),
        (Short(PAGE + 7), IoKind.WRITE, None, PAGE, [9, 2]),
        (PretendDone(), IoKind.WRITE, None, 2 * PAGE, [1, 2]),
        (Torn(1), IoKind.WRITE, None, 2 * PAGE, [9, 2]),
        (Torn(1, errno.EIO), IoKind.WRITE, errno.EIO, PAGE, [9, 2]),
        (Slow(0.01), IoKind.WRITE, None, 2 * PAGE, [9, 9]),
        (Fail(errno.EIO), IoKind.SYNC, errno.EIO, 0, [1, 2]),
        (PretendDone(), IoKind.SYNC, None, 0, [1, 2]),
    ],
)
def test_effects(
    engine: FaultyEngine,
    tmp_path: Path,
    effect: Effect,
    kind: IoKind,
    error: int | None,
    nbytes: int,
    seen: list[int | None],
) -> None:
    path = tmp_path / "a"
    file = engine.create(path, 2 * PAGE)
    do(engine, IoKind.WRITE, file, 0, page(1), page(2))
    engine.plan.add(effect, kind, nth=1)
    memory = page(9, 2)
    parts = [] if kind is IoKind.SYNC else [memory[:PAGE], memory[PAGE:]]
    finished: list[IoResult] = []
    request = IoRequest(kind, DEMAND, file, 0, parts, finish=finished.append, tag="mine")
    engine.submit([request])
    (result,) = drain(engine, 1)
    assert finished == [result]
    assert result.request is request
    assert (result.error.errno if result.error else None, result.nbytes) == (error, nbytes)
    if kind is not IoKind.READ:
        memory = on_medium(engine, path)
    for n, value in enumerate(seen):
        assert value is None or (memory[n * PAGE : (n + 1) * PAGE] == value).all()
    if isinstance(effect, Short) and kind is IoKind.READ:
        assert (memory[PAGE : PAGE + 7] == 2).all() and (memory[PAGE + 7 :] == 9).all()
    assert [fired for _, fired in engine.plan.fired] == [effect]
    assert do(engine, kind, file, 0, *([] if kind is IoKind.SYNC else [page(5), page(5)])).complete  # only the first


def test_a_flipped_bit_is_in_what_arrives_not_on_the_medium(engine: FaultyEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 2 * PAGE)
    engine.plan.add(FlipBit(PAGE + 3, 6), IoKind.READ)
    first, second = page(9), page(9)
    seen: list[int] = []
    engine.submit(
        [IoRequest(IoKind.READ, DEMAND, file, 0, [first, second], finish=lambda _: seen.append(int(second[3])))]
    )
    assert drain(engine, 1)[0].complete
    assert not first.any()
    assert second.nonzero()[0].tolist() == [3]
    assert (second[3], seen) == (64, [64])  # it was wrong before `finish` saw it
    assert not on_medium(engine, tmp_path / "a").any()
    assert engine.read_now(file, 0, both := page(9, 2)) == 2 * PAGE
    assert both[PAGE + 3] == 64


def test_read_now_suffers_as_a_read(engine: FaultyEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    for effect in (Fail(errno.EIO), PretendDone(), Short(100), Slow(0.01)):
        engine.plan.clear()
        engine.plan.add(effect, IoKind.READ)
        memory = page(9)
        match effect:
            case Fail():
                with pytest.raises(OSError, match="Input/output error"):
                    engine.read_now(file, 0, memory)
            case PretendDone():
                assert engine.read_now(file, 0, memory) == PAGE and (memory == 9).all()
            case Short():
                assert engine.read_now(file, 0, memory) == 100
                assert not memory[:100].any() and (memory[100:] == 9).all()
            case Slow():
                assert engine.read_now(file, 0, memory) == PAGE and not memory.any()


def test_a_hanging_request_touches_nothing_until_released(engine: FaultyEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    do(engine, IoKind.WRITE, file, 0, page(1))
    engine.plan.add(Hang(), IoKind.READ, nth=1)
    memory = page(9)
    engine.submit([IoRequest(IoKind.READ, DEMAND, file, 0, [memory], tag="hung")])
    assert do(engine, IoKind.READ, file, 0, page(0)).complete
    assert engine.poll(0.01) == []
    assert not engine.close(0.01)
    assert ((memory == 9).all(), engine.in_flight, engine.hanging) == (True, 1, 1)
    with pytest.raises(StoreClosedError):
        engine.submit([])
    assert engine.release() == 1
    assert engine.close(10.0)
    assert [result.request.tag for result in engine.poll(0.0)] == ["hung"]
    assert (memory == 1).all()


CALLS: dict[FileCall, Callable[[FaultyEngine, Path, IoFile], object]] = {
    "create": lambda engine, folder, file: engine.create(folder / "new", PAGE),
    "open": lambda engine, folder, file: engine.open(folder / "a"),
    "reopen": lambda engine, folder, file: engine.reopen(folder / "a"),
    "truncate": lambda engine, folder, file: engine.truncate(file, 100),
    "unlink": lambda engine, folder, file: engine.unlink(folder / "a"),
    "sync_folder": lambda engine, folder, file: engine.sync_folder(folder),
}


@pytest.mark.parametrize("call", CALLS)
def test_file_calls_suffer(engine: FaultyEngine, tmp_path: Path, call: FileCall) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    do(engine, IoKind.SYNC, file)
    before = list(engine.list(tmp_path))
    engine.plan.add(Fail(errno.EACCES), call, nth=1)
    with pytest.raises(PermissionError, match="planned EACCES"):
        CALLS[call](engine, tmp_path, file)
    engine.plan.clear()
    engine.plan.add(PretendDone(), call)
    if call in ("truncate", "unlink", "sync_folder"):
        CALLS[call](engine, tmp_path, file)
    else:
        with pytest.raises(AssertionError, match="cannot suffer"):
            CALLS[call](engine, tmp_path, file)
    assert list(engine.list(tmp_path)) == before
    engine.plan.clear()
    engine.plan.add(Hang(), call)
    thread = threading.Thread(target=CALLS[call], args=(engine, tmp_path, file))
    thread.start()
    while not engine.hanging:
        assert thread.is_alive()
    assert list(engine.list(tmp_path)) == before
    assert not engine.close(0.01) if call == "sync_folder" else True
    assert engine.release() == 1
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "effect"),
    [(IoKind.READ, Torn(1)), (IoKind.WRITE, FlipBit(0)), (IoKind.WRITE, Astray(0)), (IoKind.SYNC, Short(1))],
)
def test_a_plan_that_makes_no_sense_is_a_bug(
    engine: FaultyEngine, tmp_path: Path, kind: IoKind, effect: Effect
) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    engine.plan.add(effect, kind)
    with pytest.raises(AssertionError, match="cannot suffer"):
        engine.submit([IoRequest(kind, DEMAND, file)])


def test_slow_takes_that_much_longer() -> None:
    clock = ManualClock()
    engine = FaultyEngine(FakeDevice(clock, latency_s=0.5), FaultPlan().add(Slow(7.0), IoKind.SYNC, nth=1), clock)
    file = engine.create(Path("/x/a"), PAGE)
    engine.submit([IoRequest(IoKind.SYNC, DEMAND, file, tag="slow"), IoRequest(IoKind.SYNC, DEMAND, file, tag="quick")])
    assert [result.request.tag for result in engine.poll(100.0)] == ["quick"]
    assert engine.poll(1.0) == []
    assert [result.request.tag for result in engine.poll(100.0)] == ["slow"]
    assert clock.monotonic_s() == 7.5
    assert engine.close(1.0)


def test_a_wake_and_a_crash_pass_through(engine: FaultyEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    engine.wake()
    assert engine.poll(100.0) == []
    engine.plan.add(Fail(errno.EIO), IoKind.READ)

    def crash(_: IoResult) -> None:
        raise SystemExit

    engine.submit([IoRequest(IoKind.READ, DEMAND, file, 0, [page(0)], finish=crash)])
    (result,) = drain(engine, 1)
    assert isinstance(result.crash, SystemExit) and result.error is not None


def test_clocks_leap() -> None:
    base = ManualClock(100.0)
    clock = ClockJump(base)
    assert (clock.monotonic_s(), clock.unix_s()) == (100.0, 100.0)
    clock.leap(50.0)
    clock.set_back(1000.0)
    base.advance(1.0)
    assert (clock.monotonic_s(), clock.unix_s()) == (151.0, -849.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.leap(-1.0)
    drive = FakeDevice(clock, latency_s=0.5)
    drive.submit([IoRequest(IoKind.SYNC, DEMAND, drive.create(Path("/x/a"), 0))])
    assert len(drive.poll(10.0)) == 1
    assert clock.monotonic_s() == 151.5


# The stepper


def stepper(choose: Callable[[Sequence[IoRequest]], int] | None = None) -> tuple[Stepper, ManualClock]:
    clock = ManualClock()
    return Stepper(FakeDevice(clock), clock, choose), clock


def test_nothing_completes_until_told_to() -> None:
    engine, clock = stepper()
    file = engine.create(Path("/x/a"), 2 * PAGE)
    memory = [page(9), page(9), page(9)]
    engine.submit([IoRequest(IoKind.READ, DEMAND, file, 0, [one], tag=n) for n, one in enumerate(memory)])
    assert engine.poll(3.0) == []
    assert clock.monotonic_s() == 3.0
    assert engine.step(1).tag == 1
    assert [int(one[0]) for one in memory] == [9, 0, 9]
    assert (len(engine.pending), engine.in_flight) == (2, 3)
    assert [result.request.tag for result in engine.poll(3.0)] == [1]
    assert not engine.close(1.0)
    assert engine.step_all() == 2
    assert [result.request.tag for result in engine.poll(0.0)] == [0, 2]
    assert engine.close(1.0)


LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=16, dtype="float16", block_tokens=16)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_completions_serves_the_right_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    engine, clock = stepper(lambda pending: data.draw(st.integers(0, len(pending) - 1)))
    store = Store(
        dram_nbytes=12 * 2 * PAGE,
        ssd_nbytes=4 << 20,
        directory=StoreDirectory.open(tmp_path_factory.mktemp("store"), "main", created_unix_s=0.0),
        engine=engine,
        clock=clock,
        writes=WritePolicy(batch_nbytes=4 * PAGE),
        background=False,
    )
    rng = np.random.default_rng(0)
    chains = [chain_keys(Namespace("m", LAYOUT), rng.integers(0, 999, 6 * 16)) for _ in range(4)]
    right = [rng.integers(0, 256, (6, LAYOUT.block_nbytes), dtype=np.uint8) for _ in chains]
    for _ in range(2):
        puts = [store.put(chain, content, deadline_s=3600.0) for chain, content in zip(chains, right, strict=True)]
        for put in puts:
            assert all(isinstance(one, Stored | Present) for one in store.wait(put, 3600.0))
        outs = [np.zeros_like(content) for content in right]
        gets = [store.get(chain, out) for chain, out in zip(chains, outs, strict=True)]
        for get, content, out in zip(gets, right, outs, strict=True):
            outcomes = store.wait(get, 3600.0)
            assert all(isinstance(one, Hit) for one in outcomes), outcomes
            assert np.array_equal(out, content)
    store.invalidate(chains[0], start=2)
    assert [store.match(chain).blocks for chain in chains] == [2, 6, 6, 6]
    assert store.close(3600.0)


def test_a_read_that_goes_astray_brings_what_lies_elsewhere(engine: FaultyEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 3 * PAGE)
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [page(1), page(2), page(3)])])
    assert drain(engine, 1)[0].complete
    engine.plan.add(Astray(PAGE), IoKind.READ)
    memory = page(9, 2)
    engine.submit([IoRequest(IoKind.READ, DEMAND, file, 0, [memory])])
    result = drain(engine, 1)[0]
    assert result.complete and result.request.offset == 0
    assert (memory[:PAGE] == 2).all() and (memory[PAGE:] == 3).all()
    assert engine.read_now(file, 2 * PAGE, memory[:PAGE]) == PAGE and (memory[:PAGE] == 2).all()
    engine.submit([IoRequest(IoKind.READ, DEMAND, file, 0, [page(9, 3)])])
    assert drain(engine, 1)[0].nbytes == 2 * PAGE  # the file ends there
