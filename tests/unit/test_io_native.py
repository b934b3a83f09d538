"""The engines of the extension module: what only real files, descriptors, threads, forks and filters can show."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import mmap
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from kvterrace import _native
from kvterrace.buffers import Bytes
from kvterrace.errors import ConfigError, StoreClosedError
from kvterrace.io import PAGE_NBYTES, IoClass, IoEngine, IoKind, IoRequest, IoResult, PosixEngine
from kvterrace.io.native import NativeEngine, NativePosixEngine, UringEngine
from kvterrace.io.probe import why_not_uring

PAGE = PAGE_NBYTES
KINDS = ["uring", "native-posix"]


def make(kind: str, *, workers: int = 4) -> NativeEngine:
    if kind == "uring" and (reason := why_not_uring()):
        pytest.skip(reason)
    return UringEngine(workers=workers) if kind == "uring" else NativePosixEngine(workers=workers)


def page(value: int = 0, count: int = 1) -> Bytes:
    memory: Bytes = np.frombuffer(mmap.mmap(-1, count * PAGE), dtype=np.uint8)
    memory[:] = value
    return memory


def drain(engine: IoEngine, count: int) -> list[IoResult]:
    results: list[IoResult] = []
    for _ in range(10_000):
        if len(results) >= count:
            break
        results += engine.poll(10.0)
    assert len(results) == count
    return results


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    made = make(request.param)
    yield made
    assert made.close(10.0)


def test_files_are_private_and_direct(engine: NativeEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 16 * PAGE)
    info = (tmp_path / "a").stat()
    assert (info.st_mode & 0o777, info.st_size) == (0o600, 16 * PAGE)
    if not file.direct:
        pytest.skip(f"{tmp_path} refuses O_DIRECT")
    with file.using() as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def cached_pages(path: Path) -> int:
    """Pages of a file that the page cache holds, by `fincore` of util-linux."""
    shown = subprocess.run(["fincore", "-nb", "-o", "PAGES", path], capture_output=True, text=True, check=True)
    return int(shown.stdout)


@pytest.mark.usefixtures("buffered")
def test_without_direct_io_it_warns_once_a_folder_and_leaves_nothing_in_the_page_cache(
    engine: NativeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        file = engine.create(tmp_path / "a", 4 * PAGE)
        assert not file.direct
        assert not engine.open(tmp_path / "a").direct
    assert [record.getMessage() for record in caplog.records] == [
        f"{engine.name}: {tmp_path} refuses O_DIRECT; reading and writing through the page cache"
    ]
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page(1, 3)])])
    assert drain(engine, 1)[0].complete
    assert cached_pages(tmp_path / "a") >= 3
    engine.submit([IoRequest(IoKind.SYNC, IoClass.DEMAND, file)])
    assert drain(engine, 1)[0].complete
    assert cached_pages(tmp_path / "a") == 0
    engine.truncate(file, PAGE + 1000)
    back = page(9, 2)
    assert engine.read_now(file, 0, back) == PAGE + 1000
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [back])])
    (result,) = drain(engine, 1)
    assert (result.nbytes, result.error) == (PAGE + 1000, None)
    assert (back[: PAGE + 1000] == 1).all()
    engine.submit([IoRequest(IoKind.SYNC, IoClass.DEMAND, file)])
    drain(engine, 1)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [back])])
    drain(engine, 1)
    assert cached_pages(tmp_path / "a") == 0


def test_a_full_drive_ends_a_write_short_or_with_an_error(engine: NativeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        file = engine.create(folder / "a", 0)
        engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [page(1, 512)])])
        (result,) = drain(engine, 1)
        assert not result.complete
        assert result.nbytes <= 1 << 20
        assert result.error is None or result.error.errno == errno.ENOSPC
        back = page(9, 512)
        readable = engine.read_now(file, 0, back)
        assert readable >= result.nbytes
        assert (back[: result.nbytes] == 1).all()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_an_error_names_the_file(engine: NativeEngine, tmp_path: Path) -> None:
    engine.create(tmp_path / "a", PAGE)
    reader = engine.open(tmp_path / "a")
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, reader, 0, [page()])])
    (result,) = drain(engine, 1)
    assert str(result.error) == f"[Errno 9] Bad file descriptor: '{tmp_path / 'a'}'"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: setattr(r, "offset", -PAGE), "offset -4096 is negative"),
        (lambda r: setattr(r, "offset", "far"), "no whole number"),
        (lambda r: setattr(r, "buffers", [page(0, 2)[::2]]), "contiguous"),
        (lambda r: setattr(r, "buffers", [np.zeros(PAGE, np.uint8).data.toreadonly()]), "not writable"),
        (lambda r: setattr(r, "buffers", ["text"]), "bytes-like"),
        (lambda r: setattr(r, "file", object()), "needs a file"),
    ],
)
def test_nonsense_is_refused_and_the_engine_lives_on(
    engine: NativeEngine, tmp_path: Path, spoil: Callable[[IoRequest], None], words: str
) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    request = IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()])
    spoil(request)
    engine.submit([request, IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()])])
    bad, good = sorted(drain(engine, 2), key=lambda result: result.complete)
    assert good.complete
    assert bad.error is not None and bad.error.errno == errno.EINVAL
    assert words in str(bad.error)


# Descriptors


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def native_threads() -> int:
    """Without the kernel's own for io_uring: those go a while after their ring."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended since
            count += not (task / "comm").read_text().startswith("iou-")
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_and_threads_return_to_their_start(kind: str, tmp_path: Path) -> None:
    make(kind).close(10.0)
    gc.collect()
    before = open_descriptors(), native_threads(), threading.active_count()
    engine = make(kind)
    empty = open_descriptors()
    engine.create(tmp_path / "a", PAGE)  # left open: close() takes care of it
    for n in range(1000):
        path = tmp_path / ("a" if n % 2 else f"x{n}")
        engine.close_file(engine.open(path) if n % 2 else engine.create(path, 0))
        if n % 2 == 0:
            engine.unlink(path)
    with pytest.raises(FileExistsError):
        engine.create(tmp_path / "a", PAGE)
    assert open_descriptors() == empty + 1
    assert engine.close(10.0)
    patience_s = time.monotonic() + 10.0
    while native_threads() > before[1] and time.monotonic() < patience_s:
        time.sleep(0.01)  # a thread that was joined may still be listed
    assert (open_descriptors(), native_threads(), threading.active_count()) == before


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = open_descriptors()  # of whatever ran in this process before
    resource.setrlimit(resource.RLIMIT_NOFILE, (others + 256, hard))
    try:
        for kind in KINDS:
            engine = make(kind)
            files = [engine.create(tmp_path / f"{kind}{n}", PAGE) for n in range(1500)]
            data = [page(n % 251, 1) for n in range(1500)]
            engine.submit(
                [IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [data[n]]) for n, file in enumerate(files)]
            )
            assert all(result.complete for result in drain(engine, 1500))
            back = [page(255) for _ in files]
            order = np.random.default_rng(3).permutation(1500).tolist()
            engine.submit([IoRequest(IoKind.READ, IoClass(n % 2), files[n], 0, [back[n]]) for n in order])
            assert all(result.complete for result in drain(engine, 1500))
            assert all((memory == n % 251).all() for n, memory in enumerate(back))
            assert engine.close(10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_parked_file_that_is_gone_is_an_error_of_its_requests(engine: NativeEngine, tmp_path: Path) -> None:
    first = engine.create(tmp_path / "first", PAGE)
    for n in range(600):
        engine.create(tmp_path / f"x{n}", 0)
    engine.unlink(tmp_path / "first")
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, first, 0, [page()])])
    (result,) = drain(engine, 1)
    assert result.error is not None and result.error.errno == errno.ENOENT
    with pytest.raises(FileNotFoundError):
        engine.read_now(first, 0, page())


def test_closing_a_file_under_its_user_waits_for_it(engine: NativeEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    with file.using() as fd:
        engine.close_file(file)
        os.fstat(fd)  # still open
        with pytest.raises(OSError, match="closed"), file.using():
            pass
    with pytest.raises(OSError, match="Errno 9"):
        os.fstat(fd)


# Threads


def test_submitting_from_many_threads_loses_nothing(engine: NativeEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 64 * PAGE)

    def submit(base: int) -> None:
        for n in range(100):
            read = IoRequest(IoKind.READ, IoClass(n % 4), file, n % 64 * PAGE, [page()], tag=base + n)
            engine.submit([read, IoRequest(IoKind.CALL, IoClass(n % 4), tag=base + n, finish=lambda _: None)])

    threads = [threading.Thread(target=submit, args=(base,)) for base in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    results = drain(engine, 800)
    assert sorted(int(str(result.request.tag)) for result in results) == sorted([*range(400)] * 2)
    assert all(result.complete for result in results)
    for thread in threads:
        thread.join()


def test_several_pollers_share_the_results(engine: NativeEngine) -> None:
    got: list[IoResult] = []

    def poll() -> None:
        while results := engine.poll(10.0):
            got.extend(results)

    threads = [threading.Thread(target=poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(200):
        engine.submit([IoRequest(IoKind.CALL, IoClass(n % 4), tag=n)])
    while engine.in_flight:
        pass
    assert engine.close(10.0)  # wakes them all
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    assert sorted(int(str(result.request.tag)) for result in got) == [*range(200)]


def test_wake_from_another_thread(engine: NativeEngine) -> None:
    waker = threading.Thread(target=engine.wake)
    waker.start()
    assert engine.poll(30.0) == []
    waker.join()


def test_a_subscriber_is_called_for_what_comes(engine: NativeEngine) -> None:
    rung = threading.Semaphore(0)
    assert engine.subscribe(rung.release)
    for n in range(20):
        engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND, tag=n)])
        results: list[IoResult] = []
        while not results:
            assert rung.acquire(timeout=10)
            results = engine.poll(0.0)
        assert [result.request.tag for result in results] == [n]
    while rung.acquire(blocking=False):
        pass
    engine.wake()
    assert rung.acquire(timeout=10)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_block_hold_up_nothing_else(kind: str, tmp_path: Path) -> None:
    engine = make(kind)
    file = engine.create(tmp_path / "a", PAGE)
    gate, stuck = threading.Event(), threading.Event()

    def hang(_: IoResult) -> None:
        stuck.set()
        gate.wait(30)

    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=hang) for _ in range(20)])
    assert stuck.wait(10)
    for io_class in IoClass:
        engine.submit([IoRequest(IoKind.READ, io_class, file, 0, [page()], finish=lambda _: "seen")])
        assert [result.value for result in drain(engine, 1)] == ["seen"]
    engine.submit([IoRequest(IoKind.CALL, IoClass.PREFETCH, finish=lambda _: "copied")])
    assert [result.value for result in drain(engine, 1)] == ["copied"]
    gate.set()
    drain(engine, 20)
    assert engine.close(10.0)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_block_run_beside_each_other(kind: str) -> None:
    """Four each wait for the other three."""
    engine = make(kind)
    met = threading.Barrier(4)

    def meet(_: IoResult) -> int:
        return met.wait(10.0)

    classes = [IoClass.DEMOTION, IoClass.DEMOTION, IoClass.SCRUB, IoClass.SCRUB]
    engine.submit([IoRequest(IoKind.CALL, io_class, finish=meet) for io_class in classes])
    results = drain(engine, 4)
    assert [result.crash for result in results] == [None] * 4
    assert {result.value for result in results} == {0, 1, 2, 3}
    assert engine.close(10.0)


def test_hooks_run_without_a_python_thread(engine: NativeEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    read, call, refused = (_native.Recorder() for _ in range(3))
    engine.submit(
        [
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page(1, 2)], finish=read),
            IoRequest(IoKind.CALL, IoClass.PREFETCH, finish=call),
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 1, [page()], finish=refused),
        ]
    )
    results = drain(engine, 3)
    assert [(one.runs, one.nbytes, one.error) for one in (read, call, refused)] == [
        (1, PAGE, 0),
        (1, 0, 0),
        (1, 0, errno.EINVAL),
    ]
    assert [result.value for result in results] == [None] * 3


def test_hooks_serve_any_engine(tmp_path: Path) -> None:
    hooks = [_native.Recorder() for _ in range(2)]
    engine = PosixEngine()
    file = engine.create(tmp_path / "a", PAGE)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, n, [page()], finish=hooks[n]) for n in range(2)])
    assert [result.crash for result in drain(engine, 2)] == [None, None]
    assert [(one.runs, one.nbytes, one.error) for one in hooks] == [(1, PAGE, 0), (1, 0, errno.EINVAL)]
    assert engine.close(10.0)


class UnnumberedError(OSError):
    """An error that lacks a number."""


@pytest.mark.parametrize("make_hook", [_native.Recorder, lambda: _native.ReadHook([])])
@pytest.mark.parametrize(
    ("error", "expired", "number"),
    [
        (None, False, 0),
        (OSError(errno.ENOSPC, "full"), False, errno.ENOSPC),
        (OSError(errno.EIO, "late"), True, errno.ECANCELED),
        (None, True, errno.ECANCELED),
        (UnnumberedError("?"), False, errno.EIO),
        (OSError(0, "nought"), False, errno.EIO),
    ],
)
def test_every_hook_takes_a_result_the_same_way(
    make_hook: Callable[[], _native.Hook], error: OSError | None, number: int, *, expired: bool
) -> None:
    """Called by an engine of Python. What came of a read of no records cannot be seen: there it must not raise."""
    result = IoResult(IoRequest(IoKind.CALL, IoClass.DEMAND), PAGE, error, expired=expired)
    hook = make_hook()
    assert hook(result) is None  # type: ignore[func-returns-value]
    if isinstance(hook, _native.Recorder):
        assert (hook.runs, hook.nbytes, hook.error) == (1, PAGE, number)


@pytest.mark.parametrize("kind", KINDS)
def test_close_is_bounded_when_a_finish_hangs(kind: str) -> None:
    engine = make(kind, workers=1)
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


def test_a_read_that_hangs_keeps_its_memory(tmp_path: Path) -> None:
    """A pipe as the drive that answers late: the read ends when somebody writes."""
    engine = make("uring")
    os.mkfifo(tmp_path / "pipe")
    file = engine.reopen(tmp_path / "pipe")
    memory = page(7)
    gone = weakref.ref(memory)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], tag="late")])
    other = engine.create(tmp_path / "a", PAGE)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, other, 0, [page()], tag="now")])
    assert [result.request.tag for result in drain(engine, 1)] == ["now"]
    assert not engine.close(0.01)
    where = memory.ctypes.data
    del memory
    gc.collect()
    assert gone() is not None
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    os.write(writer, bytes([5]) * PAGE)
    os.close(writer)
    (late,) = drain(engine, 1)
    back = late.request.buffers[0]
    assert (late.nbytes, back.ctypes.data, bool((back == 5).all())) == (PAGE, where, True)
    assert engine.close(10.0)  # nothing hangs any more
    assert open_is_refused(engine, tmp_path)


def test_a_read_that_hangs_past_its_deadline_is_told_and_called_back(tmp_path: Path) -> None:
    """A pipe as the drive: what it holds later goes to no buffer of ours."""
    engine = make("uring")
    os.mkfifo(tmp_path / "pipe")
    file = engine.reopen(tmp_path / "pipe")
    memory = page(7)
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], deadline_s=0.02)])
    results = drain(engine, 2)
    assert [(result.expired, result.lent, result.nbytes, result.error) for result in results] == [
        (True, True, 0, None),
        (True, False, 0, None),
    ]
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, bytes([5]) * PAGE)
    assert engine.close(10.0)  # nothing is in flight
    assert (memory == 7).all()
    assert os.read(writer, PAGE) == bytes([5]) * PAGE
    os.close(writer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_hangs_at_a_deadline_keeps_what_it_has_and_is_given_no_more(kind: str, tmp_path: Path) -> None:
    """A file without a descriptor whose name is a pipe by now: opening it again waits for a writer."""
    engine = UringEngine(depth=1) if make(kind).close(10.0) and kind == "uring" else NativePosixEngine(threads=1)
    engine.create(tmp_path / "a", PAGE)
    file = engine.open(tmp_path / "a")
    for n in range(600):
        engine.create(tmp_path / f"x{n}", 0)
    engine.unlink(tmp_path / "a")
    os.mkfifo(tmp_path / "a")
    memory, waiting = page(7), page(8)
    rung = threading.Semaphore(0)
    assert engine.subscribe(rung.release)
    requests = [
        IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [one], deadline_s=0.05, tag=n)
        for n, one in enumerate([memory, waiting])
    ]
    engine.submit(requests)
    while not rung.acquire(timeout=10) or not (told := engine.poll(0.0)):
        pass
    while len(told) < 2:
        told += engine.poll(10.0)
    assert sorted((str(result.request.tag), result.expired, result.lent) for result in told) == [
        ("0", True, True),
        ("1", True, False),
    ]
    assert engine.in_flight == 1
    os.close(os.open(tmp_path / "a", os.O_WRONLY))
    (late,) = drain(engine, 1)
    assert (late.request.tag, late.lent, late.complete) == (0, False, False)
    assert (memory == 7).all() and (waiting == 8).all()
    assert engine.close(10.0)


def open_is_refused(engine: NativeEngine, folder: Path) -> bool:
    try:
        engine.open(folder / "a")
    except StoreClosedError:
        return True
    return False


def test_an_idle_engine_keeps_no_buffer_alive(engine: NativeEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", PAGE)
    memory = page(1)
    gone = weakref.ref(memory)
    engine.submit(
        [
            IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [memory]),
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], finish=lambda result: result.nbytes),
        ]
    )
    drain(engine, 2)
    del memory
    assert engine.close(10.0)
    assert gone() is None


def test_registered_memory_is_read_into_and_written_from(engine: NativeEngine, tmp_path: Path) -> None:
    arena = page(0, 600)
    taken = engine.register_memory(arena)
    assert taken == (engine.name == "uring")  # 2.4 MB, within the default RLIMIT_MEMLOCK of 8 MiB
    rng = np.random.default_rng(5)
    arena[: 300 * PAGE] = rng.integers(0, 256, 300 * PAGE, dtype=np.uint8)
    file = engine.create(tmp_path / "a", 600 * PAGE)
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [arena[: 300 * PAGE], page(3, 4)])])
    assert drain(engine, 1)[0].complete
    parts = [arena[(300 + n) * PAGE : (301 + n) * PAGE] for n in range(300)]
    engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, parts)])
    assert drain(engine, 1)[0].complete
    assert np.array_equal(arena[: 300 * PAGE], arena[300 * PAGE :])


def test_registered_memory_stays_ours_after_a_fork(tmp_path: Path) -> None:
    """The parent's writes after a fork must reach the pages that the kernel pinned, private ones too."""
    make("uring").close(10.0)
    code = """
        from tests.unit.test_io_native import *
        engine = make("uring")
        arena = np.frombuffer(mmap.mmap(-1, 64 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        arena[:] = 1
        file = engine.create(Path(sys.argv[1]) / "a", 64 * PAGE)
        print(engine.register_memory(arena))
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        arena[:] = 2
        engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [arena])])
        assert drain(engine, 1)[0].complete
        print(set((Path(sys.argv[1]) / "a").read_bytes()))
        os.close(theirs)
        os.waitpid(child, 0)
        assert engine.close(10.0)
    """
    assert run(code, tmp_path) in ("True\n{2}\n", "False\n{2}\n")


def test_memory_is_registered_once(engine: NativeEngine) -> None:
    if not engine.register_memory(page()):
        pytest.skip("this engine registers nothing")
    with pytest.raises(AssertionError, match="registered before"):
        engine.register_memory(page())


def test_memory_beyond_the_limit_is_not_registered_and_all_goes_on(tmp_path: Path) -> None:
    if (reason := why_not_uring()) is not None:
        pytest.skip(reason)
    code = """
        import ctypes
        from tests.unit.test_io_native import *
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        libc = ctypes.CDLL(None, use_errno=True)
        header, caps = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, caps) == 0
        caps[0] &= ~(1 << 14)  # CAP_IPC_LOCK: no limit holds for it
        assert libc.capset(header, caps) == 0, ctypes.get_errno()
        engine = UringEngine()
        arena = page(0, 2048)
        print(engine.register_memory(arena))
        file = engine.create(Path(sys.argv[1]) / "a", PAGE)
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [arena[:PAGE]])])
        print(drain(engine, 1)[0].complete, engine.close(10.0))
    """
    assert run(code, tmp_path) == "False\nTrue True\n"


# Processes


def run(code: str, *arguments: Path) -> str:
    done = subprocess.run(
        # Python 3.12 warns of any fork beside threads; that it does no harm is what is tested here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_does_not_disturb_its_parent(kind: str, tmp_path: Path) -> None:
    make(kind).close(10.0)
    code = f"""
        from tests.unit.test_io_native import *
        engine = make({kind!r})
        file = engine.create(Path(sys.argv[1]) / "a", 64 * PAGE)
        arena = page(0, 64)
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()]) for _ in range(64)])
        child = os.fork()
        if child == 0:
            for call in (lambda: engine.submit([]), lambda: engine.poll(1000.0), lambda: engine.open(Path("/x"))):
                try:
                    call()
                except StoreClosedError as error:
                    assert "not to its fork" in str(error)
                else:
                    os._exit(3)
            engine.wake()
            sys.exit(0 if engine.close(1000.0) and engine.in_flight == 0 else 4)  # through the exit handlers
        assert os.waitpid(child, 0)[1] == 0
        assert all(result.complete for result in drain(engine, 64))
        engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page(1, 64)])])
        assert drain(engine, 1)[0].complete
        assert engine.close(10.0)
    """
    assert run(code, tmp_path) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_with_an_engine_open_and_busy(kind: str, tmp_path: Path) -> None:
    make(kind).close(10.0)
    code = f"""
        from tests.unit.test_io_native import *
        engine = make({kind!r})
        engine.subscribe(lambda: None)
        file = engine.create(Path(sys.argv[1]) / "a", 256 * PAGE)
        threading.Thread(target=lambda: [engine.poll(1.0) for _ in range(1000)], daemon=True).start()
        engine.submit([IoRequest(IoKind.READ, IoClass(n % 4), file, n * PAGE, [page()]) for n in range(256)])
        engine.submit([IoRequest(IoKind.CALL, IoClass.SCRUB, finish=lambda _: None) for n in range(256)])
    """
    for _ in range(5):
        assert run(code, tmp_path) == ""
        (tmp_path / "a").unlink()


def test_the_interpreter_ends_while_a_read_hangs(tmp_path: Path) -> None:
    make("uring").close(10.0)
    code = """
        from tests.unit.test_io_native import *
        logging.getLogger("kvterrace").addHandler(logging.NullHandler())
        engine = make("uring")
        os.mkfifo(Path(sys.argv[1]) / "pipe")
        file = engine.reopen(Path(sys.argv[1]) / "pipe")
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()])])
    """
    assert run(code, tmp_path) == ""


# Against a model


_REQUEST = st.tuples(st.sampled_from([IoKind.READ, IoKind.WRITE]), st.sampled_from(list(IoClass)), st.integers(0, 500))
_BATCH = st.lists(st.tuples(_REQUEST, st.lists(st.integers(0, 90), min_size=1, max_size=6)), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(batches=st.lists(_BATCH, min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_a_file_behaves_as_an_array_of_bytes(
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[tuple[IoKind, IoClass, int], list[int]]]],
    seed: int,
) -> None:
    """Requests of one batch may go in any order, so a request that touches what another of it writes waits for the
    next.
    """
    engine = make(kind)
    path = tmp_path_factory.mktemp("model") / "a"
    file = engine.create(path, 0)
    rng = np.random.default_rng(seed)
    model = np.zeros(0, np.uint8)
    for batch in batches:
        touched: list[tuple[int, int, bool]] = []
        submitted: list[tuple[IoRequest, Bytes]] = []
        grown = model.copy()
        for (what, io_class, first), sizes in batch:
            nbytes = sum(sizes) * PAGE
            start, end = first * PAGE, first * PAGE + nbytes
            writes = what is IoKind.WRITE
            # A read across the end of the file sees any write that makes it longer.
            if any((start < b and a < end) or (other != writes) for a, b, other in touched if other or writes):
                continue
            touched.append((start, end, writes))
            buffers = [page(0, size) if size else np.zeros(0, np.uint8) for size in sizes]
            want = np.concatenate(buffers)
            if writes:
                for buffer in buffers:
                    buffer[:] = rng.integers(0, 256, buffer.nbytes, dtype=np.uint8)
                want = np.concatenate(buffers)
                if nbytes and len(grown) < end:
                    grown = np.concatenate([grown, np.zeros(end - len(grown), np.uint8)])
                grown[start:end] = want
            submitted.append((IoRequest(what, io_class, file, start, buffers), want))
        engine.submit([request for request, _ in submitted])
        results = {id(result.request): result for result in drain(engine, len(submitted))}
        for request, want in submitted:
            result = results[id(request)]
            assert result.error is None
            if request.kind is IoKind.WRITE:
                assert result.nbytes == len(want)
            else:
                there = model[request.offset : request.offset + len(want)]
                assert result.nbytes == len(there)
                assert np.array_equal(np.concatenate(request.buffers)[: len(there)], there)
        model = grown
    assert path.stat().st_size == len(model)
    assert path.read_bytes() == model.tobytes()
    assert engine.close(10.0)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 worker"):
        NativePosixEngine(workers=0)
    with pytest.raises(ValueError, match="1 to 128"):
        NativePosixEngine(threads=0)
