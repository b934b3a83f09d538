"""What every `IoEngine` must do."""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.errors import StoreClosedError
from kvterrace.io.base import PAGE_NBYTES, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult

__all__ = ["EngineConformance", "aligned", "noise", "raises"]

_PAGE = PAGE_NBYTES


def aligned(count: int, nbytes: int = _PAGE) -> list[Bytes]:
    """`count` zeroed, page-aligned buffers of `nbytes` (whole pages), one behind the other in memory."""
    memory: Bytes = np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8)
    return [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def noise(count: int, nbytes: int = _PAGE, seed: int = 0) -> list[Bytes]:
    """The same, full of bytes that follow from `seed`."""
    made = aligned(count, nbytes)
    rng = np.random.default_rng(seed)
    for buffer in made:
        buffer[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return made


@contextlib.contextmanager
def raises(kind: type[BaseException], number: int | None = None) -> Iterator[None]:
    """The block must raise `kind`, with this errno if one is given."""
    caught: BaseException | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"{kind.__name__} was not raised"
    if number is not None:
        assert isinstance(caught, OSError) and caught.errno == number, f"{caught!r} instead of errno {number}"


class EngineConformance:
    """Subclass it, say how to make an engine, and let pytest collect the subclass (or call its `test_` methods, each
    between `setup_method` and `teardown_method`). Every test has an engine and an empty folder of its own.
    """

    engine: IoEngine
    folder: Path

    def make_engine(self) -> IoEngine:
        """A new engine."""
        raise NotImplementedError("say how to make the engine under test")

    def make_serial_engine(self) -> IoEngine | None:
        """A new engine that does one thing at a time, so that order shows; None if it cannot be told to."""
        return None

    def setup_method(self) -> None:
        """Make engine and folder. The folder is on the file system of $TMPDIR; override it for an engine elsewhere."""
        self._temporary = tempfile.TemporaryDirectory(prefix="kvterrace-")
        self.folder = Path(self._temporary.name)
        self.engine = self.make_engine()

    def teardown_method(self) -> None:
        """Close the engine: nothing may be left in flight."""
        ended = self.engine.close(10.0)
        self._temporary.cleanup()
        assert ended, "close(10.0) says that something hangs"

    # Tools

    def drain(self, count: int) -> list[IoResult]:
        """Poll until `count` results have come."""
        return _drain(self.engine, count)

    def do(self, kind: IoKind, file: IoFile | None = None, offset: int = 0, memory: Sequence[Bytes] = ()) -> IoResult:
        """One request, and its result."""
        self.engine.submit([IoRequest(kind, IoClass.DEMAND, file, offset, memory)])
        return self.drain(1)[0]

    def written(self, name: str, content: Sequence[Bytes]) -> IoFile:
        """A new file with this content."""
        file = self.engine.create(self.folder / name, sum(buffer.nbytes for buffer in content))
        assert self.do(IoKind.WRITE, file, 0, content).complete
        return file

    # Data

    def test_many_buffers_go_out_and_come_back_in_order(self) -> None:
        data = noise(2500)  # more than two times IOV_MAX
        file = self.written("a", data)
        assert self.do(IoKind.SYNC, file).complete
        back = aligned(2500)
        result = self.do(IoKind.READ, file, 0, back)
        assert result.complete
        assert result.nbytes == 2500 * _PAGE
        assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))

    def test_buffers_of_different_sizes_at_an_offset(self) -> None:
        data = noise(8)
        file = self.written("a", data)
        memory = aligned(1, 6 * _PAGE)[0]
        parts = [memory[:_PAGE], memory[_PAGE : 4 * _PAGE], memory[4 * _PAGE :]]
        assert self.do(IoKind.READ, file, 2 * _PAGE, parts).complete
        assert np.array_equal(memory, np.concatenate(data[2:]))

    def test_many_in_flight_keep_apart(self) -> None:
        data = noise(128)
        file = self.engine.create(self.folder / "a", 128 * _PAGE)
        order = np.random.default_rng(1).permutation(128).tolist()
        self.engine.submit([IoRequest(IoKind.WRITE, IoClass(n % 4), file, n * _PAGE, [data[n]]) for n in order])
        assert all(result.complete for result in self.drain(128))
        back = aligned(128)
        self.engine.submit([IoRequest(IoKind.READ, IoClass(n % 4), file, n * _PAGE, [back[n]], tag=n) for n in order])
        results = self.drain(128)
        assert sorted(int(str(result.request.tag)) for result in results) == list(range(128))
        assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))

    def test_a_read_past_the_end_is_short_and_says_so(self) -> None:
        for nbytes in (0, 100, _PAGE, _PAGE + 512, 2 * _PAGE):
            data = noise(2)
            file = self.written(f"a{nbytes}", data)
            self.engine.truncate(file, nbytes)
            back = aligned(3)
            result = self.do(IoKind.READ, file, 0, back)
            assert (result.error, result.nbytes, result.complete) == (None, nbytes, False)
            assert np.array_equal(np.concatenate(back)[:nbytes], np.concatenate(data)[:nbytes])
            assert self.engine.read_now(file, 0, aligned(1, 3 * _PAGE)[0]) == nbytes
            assert self.engine.read_now(file, 8 * _PAGE, back[0]) == 0

    def test_reserved_space_reads_as_zeros_and_is_counted(self) -> None:
        before = self.engine.free_nbytes(self.folder)
        file = self.engine.create(self.folder / "a", 64 * _PAGE)
        (info,) = self.engine.list(self.folder)
        assert (info.name, info.nbytes) == ("a", 64 * _PAGE)
        assert info.allocated_nbytes >= 64 * _PAGE
        back = noise(64)
        assert self.do(IoKind.READ, file, 0, back).complete
        assert not np.concatenate(back).any()
        assert before > 0

    # Requests

    def test_classes_go_in_order_and_first_come_first_served_within(self) -> None:
        engine = self.make_serial_engine()
        if engine is None:
            return
        order: list[tuple[int, int]] = []

        def note(result: IoResult) -> None:
            tag = result.request.tag
            assert isinstance(tag, tuple)
            order.append(tag)

        classes = [IoClass.SCRUB, IoClass.DEMOTION, IoClass.PREFETCH, IoClass.DEMAND] * 3
        engine.submit([IoRequest(IoKind.CALL, cls, tag=(int(cls), n), finish=note) for n, cls in enumerate(classes)])
        _drain(engine, 12)
        assert order == sorted(order)
        assert engine.close(10.0)

    def test_finish_sees_the_result_and_its_crash_is_reported(self) -> None:
        file = self.written("a", noise(1))

        def crash(result: IoResult) -> object:
            raise SystemExit(f"saw {result.nbytes}")

        back = aligned(2)
        read, demand = IoKind.READ, IoClass.DEMAND
        self.engine.submit(
            [
                IoRequest(read, demand, file, 0, back[:1], finish=lambda result: result.nbytes, tag="good"),
                IoRequest(read, demand, file, 0, back[1:], finish=crash, tag="bad"),
                IoRequest(IoKind.CALL, IoClass.SCRUB, finish=lambda result: result.complete, tag="call"),
            ]
        )
        by_tag = {result.request.tag: result for result in self.drain(3)}
        assert (by_tag["good"].value, by_tag["good"].crash) == (_PAGE, None)
        assert isinstance(by_tag["bad"].crash, SystemExit)
        assert by_tag["bad"].complete
        assert by_tag["call"].value is True
        assert self.do(IoKind.READ, file, 0, back[:1]).complete  # the thread lives on

    def test_finish_runs_once_for_every_request(self) -> None:
        ran: list[object] = []
        file = self.written("a", noise(1))
        back = aligned(8)
        requests = [IoRequest(IoKind.READ, IoClass.DEMAND, file, n * _PAGE, [back[n]]) for n in range(8)]
        for request in requests:
            request.finish = ran.append
        self.engine.submit(requests)
        assert {id(result) for result in self.drain(8)} == {id(result) for result in ran}
        assert len(ran) == 8

    def test_errors_are_results(self) -> None:
        file = self.written("a", noise(1))
        reader = self.engine.open(self.folder / "a")
        page = aligned(1)[0]
        finished: list[IoResult] = []
        self.engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, reader, 0, [page], finish=finished.append)])
        (refused,) = self.drain(1)
        assert finished == [refused]
        for result, number in [
            (refused, errno.EBADF),
            (self.do(IoKind.READ, file, 1, [page]), errno.EINVAL),
            (self.do(IoKind.READ, file, 0, [page[:100]]), errno.EINVAL),
            (self.do(IoKind.READ, None, 0, [page]), errno.EINVAL),
        ]:
            assert result.error is not None
            assert (result.error.errno, result.nbytes, result.complete) == (number, 0, False)
        with raises(OSError, errno.EINVAL):
            self.engine.read_now(file, 17, page)

    def test_a_request_without_time_never_reaches_the_device(self) -> None:
        data = noise(1)
        file = self.written("a", data)
        back = noise(1, seed=1)
        finished: list[IoResult] = []
        late = [
            IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, back, deadline_s=0.0, tag="read"),
            IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, noise(1, seed=2), deadline_s=0.0, tag="write"),
            IoRequest(IoKind.SYNC, IoClass.DEMOTION, file, deadline_s=0.0, tag="sync"),
        ]
        for request in late:
            request.finish = finished.append
        self.engine.submit(late)
        results = self.drain(3)
        assert sorted(str(result.request.tag) for result in results) == ["read", "sync", "write"]
        assert {id(result) for result in finished} == {id(result) for result in results}
        assert len(finished) == 3
        for result in results:
            assert (result.expired, result.lent, result.complete) == (True, False, False)
            assert (result.nbytes, result.error, result.crash) == (0, None, None)
        assert self.engine.in_flight == 0
        assert np.array_equal(back[0], noise(1, seed=1)[0])
        assert self.do(IoKind.READ, file, 0, back).complete
        assert np.array_equal(back[0], data[0])

    def test_a_deadline_that_is_kept_changes_nothing(self) -> None:
        file = self.written("a", noise(4))
        back = aligned(4)
        self.engine.submit(
            [
                *(IoRequest(IoKind.READ, IoClass(n), file, n * _PAGE, [back[n]], deadline_s=1000.0) for n in range(4)),
                IoRequest(IoKind.CALL, IoClass.DEMAND, deadline_s=0.0, finish=lambda _: "called"),
            ]
        )
        results = self.drain(5)
        assert all(result.complete and not result.expired and not result.lent for result in results)
        assert [result.value for result in results if result.request.kind is IoKind.CALL] == ["called"]
        assert np.array_equal(np.concatenate(back), np.concatenate(noise(4)))
        assert self.engine.in_flight == 0

    def test_wake_ends_the_next_poll_once(self) -> None:
        self.engine.wake()
        assert self.engine.poll(1000.0) == []  # does not wait for it
        assert self.engine.poll(0.0) == []

    def test_in_flight_counts_until_polled(self) -> None:
        assert self.engine.in_flight == 0
        self.engine.submit([IoRequest(IoKind.CALL, IoClass.DEMAND) for _ in range(5)])
        assert self.engine.in_flight == 5
        self.drain(5)
        assert self.engine.in_flight == 0

    # Files

    def test_file_calls_raise(self) -> None:
        self.written("a", noise(1))
        with raises(FileExistsError):
            self.engine.create(self.folder / "a", _PAGE)
        for call in (self.engine.open, self.engine.reopen, self.engine.unlink):
            with raises(FileNotFoundError):
                call(self.folder / "b")
        assert list(self.engine.list(self.folder / "nowhere")) == []

    def test_a_reopened_file_can_be_written_and_cut(self) -> None:
        self.engine.close_file(self.written("a", noise(3)))
        file = self.engine.reopen(self.folder / "a")
        data = noise(1, seed=1)
        assert self.do(IoKind.WRITE, file, _PAGE, data).complete
        self.engine.truncate(file, 2 * _PAGE)
        back = aligned(3)
        assert self.do(IoKind.READ, file, 0, back).nbytes == 2 * _PAGE
        assert np.array_equal(back[0], noise(3)[0])
        assert np.array_equal(back[1], data[0])

    def test_list_is_sorted_and_unlink_removes(self) -> None:
        for name in ("b", "c", "a"):
            self.engine.close_file(self.engine.create(self.folder / name, _PAGE))
        assert [info.name for info in self.engine.list(self.folder)] == ["a", "b", "c"]
        self.engine.unlink(self.folder / "b")
        self.engine.sync_folder(self.folder)
        assert [info.name for info in self.engine.list(self.folder)] == ["a", "c"]

    def test_an_open_file_outlives_its_name(self) -> None:
        data = noise(1)
        file = self.written("a", data)
        self.engine.unlink(self.folder / "a")
        back = aligned(1)
        assert self.do(IoKind.READ, file, 0, back).complete
        assert np.array_equal(back[0], data[0])

    def test_use_after_close_is_refused_even_if_the_number_was_given_away(self) -> None:
        file = self.written("a", noise(1))
        self.engine.close_file(file)
        self.engine.close_file(file)
        other = self.written("b", noise(1, seed=1))  # takes the descriptor number over
        page = aligned(1)
        for kind, memory in [(IoKind.READ, page), (IoKind.WRITE, page), (IoKind.SYNC, [])]:
            error = self.do(kind, file, 0, memory).error
            assert error is not None
            assert error.errno == errno.EBADF
        with raises(OSError, errno.EBADF):
            self.engine.read_now(file, 0, page[0])
        with raises(OSError, errno.EBADF):
            self.engine.truncate(file, 0)
        assert self.engine.read_now(other, 0, page[0]) == _PAGE
        assert np.array_equal(page[0], noise(1, seed=1)[0])

    def test_close_waits_for_what_is_in_flight_and_refuses_more(self) -> None:
        file = self.engine.create(self.folder / "a", 256 * _PAGE)
        data = noise(256)
        self.engine.submit(
            [
                IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, n * _PAGE, [buffer], finish=lambda _: "done")
                for n, buffer in enumerate(data)
            ]
        )
        assert self.engine.close(10.0)
        assert self.engine.close(10.0)
        results = self.engine.poll(1000.0)
        assert len(results) == 256
        assert all(result.complete and result.value == "done" for result in results)
        assert self.engine.poll(1000.0) == []
        with raises(StoreClosedError):
            self.engine.submit([])
        with raises(StoreClosedError):
            self.engine.open(self.folder / "a")


def _drain(engine: IoEngine, count: int) -> list[IoResult]:
    results: list[IoResult] = []
    for _ in range(1000):
        if len(results) >= count:
            break
        results += engine.poll(10.0)
    assert len(results) == count, f"{len(results)} results for {count} requests"
    return results
