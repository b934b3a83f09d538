"""`open_store` and the life of a store: options, closing, what is left behind, and a bug inside."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, bytes_of, chain_of, checked, opened, put, stored, until

from kvterrace import (
    Busy,
    ConfigError,
    DeviceFailed,
    Hit,
    KVTerraceError,
    Miss,
    Pending,
    Rejected,
    Store,
    StoreClosedError,
    Stored,
)
from kvterrace.buffers import Bytes
from kvterrace.clock import SystemClock
from kvterrace.engine.writer import Writer
from kvterrace.io import PosixEngine, probe
from kvterrace.io.base import IoRequest
from kvterrace.io.files import FileCalls
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Expired


@pytest.mark.parametrize(
    "options",
    [
        {"dram_bytes": 0},
        {"dram_bytes": "4095"},
        {"dram_bytes": "1 PB"},
        {"dram_bytes": "much"},
        {"ssd_bytes": "1MB"},
        {"ssd_bytes": -1},
        {"partition": "../up"},
    ],
)
def test_options_that_cannot_work_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "kv", **options)
    assert "\n" not in str(caught.value)
    assert threading.active_count() == threads
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 2))


def test_a_block_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    from kvterrace import LayoutError, Namespace

    big = Namespace(model="big", layout=LAYOUT.__class__(32, 8, 64, "float16", 64))  # 4 MiB
    for options in ({"dram_bytes": MiB}, {"dram_bytes": 16 * MiB, "ssd_bytes": 16 * MiB}):
        with opened(tmp_path / "kv", **options) as store:
            with pytest.raises(LayoutError, match="does not fit"):
                put(store, chain_of(0, 1, big))
            assert store.match(chain_of(0, 1, big)).blocks == 0


def test_a_ladder_of_dram_alone() -> None:
    with opened(None) as store:
        stored(store, chain_of(0, 8))
        all_hits(store, chain_of(0, 8))
        assert not store.flush()  # there is nowhere to write to
        assert store.stats().ssd_nbytes == 0


def _left(kind: str) -> int:
    gc.collect()
    return sum(1 for _ in Path(f"/proc/self/{kind}").iterdir())


def _maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("\n")


def test_nothing_is_left_behind_by_fifty_stores(tmp_path: Path) -> None:
    def cycle(number: int) -> None:
        with opened(tmp_path / "kv") as store:
            stored(store, chain_of(number, 3))
            checked(store, chain_of(max(0, number - 3), 3))

    for number in range(3):
        cycle(number)
    fds, threads, maps = _left("fd"), _left("task"), _maps()
    for number in range(3, 53):
        cycle(number)
    assert (_left("fd"), _left("task")) == (fds, threads)
    assert _maps() <= maps + 5  # thread stacks of the C library come and go
    with opened(tmp_path / "kv") as store:
        for number in range(53):
            all_hits(store, chain_of(number, 3))


def test_thousands_of_transfers_leave_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        for number in range(50):
            stored(store, chain_of(number, 3))
        fds = _left("fd")
        for number in range(1000):
            checked(store, chain_of(number % 60, 3))
        assert store.flush()
        assert _left("fd") <= fds + 2
        assert store._mover.active == []
        assert not store._mover.finished


def test_closing_twice_and_calls_after_it(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    chain = chain_of(0, 4)
    stored(store, chain)
    pin = store.pin(chain)
    assert store.close()
    assert store.close()
    assert store.closed
    pin.release()
    out = bytearray(4 * LAYOUT.block_nbytes)
    calls: list[Callable[[], object]] = [
        lambda: store.get(chain, out),
        lambda: store.put(chain, bytes_of(chain)),
        lambda: store.prefetch(chain),
        lambda: store.match(chain),
        lambda: store.pin(chain),
        lambda: store.touch(chain),
        lambda: store.invalidate(chain),
        store.flush,
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()
    assert store.stats().put_stored_blocks == 4
    assert store.poll() == []
    with opened(tmp_path / "kv") as again:
        all_hits(again, chain)


def test_a_forked_process_is_refused_and_never_waits(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        chain = chain_of(0, 4)
        stored(store, chain)
        pin = store.pin(chain)
        out = bytearray(4 * LAYOUT.block_nbytes)
        before = store.get(chain, out)
        calls: list[Callable[[], object]] = [
            lambda: store.get(chain, out),
            lambda: store.match(chain),
            lambda: store.wait(before),
            store.poll,
            store.stats,
            store.flush,
        ]
        with store._driver.lock:  # as a thread of the parent might hold it at that moment
            child = os.fork()
        if not child:
            refused = 0
            try:
                signal.alarm(30)
                for call in calls:
                    try:
                        call()
                    except StoreClosedError as error:
                        refused += "open the store after the fork" in str(error)
                pin.release()
                store.close()
            finally:
                os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        pin.release()
        all_hits(store, chain)


def test_a_pin_is_let_go_of_once() -> None:
    from kvterrace.handles import Pin

    let_go: list[Any] = []
    for _ in range(200):
        pin, gate = Pin(range(3), let_go.append), threading.Barrier(4)  # type: ignore[arg-type]

        def release(pin: Pin = pin, gate: threading.Barrier = gate) -> None:
            gate.wait()
            pin.release()

        threads = [threading.Thread(target=release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(let_go) == 200


@pytest.mark.parametrize("deadline_s", [float("nan"), -1.0, -float("inf")])
def test_deadlines_that_cannot_be(deadline_s: float) -> None:
    with opened(None) as store:
        chain = chain_of(0, 1)
        with pytest.raises(ConfigError, match="deadline_s"):
            store.put(chain, bytes_of(chain), deadline_s=deadline_s)
        with pytest.raises(ConfigError, match="deadline_s"):
            store.get(chain, bytearray(LAYOUT.block_nbytes), deadline_s=deadline_s)
        assert store.match(chain).blocks == 0


def test_closing_with_transfers_in_flight_ends_them(tmp_path: Path) -> None:
    chains = [chain_of(number, 40) for number in range(10)]
    with opened(tmp_path / "kv") as store:
        for chain in chains:
            stored(store, chain)
    for _ in range(3):
        store = opened(tmp_path / "kv", dram_bytes=2 * MiB)
        outs = [bytearray(b"\xee" * 40 * LAYOUT.block_nbytes) for _ in chains]
        gets = [store.get(chain, out) for chain, out in zip(chains, outs, strict=True)]
        more = store.put(chain_of(99, 40), bytes_of(chain_of(99, 40)))
        prefetch = store.prefetch(chains[0])
        assert store.close()
        before = [bytes(out) for out in outs]
        for transfer in (*gets, more, prefetch):
            assert transfer.done
            assert not any(isinstance(one, Pending) for one in transfer.outcomes)
        for transfer, chain, out in zip(gets, chains, outs, strict=True):
            want = bytes_of(chain)
            for index, outcome in enumerate(transfer.outcomes):
                span = slice(index * LAYOUT.block_nbytes, (index + 1) * LAYOUT.block_nbytes)
                assert out[span] == (want[span] if isinstance(outcome, Hit) else b"\xee" * LAYOUT.block_nbytes)
        time.sleep(0.01)
        assert [bytes(out) for out in outs] == before


def test_two_threads_close_one_store(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv", write_behind_s=60.0)
    stored(store, chain_of(0, 200))
    ended: list[bool] = []

    def close() -> None:
        ended.append(store.close())
        with opened(tmp_path / f"after{len(ended)}"):
            pass

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 4
    with opened(tmp_path / "kv") as again:  # whoever came second waited for the first
        all_hits(again, chain_of(0, 200))


@pytest.mark.usefixtures("python_engine")
def test_a_device_that_hangs_does_not_hang_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "kv", write_behind_s=60.0)
    stored(store, chain_of(0, 4))
    go_on = threading.Event()
    pwritev = os.pwritev

    def hanging(*arguments: Any) -> int:
        go_on.wait()
        return pwritev(*arguments)

    monkeypatch.setattr(os, "pwritev", hanging)
    try:
        assert not store.close(0.3)
        for _ in range(2):
            with pytest.raises(KVTerraceError, match=f"pid {os.getpid()}"):  # what hangs may still be written
                opened(tmp_path / "kv")
            assert not store.close(0.1)
    finally:
        go_on.set()
    until(lambda: all(not one.is_alive() for one in store._engine._threads))  # type: ignore[attr-defined]
    assert not store.close(), "what was not written in time stays told"
    opened(tmp_path / "kv").close()


class _BoomError(Exception):
    pass


@pytest.mark.parametrize("where", ["pump", "result", "poll"])
def test_a_bug_inside_is_told_and_nobody_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 8))
    store = opened(tmp_path / "kv")
    all_hits(store, chain_of(0, 8))
    entered = threading.Event()

    def boom(*_: object, **__: object) -> Any:
        entered.set()
        raise _BoomError("a bug")

    match where:
        case "pump":
            monkeypatch.setattr(Writer, "pump", boom)
        case "poll":
            monkeypatch.setattr(store._engine, "poll", boom)
        case _:
            submit = store._engine.submit

            def spoiled(requests: Sequence[IoRequest]) -> None:
                for request in requests:
                    request.tag = boom
                submit(requests)

            monkeypatch.setattr(store._engine, "submit", spoiled)
    out = bytearray(8 * LAYOUT.block_nbytes)
    try:
        outcomes: list[Any] = store.wait(store.get(chain_of(0, 8), out), 30.0)
        assert all(isinstance(one, (Hit, DeviceFailed, Pending)) for one in outcomes)
    except KVTerraceError:
        pass
    until(lambda: store._mover.fault is not None)
    assert entered.is_set()
    told = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert len(told) == 1
    assert told[0].exc_info is not None
    with pytest.raises(KVTerraceError, match="a bug"):
        store.match(chain_of(0, 8))
    with pytest.raises(KVTerraceError, match="a bug"):
        store.flush()
    monkeypatch.undo()
    assert not store.close(5.0)
    with opened(tmp_path / "kv") as again:
        all_hits(again, chain_of(0, 8))


def test_a_put_that_waits_when_a_bug_shows_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "kv", dram_bytes=64 << 10, busy_after_s=60.0)
    chain = chain_of(0, 8)
    stored(store, chain)
    store.pin(chain)  # DRAM is full for good
    waiting = store.put(chain_of(1, 4), bytes_of(chain_of(1, 4)))
    assert isinstance(waiting.outcomes[0], Pending)

    def boom(*_: object, **__: object) -> None:
        raise _BoomError("a bug")

    monkeypatch.setattr(Writer, "pump", boom)
    outcomes: list[Any] = store.wait(waiting, 30.0)
    assert all(isinstance(one, Rejected) for one in outcomes)
    monkeypatch.undo()
    assert not store.close(5.0)


def test_deadlines_and_busy(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", dram_bytes=64 << 10, busy_after_s=0.2) as store:
        stored(store, chain_of(0, 8))
        assert store.flush()
        with store.pin(chain_of(0, 8)):
            assert {type(one) for one in put(store, chain_of(1, 2))} == {Busy}
            assert {type(one) for one in put(store, chain_of(1, 2), deadline_s=0.01)} == {Busy}
        assert {type(one) for one in put(store, chain_of(1, 2))} == {Stored}
        assert store.flush()
        assert all(isinstance(one, (Hit, Expired)) for one in checked(store, chain_of(0, 8), deadline_s=0.0))


def test_a_store_that_cannot_be_rebuilt_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 4))
    fds, threads = _left("fd"), _left("task")

    def boom(*_: object) -> None:
        raise _BoomError("a bug")

    monkeypatch.setattr("kvterrace.engine.starting.rebuild", boom)
    with pytest.raises(_BoomError):
        opened(tmp_path / "kv")
    monkeypatch.undo()
    assert (_left("fd"), _left("task")) == (fds, threads)
    with opened(tmp_path / "kv") as again:
        all_hits(again, chain_of(0, 4))


def test_a_segment_that_cannot_be_read_for_now_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.crash.kit import child, ended, segments

    ended(child("store", tmp_path / "kv", 1, 300, "flush-and-die"))
    (segment,) = segments(tmp_path / "kv")
    before = segment.read_bytes()
    read_now = FileCalls.read_now

    def failing(self: FileCalls[Any], file: Any, offset: int, buffer: Any) -> int:
        if offset >= MiB:
            raise OSError(5, "Input/output error")
        return read_now(self, file, offset, buffer)

    monkeypatch.setattr(FileCalls, "read_now", failing)
    with opened(tmp_path / "kv") as store:
        found = store.match(chain_of(0, 300)).blocks
        assert 0 < found < 300
    monkeypatch.undo()
    assert segment.read_bytes() == before
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 300))
    assert Store is type(store)
    assert Miss() == Miss()


@pytest.mark.parametrize("wanted", ["posix", "native-posix", "uring"])
def test_each_drive_has_an_engine_of_the_kind_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    if {"native-posix": probe.why_not_native(), "uring": probe.why_not_uring()}.get(wanted) is not None:
        pytest.skip(f"no {wanted} here")
    monkeypatch.setenv("KVTERRACE_ENGINE", wanted)
    with opened(tmp_path / "kv") as store:
        assert [one.engine for one in store.stats().drives] == [wanted]
        stored(store, chain_of(0, 20))
    with opened([tmp_path / "a", tmp_path / "b"]) as store:
        assert [one.engine for one in store.stats().drives] == [f"{wanted}0", f"{wanted}1"]
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 20))


def test_an_engine_that_does_not_work_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTERRACE_ENGINE", "spdk")
    with pytest.raises(ConfigError, match="KVTERRACE_ENGINE=spdk: no such engine"):
        opened(tmp_path / "kv")
    monkeypatch.delenv("KVTERRACE_ENGINE")
    opened(tmp_path / "kv").close()  # nothing is locked


def test_the_whole_arena_is_registered_once_with_each_engine(tmp_path: Path) -> None:
    given: list[list[tuple[int, int]]] = [[], []]

    class Registering(PosixEngine):
        def __init__(self, mine: list[tuple[int, int]]) -> None:
            super().__init__()
            self._mine = mine

        def register_memory(self, memory: Bytes) -> bool:
            self._mine.append((memory.ctypes.data, memory.nbytes))
            return True

    roots = [tmp_path / "a", tmp_path / "b"]
    pairs = [
        (StoreDirectory.open(root, "main", created_unix_s=0.0), Registering(mine))
        for root, mine in zip(roots, given, strict=True)
    ]
    with Store(
        dram_nbytes=8 * MiB,
        ssd_nbytes=32 * MiB,
        directory=pairs[0][0],
        engine=pairs[0][1],
        more=pairs[1:],
        clock=SystemClock(),
    ) as store:
        arena = store._core.arena.view(0, 8 * MiB)
        assert given == [[(arena.ctypes.data, 8 * MiB)]] * 2
