"""The thread-pool engine: what only real files, descriptors and threads can show."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.errors import ConfigError
from kvterrace.io import PAGE_NBYTES, IoClass, IoKind, IoRequest, IoResult, PosixEngine
from kvterrace.io.deadlines import Given

PAGE = PAGE_NBYTES


def page(value: int = 0, count: int = 1) -> Bytes:
    memory: Bytes = np.frombuffer(mmap.mmap(-1, count * PAGE), dtype=np.uint8)
    memory[:] = value
    return memory


def drain(engine: PosixEngine, count: int) -> list[IoResult]:
    results: list[IoResult] = []
    for _ in range(100):
        if len(results) >= count:
            break
        results += engine.poll(10.0)
    assert len(results) == count
    return results


@pytest.fixture
def engine() -> Iterator[PosixEngine]:
    made = PosixEngine(threads=4, name="test")
    yield made
    assert made.close(10.0)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_files_are_private_and_direct(engine: PosixEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 16 * PAGE)
    info = (tmp_path / "a").stat()
    assert (info.st_mode & 0o777, info.st_size) == (0o600, 16 * PAGE)
    assert engine.list(tmp_path)[0].allocated_nbytes == info.st_blocks * 512 >= 16 * PAGE
    if not file.direct:
        pytest.skip(f"{tmp_path} refuses O_DIRECT")
    with file.using() as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT


def test_list_skips_what_is_not_a_regular_file(engine: PosixEngine, tmp_path: Path) -> None:
    engine.create(tmp_path / "a", 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert [info.name for info in engine.list(tmp_path)] == ["a"]
    with pytest.raises(NotADirectoryError):
        engine.list(tmp_path / "a")


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.usefixtures("buffered")
def test_without_direct_io_it_warns_once_a_folder_and_works(
    engine: PosixEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        file = engine.create(tmp_path / "a", 4 * PAGE)
        assert not file.direct
        assert not engine.open(tmp_path / "a").direct
    assert [record.getMessage() for record in caplog.records] == [
        f"test: {tmp_path} refuses O_DIRECT; reading and writing through the page cache"
    ]
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page(1, 3)])])
    assert drain(engine, 1)[0].complete
    engine.submit([IoRequest(IoKind.SYNC, IoClass.DEMAND, file)])
    assert drain(engine, 1)[0].complete
    engine.truncate(file, PAGE + 1000)
    back = page(9, 2)
    assert engine.read_now(file, 0, back) == PAGE + 1000
    assert (back[: PAGE + 1000] == 1).all()
    assert (back[PAGE + 1000 :] == 9).all()


def test_partial_transfers_go_on(engine: PosixEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = engine.create(tmp_path / "a", 8 * PAGE)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, bufs, at: write(fd, [memoryview(bufs[0])[:PAGE]], at))
    data = [page(n, 2) for n in range(4)]
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, data)])
    assert drain(engine, 1)[0].complete
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: read(fd, [memoryview(bufs[0])[:PAGE]], at))
    back = [page(9, 4), page(9, 4)]
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, back)])
    assert drain(engine, 1)[0].complete
    assert np.array_equal(np.concatenate(data), np.concatenate(back))


def test_an_error_after_progress_tells_how_far_it_got(
    engine: PosixEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = engine.create(tmp_path / "a", 2 * PAGE)
    write = os.pwritev

    def full_after_a_page(fd: int, bufs: list[memoryview], at: int) -> int:
        if at:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, [bufs[0][:PAGE]], at)

    monkeypatch.setattr(os, "pwritev", full_after_a_page)
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page(1, 2)])])
    (result,) = drain(engine, 1)
    assert result.error is not None
    assert (result.error.errno, result.nbytes) == (errno.ENOSPC, PAGE)


def test_a_full_drive_refuses_to_reserve_and_leaves_no_file(engine: PosixEngine, tmpfs: Path) -> None:
    before = engine.free_nbytes(tmpfs)
    with pytest.raises(OSError, match="No space left"):
        engine.create(tmpfs / "a", 2 << 20)
    assert list(engine.list(tmpfs)) == []
    assert engine.free_nbytes(tmpfs) == before
    engine.create(tmpfs / "b", 1 << 19)
    assert engine.free_nbytes(tmpfs) == before - (1 << 19)


def test_a_full_drive_ends_a_write_short_or_with_an_error(engine: PosixEngine, tmpfs: Path) -> None:
    file = engine.create(tmpfs / "a", 0)
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [page(1, 512)])])
    (result,) = drain(engine, 1)
    assert not result.complete
    assert result.nbytes < 2 << 20
    assert result.error is None or result.error.errno == errno.ENOSPC


@pytest.mark.parametrize(("number", "ok"), [(errno.EOPNOTSUPP, True), (errno.EINVAL, True), (errno.EDQUOT, False)])
def test_a_file_system_without_fallocate_is_used_anyway(
    engine: PosixEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, ok: bool
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with contextlib.nullcontext() if ok else pytest.raises(OSError, match="no"):
        engine.create(tmp_path / "a", PAGE)
    assert (tmp_path / "a").exists() == ok


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_and_threads_return_to_their_start(tmp_path: Path) -> None:
    gc.collect()
    before = open_descriptors(), threading.active_count()
    engine = PosixEngine(threads=4)
    engine.create(tmp_path / "a", PAGE)  # left open: close() takes care of it
    for n in range(1000):
        path = tmp_path / ("a" if n % 2 else f"x{n}")
        engine.close_file(engine.open(path) if n % 2 else engine.create(path, 0))
        if n % 2 == 0:
            engine.unlink(path)
    with pytest.raises(FileExistsError):
        engine.create(tmp_path / "a", PAGE)
    assert open_descriptors() == before[0] + 1
    assert engine.close(10.0)
    assert (open_descriptors(), threading.active_count()) == before


def test_closing_a_file_under_a_running_request_waits_for_it(engine: PosixEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    with file.using() as fd:
        engine.close_file(file)
        os.fstat(fd)  # still open
        with pytest.raises(OSError, match="closed"), file.using():
            pass
    with pytest.raises(OSError, match="Errno 9"):
        os.fstat(fd)


def test_a_flood_of_stuck_demotions_does_not_stop_a_demand_read(tmp_path: Path) -> None:
    engine = PosixEngine(threads=3)
    file = engine.create(tmp_path / "a", PAGE)
    gate, stuck = threading.Event(), threading.Semaphore(0)

    def hang(_: IoResult) -> None:
        stuck.release()
        gate.wait(30)

    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=hang) for _ in range(20)])
    assert stuck.acquire(timeout=10)
    assert stuck.acquire(timeout=10)
    assert not stuck.acquire(blocking=False)  # the third thread is kept free
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()], tag="wanted")])
    assert [result.request.tag for result in drain(engine, 1)] == ["wanted"]
    gate.set()
    drain(engine, 20)
    assert engine.close(10.0)


def test_close_is_bounded_when_a_thread_hangs() -> None:
    engine = PosixEngine(threads=1)
    gate, started = threading.Event(), threading.Event()
    ran: list[IoResult] = []

    def hang(_: IoResult) -> None:
        started.set()
        gate.wait(30)

    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, finish=hang)])
    assert started.wait(10)
    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, finish=ran.append)])
    assert not engine.close(0.01)
    gate.set()
    assert len(drain(engine, 1)) == 1  # the late result still comes
    assert not engine.close(0.01)
    assert (ran, engine.in_flight) == ([], 1)  # what had not started never runs


def test_wake_from_another_thread() -> None:
    engine = PosixEngine(threads=1)
    waker = threading.Thread(target=engine.wake)
    waker.start()
    assert engine.poll(30.0) == []
    waker.join()
    assert engine.close(10.0)


def test_submitting_from_many_threads_loses_nothing(engine: PosixEngine) -> None:
    def submit(base: int) -> None:
        for n in range(100):
            engine.submit([IoRequest(IoKind.CALL, IoClass(n % 4), tag=base + n)])

    threads = [threading.Thread(target=submit, args=(base,)) for base in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    tags = sorted(int(str(result.request.tag)) for result in drain(engine, 400))
    assert tags == list(range(400))
    for thread in threads:
        thread.join()


def test_an_idle_engine_keeps_no_buffer_alive(engine: PosixEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    memory = page(1)
    gone = weakref.ref(memory)
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [memory])])
    drain(engine, 1)
    del memory
    assert engine.close(10.0)
    assert gone() is None


def test_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 thread"):
        PosixEngine(threads=0)


# Deadlines


@pytest.mark.parametrize("threads", [1, 4])
def test_what_a_thread_has_begun_at_its_deadline_is_told_and_what_waits_is_dropped(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PosixEngine(threads=threads)
    file = engine.create(tmp_path / "a", PAGE)
    go_on, begun = threading.Event(), threading.Semaphore(0)
    preadv = os.preadv

    def hang(*arguments: Any) -> int:
        begun.release()
        go_on.wait(30)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    stuck, waits = [page(7) for _ in range(threads)], page(8)
    rung = threading.Semaphore(0)
    engine.subscribe(rung.release)
    reads = [IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], deadline_s=0.05) for memory in stuck]
    engine.submit(reads)
    for _ in range(threads):
        assert begun.acquire(timeout=10)
    late = IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [waits], deadline_s=0.01, finish=lambda r: r.nbytes)
    engine.submit([late])
    if threads > 1:
        assert rung.acquire(timeout=10)  # a subscriber hears of it without a poll
    told: list[IoResult] = []
    while len(told) <= threads:
        told += engine.poll(10.0)
    assert all(result.expired for result in told)
    assert [result.request for result in told if not result.lent] == [late]
    assert {result.request for result in told if result.lent} == set(reads)
    assert engine.in_flight == threads
    go_on.set()
    assert all(result.complete for result in drain(engine, threads))
    assert (engine.in_flight, bool((waits == 8).all())) == (0, True)
    assert engine.close(10.0)


def test_what_waits_is_not_searched_for_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: a search compares requests. 1000 are due in the reverse of their order: half a million comparisons."""
    compared = 0

    def count(self: Given, other: object) -> bool:
        nonlocal compared
        compared += 1
        return self is other

    monkeypatch.setattr(Given, "__eq__", count)
    engine = PosixEngine(threads=1)
    file = engine.create(tmp_path / "a", PAGE)
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: IoResult) -> None:
        begun.set()
        assert go_on.wait(10.0)

    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, finish=hold)])
    assert begun.wait(10.0)
    reads = [
        IoRequest(IoKind.READ, IoClass.SCRUB, file, 0, [page()], deadline_s=(1000 - n) * 1e-6) for n in range(1000)
    ]
    engine.submit(reads)
    results = drain(engine, 1000)
    assert all(result.expired and not result.lent for result in results)
    go_on.set()
    assert [result.crash for result in drain(engine, 1)] == [None]
    assert engine.close(10.0)
    assert compared < 1000


def test_a_request_that_has_ended_is_not_kept_until_its_deadline(engine: PosixEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    memory = page()
    gone = weakref.ref(memory)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], deadline_s=1000.0)])
    drain(engine, 1)
    del memory
    assert engine.close(10.0)
    gc.collect()
    assert gone() is None


# Processes


def test_a_fork_is_refused_and_does_not_disturb_its_parent(tmp_path: Path) -> None:
    """Also with the engine's lock taken at that moment, which nobody gives back in the child."""
    code = """
        import os, sys
        from pathlib import Path
        from kvterrace.errors import StoreClosedError
        from kvterrace.io import IoClass, IoKind, IoRequest, PosixEngine

        engine = PosixEngine()
        file = engine.create(Path(sys.argv[1]) / "a", 4096)
        engine._lock.acquire()
        child = os.fork()
        if child == 0:
            for call in (
                lambda: engine.submit([]),
                lambda: engine.poll(1000.0),
                lambda: engine.open(Path(sys.argv[1]) / "a"),
                lambda: engine.truncate(file, 0),
            ):
                try:
                    call()
                except StoreClosedError as error:
                    assert "not to its fork" in str(error)
                else:
                    os._exit(3)
            engine.wake()
            sys.exit(0 if engine.close(1000.0) and engine.in_flight == 0 else 4)
        engine._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        engine.submit([IoRequest(IoKind.SYNC, IoClass.DEMAND, file)])
        assert engine.poll(10.0)[0].complete
        assert os.stat(Path(sys.argv[1]) / "a").st_size == 4096
        assert engine.close(10.0)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
