"""What every I/O engine must do, run against each of them: a small conformance suite."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.clock import ManualClock
from kvterrace.errors import StoreClosedError
from kvterrace.io import PAGE_NBYTES, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult, PosixEngine
from kvterrace.io.fake import FakeDevice

PAGE = PAGE_NBYTES


def buffers(count: int, nbytes: int = PAGE) -> list[Bytes]:
    memory: Bytes = np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8)
    return [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def pattern(count: int, nbytes: int = PAGE, seed: int = 0) -> list[Bytes]:
    made = buffers(count, nbytes)
    rng = np.random.default_rng(seed)
    for buffer in made:
        buffer[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return made


@pytest.fixture(params=["posix", "posix-1-thread", "fake"])
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    made: IoEngine
    match request.param:
        case "posix":
            made = PosixEngine(threads=4)
        case "posix-1-thread":
            made = PosixEngine(threads=1)
        case _:
            made = FakeDevice(ManualClock())
    yield made
    assert made.close(10.0)


def drain(engine: IoEngine, count: int) -> list[IoResult]:
    results: list[IoResult] = []
    for _ in range(1000):
        if len(results) >= count:
            break
        results += engine.poll(10.0)
    assert len(results) == count
    return results


def do(
    engine: IoEngine, kind: IoKind, file: IoFile | None = None, offset: int = 0, memory: Sequence[Bytes] = ()
) -> IoResult:
    engine.submit([IoRequest(kind, IoClass.DEMAND, file, offset, memory)])
    return drain(engine, 1)[0]


def written(engine: IoEngine, path: Path, content: Sequence[Bytes]) -> IoFile:
    file = engine.create(path, sum(buffer.nbytes for buffer in content))
    assert do(engine, IoKind.WRITE, file, 0, content).complete
    return file


def test_many_buffers_go_out_and_come_back_in_order(engine: IoEngine, tmp_path: Path) -> None:
    data = pattern(2500)  # more than two times IOV_MAX
    file = written(engine, tmp_path / "a", data)
    assert do(engine, IoKind.SYNC, file).complete
    back = buffers(2500)
    result = do(engine, IoKind.READ, file, 0, back)
    assert result.complete
    assert result.nbytes == 2500 * PAGE
    assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))


def test_buffers_of_different_sizes_at_an_offset(engine: IoEngine, tmp_path: Path) -> None:
    data = pattern(8)
    file = written(engine, tmp_path / "a", data)
    memory = buffers(1, 6 * PAGE)[0]
    parts = [memory[:PAGE], memory[PAGE : 4 * PAGE], memory[4 * PAGE :]]
    assert do(engine, IoKind.READ, file, 2 * PAGE, parts).complete
    assert np.array_equal(memory, np.concatenate(data[2:]))


@pytest.mark.parametrize("nbytes", [0, 100, PAGE, PAGE + 512, 2 * PAGE])
def test_a_read_past_the_end_is_short_and_says_so(engine: IoEngine, tmp_path: Path, nbytes: int) -> None:
    data = pattern(2)
    file = written(engine, tmp_path / "a", data)
    engine.truncate(file, nbytes)
    back = buffers(3)
    result = do(engine, IoKind.READ, file, 0, back)
    assert (result.error, result.nbytes, result.complete) == (None, nbytes, False)
    assert np.array_equal(np.concatenate(back)[:nbytes], np.concatenate(data)[:nbytes])
    assert engine.read_now(file, 0, buffers(1, 3 * PAGE)[0]) == nbytes
    assert engine.read_now(file, 8 * PAGE, back[0]) == 0


def test_reserved_space_reads_as_zeros_and_is_counted(engine: IoEngine, tmp_path: Path) -> None:
    before = engine.free_nbytes(tmp_path)
    file = engine.create(tmp_path / "a", 64 * PAGE)
    (info,) = engine.list(tmp_path)
    assert (info.name, info.nbytes) == ("a", 64 * PAGE)
    assert info.allocated_nbytes >= 64 * PAGE
    back = pattern(64)
    assert do(engine, IoKind.READ, file, 0, back).complete
    assert not np.concatenate(back).any()
    assert before > 0


@pytest.mark.parametrize("make", [lambda: PosixEngine(threads=1), lambda: FakeDevice(ManualClock(), parallel=1)])
def test_classes_go_in_order_and_first_come_first_served_within(make: Callable[[], IoEngine]) -> None:
    engine = make()
    order: list[tuple[IoClass, int]] = []

    def note(result: IoResult) -> None:
        tag = result.request.tag
        assert isinstance(tag, tuple)
        order.append(tag)

    classes = [IoClass.SCRUB, IoClass.DEMOTION, IoClass.PREFETCH, IoClass.DEMAND] * 3
    engine.submit([IoRequest(IoKind.CALL, cls, tag=(cls, n), finish=note) for n, cls in enumerate(classes)])
    drain(engine, 12)
    assert order == sorted(order)
    assert engine.close(10.0)


def test_finish_sees_the_result_and_its_crash_is_reported(engine: IoEngine, tmp_path: Path) -> None:
    file = written(engine, tmp_path / "a", pattern(1))

    def crash(result: IoResult) -> object:
        raise SystemExit(f"saw {result.nbytes}")

    back = buffers(2)
    engine.submit(
        [
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, back[:1], finish=lambda result: result.nbytes, tag="good"),
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, back[1:], finish=crash, tag="bad"),
            IoRequest(IoKind.CALL, IoClass.SCRUB, finish=lambda result: result.complete, tag="call"),
        ]
    )
    by_tag = {result.request.tag: result for result in drain(engine, 3)}
    assert (by_tag["good"].value, by_tag["good"].crash) == (PAGE, None)
    assert isinstance(by_tag["bad"].crash, SystemExit)
    assert by_tag["bad"].complete
    assert by_tag["call"].value is True
    assert do(engine, IoKind.READ, file, 0, back[:1]).complete  # the thread lives on


def test_errors_are_results(engine: IoEngine, tmp_path: Path) -> None:
    file = written(engine, tmp_path / "a", pattern(1))
    reader = engine.open(tmp_path / "a")
    page = buffers(1)[0]
    finished: list[IoResult] = []
    engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, reader, 0, [page], finish=finished.append)])
    (refused,) = drain(engine, 1)
    assert finished == [refused]
    for result, number in [
        (refused, errno.EBADF),
        (do(engine, IoKind.READ, file, 1, [page]), errno.EINVAL),
        (do(engine, IoKind.READ, file, 0, [page[:100]]), errno.EINVAL),
        (do(engine, IoKind.READ, None, 0, [page]), errno.EINVAL),
    ]:
        assert result.error is not None
        assert (result.error.errno, result.nbytes, result.complete) == (number, 0, False)
    with pytest.raises(OSError, match="22"):
        engine.read_now(file, 17, page)


def test_file_calls_raise(engine: IoEngine, tmp_path: Path) -> None:
    written(engine, tmp_path / "a", pattern(1))
    with pytest.raises(FileExistsError):
        engine.create(tmp_path / "a", PAGE)
    with pytest.raises(FileNotFoundError):
        engine.open(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        engine.reopen(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        engine.unlink(tmp_path / "b")
    assert list(engine.list(tmp_path / "nowhere")) == []


def test_a_reopened_file_can_be_written_and_cut(engine: IoEngine, tmp_path: Path) -> None:
    engine.close_file(written(engine, tmp_path / "a", pattern(3)))
    file = engine.reopen(tmp_path / "a")
    data = pattern(1, seed=1)
    assert do(engine, IoKind.WRITE, file, PAGE, data).complete
    engine.truncate(file, 2 * PAGE)
    back = buffers(3)
    assert do(engine, IoKind.READ, file, 0, back).nbytes == 2 * PAGE
    assert np.array_equal(back[0], pattern(3)[0])
    assert np.array_equal(back[1], data[0])


def test_list_is_sorted_and_unlink_removes(engine: IoEngine, tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        engine.close_file(engine.create(tmp_path / name, PAGE))
    assert [info.name for info in engine.list(tmp_path)] == ["a", "b", "c"]
    engine.unlink(tmp_path / "b")
    engine.sync_folder(tmp_path)
    assert [info.name for info in engine.list(tmp_path)] == ["a", "c"]


def test_an_open_file_outlives_its_name(engine: IoEngine, tmp_path: Path) -> None:
    data = pattern(1)
    file = written(engine, tmp_path / "a", data)
    engine.unlink(tmp_path / "a")
    back = buffers(1)
    assert do(engine, IoKind.READ, file, 0, back).complete
    assert np.array_equal(back[0], data[0])


def test_use_after_close_is_refused_even_if_the_number_was_given_away(engine: IoEngine, tmp_path: Path) -> None:
    file = written(engine, tmp_path / "a", pattern(1))
    engine.close_file(file)
    engine.close_file(file)
    other = written(engine, tmp_path / "b", pattern(1, seed=1))  # takes the descriptor number over
    page = buffers(1)
    for kind, memory in [(IoKind.READ, page), (IoKind.WRITE, page), (IoKind.SYNC, [])]:
        error = do(engine, kind, file, 0, memory).error
        assert error is not None
        assert error.errno == errno.EBADF
    with pytest.raises(OSError, match="Errno 9"):
        engine.read_now(file, 0, page[0])
    with pytest.raises(OSError, match="Errno 9"):
        engine.truncate(file, 0)
    assert engine.read_now(other, 0, page[0]) == PAGE
    assert np.array_equal(page[0], pattern(1, seed=1)[0])


def test_wake_ends_the_next_poll_once(engine: IoEngine) -> None:
    engine.wake()
    assert engine.poll(1000.0) == []  # does not wait for it
    assert engine.poll(0.0) == []


def test_in_flight_counts_until_polled(engine: IoEngine) -> None:
    assert engine.in_flight == 0
    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND) for _ in range(5)])
    assert engine.in_flight == 5
    drain(engine, 5)
    assert engine.in_flight == 0


def test_close_waits_for_what_is_in_flight_and_refuses_more(engine: IoEngine, tmp_path: Path) -> None:
    file = engine.create(tmp_path / "a", 256 * PAGE)
    data = pattern(256)
    engine.submit(
        [
            IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, n * PAGE, [buffer], finish=lambda _: "done")
            for n, buffer in enumerate(data)
        ]
    )
    assert engine.close(10.0)
    assert engine.close(10.0)
    results = engine.poll(1000.0)
    assert len(results) == 256
    assert all(result.complete and result.value == "done" for result in results)
    assert engine.poll(1000.0) == []
    with pytest.raises(StoreClosedError):
        engine.submit([])
    with pytest.raises(StoreClosedError):
        engine.open(tmp_path / "a")
