"""What goes to the device when: classes, pieces and bounds, with a device whose completions the test makes up."""

from __future__ import annotations

import errno
import mmap
import os
import select
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from kvterrace import _native
from kvterrace.buffers import Bytes
from kvterrace.io import PAGE_NBYTES, IoClass

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE, SYNC, CALL = range(4)
DEMAND, PREFETCH, DEMOTION, SCRUB = (int(one) for one in IoClass)

#: Never written to or read: only where it lies counts.
MEMORY: Bytes = np.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=np.uint8)


class Bench:
    """A core on the device for tests, with one file."""

    def __init__(self, folder: Path, depth: int = 64, kind: str = "manual") -> None:
        self.core = _native.Core(kind, depth, False)
        path = folder / "a"
        path.touch()
        self.file, _ = _native.File.adopt(
            _native.FileTable(8), os.open(path, os.O_RDWR), os.fsencode(path), os.O_RDWR, True
        )
        self.ids = 0

    def submit(
        self, io_class: int, nbytes: int, kind: int = READ, offset: int = 0, deadline_s: float | None = None
    ) -> int:
        self.ids += 1
        buffers = () if kind == SYNC else (MEMORY[:nbytes],)
        assert self.core.submit([(self.ids, kind, io_class, self.file, offset, buffers, 0, None, deadline_s)])
        return self.ids

    def pull_all(self) -> list[tuple[int, int, int, int]]:
        """(number, id, place, bytes) of every piece that may start now."""
        pieces = []
        while (piece := self.core.pull()) is not None:
            pieces.append(piece[:4])
        return pieces

    def ended(self) -> list[tuple[int, int, int]]:
        """(id, bytes, errno) of what has ended."""
        return [row[:3] for row in self.core.take()[0]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_demand_read_is_cut_into_pieces_of_a_mebibyte(bench: Bench) -> None:
    bench.submit(DEMAND, 2 * MIB + 4 * KIB, offset=8 * KIB)
    assert [piece[2:] for piece in bench.pull_all()] == [
        (8 * KIB, MIB),
        (8 * KIB + MIB, MIB),
        (8 * KIB + 2 * MIB, 4 * KIB),
    ]


@pytest.mark.parametrize("io_class", [PREFETCH, DEMOTION, SCRUB])
def test_lower_classes_have_at_most_four_mebibytes_in_the_device(bench: Bench, io_class: int) -> None:
    bench.submit(io_class, 16 * MIB)
    pieces = bench.pull_all()
    assert [piece[3] for piece in pieces] == [512 * KIB] * 8
    assert bench.core.answer(pieces[0][0], 512 * KIB) is False
    assert [piece[2:] for piece in bench.pull_all()] == [(4 * MIB, 512 * KIB)]


def test_while_demand_reads_run_it_is_one_mebibyte(bench: Bench) -> None:
    bench.core.set_now(100.0)
    bench.submit(DEMAND, 4 * KIB)
    bench.submit(DEMOTION, 16 * MIB)
    (demand, *lower) = bench.pull_all()
    assert [piece[3] for piece in lower] == [512 * KIB] * 2
    bench.core.answer(demand[0], 4 * KIB)
    bench.core.set_now(100.0099)
    assert bench.pull_all() == []  # it was seen less than 10 ms ago
    bench.core.set_now(100.0101)
    assert [piece[3] for piece in bench.pull_all()] == [512 * KIB] * 6


def test_small_pieces_of_lower_classes_leave_places_for_demand(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=16)
    for _ in range(40):
        bench.submit(SCRUB, 4 * KIB)
    assert len(bench.pull_all()) == 8
    for _ in range(40):
        bench.submit(DEMAND, 4 * KIB)
    assert len(bench.pull_all()) == 8  # the depth


def test_a_depth_that_was_just_lowered_leaves_a_place_for_demand(tmp_path: Path) -> None:
    """A pool of 16 threads, 15 of them full of small pieces when 12 are tried: of those 11 are for lower classes."""
    bench = Bench(tmp_path, 16, "manual-posix")
    for _ in range(400):
        bench.submit(SCRUB, 4 * KIB)
    running = bench.pull_all()
    assert len(running) == 15
    now_s = 0.0
    while bench.core.depth == 16:
        now_s += 0.001
        bench.core.set_now(now_s)
        bench.core.answer(running.pop(0)[0], 4 * KIB)
        running += bench.pull_all()
    assert (bench.core.depth, len(running)) == (12, 14)
    first, second = bench.submit(DEMAND, 4 * KIB), bench.submit(DEMAND, 4 * KIB)
    (urgent,) = bench.pull_all()
    assert urgent[1] == first
    bench.core.answer(urgent[0], 4 * KIB)
    assert [piece[1] for piece in bench.pull_all()] == [second]


def test_nothing_starts_while_something_more_urgent_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=4)
    for io_class in (SCRUB, DEMOTION, PREFETCH, DEMAND) * 6:
        bench.submit(io_class, 4 * KIB)
    order = []
    running = bench.pull_all()
    while running:
        for number, id_, _, nbytes in running:
            order.append(3 - (id_ - 1) % 4)
            bench.core.answer(number, nbytes)
        running = bench.pull_all()
    assert order == sorted(order) == [DEMAND] * 6 + [PREFETCH] * 6 + [DEMOTION] * 6 + [SCRUB] * 6


def test_what_fits_does_not_slip_past_what_is_more_urgent_and_does_not_fit(bench: Bench) -> None:
    bench.submit(DEMAND, 4 * KIB)
    bench.submit(PREFETCH, 600 * KIB)
    assert [piece[3] for piece in bench.pull_all()] == [4 * KIB, 512 * KIB, 88 * KIB]
    bench.submit(DEMOTION, 4 * KIB)
    bench.submit(PREFETCH, 512 * KIB)  # 1112 KiB with what runs: more than while demand reads run
    bench.submit(SCRUB, 4 * KIB)
    assert [piece[3] for piece in bench.pull_all()] == []


def test_demand_overtakes_between_the_pieces_of_a_long_write(bench: Bench) -> None:
    bench.submit(DEMOTION, 16 * MIB, WRITE)
    running = bench.pull_all()
    wanted = bench.submit(DEMAND, 64 * KIB)
    assert [piece[1] for piece in bench.pull_all()] == [wanted]
    for number, *_, nbytes in running:
        bench.core.answer(number, nbytes)
    assert len(bench.pull_all()) == 2  # the write trickles on beside the read


def test_the_first_gap_decides_whatever_came_first(bench: Bench) -> None:
    id_ = bench.submit(DEMAND, 4 * MIB)
    numbers = [piece[0] for piece in bench.pull_all()]
    bench.core.answer(numbers[3], -errno.EIO)
    bench.core.answer(numbers[1], 8 * KIB)  # goes on ...
    assert bench.core.place(numbers[1]) == MIB + 8 * KIB
    bench.core.answer(numbers[1], 0)  # ... and ends there: end of file
    bench.core.answer(numbers[2], -errno.ENXIO)
    assert bench.ended() == []
    bench.core.answer(numbers[0], MIB)
    assert bench.ended() == [(id_, MIB + 8 * KIB, 0)]


def test_an_error_stops_what_has_not_started(bench: Bench) -> None:
    id_ = bench.submit(DEMOTION, 16 * MIB, WRITE)
    later = bench.submit(DEMOTION, 4 * KIB, WRITE)
    running = bench.pull_all()
    for number, *_, nbytes in running[:2]:
        bench.core.answer(number, nbytes)
    bench.core.answer(running[2][0], 4 * KIB)
    bench.core.answer(running[2][0], -errno.ENOSPC)
    assert [piece[1] for piece in bench.pull_all()] == [later]
    for number, *_, nbytes in running[3:]:
        bench.core.answer(number, nbytes)
    assert bench.ended() == [(id_, MIB + 4 * KIB, errno.ENOSPC)]


def test_interrupted_calls_are_repeated_and_errors_are_not(bench: Bench) -> None:
    id_ = bench.submit(DEMAND, 8 * KIB)
    ((number, *_),) = bench.pull_all()
    assert bench.core.answer(number, -errno.EINTR)
    assert bench.core.answer(number, -errno.EAGAIN)  # io_uring's own: it is told to block, and then means it
    assert bench.core.answer(number, 4 * KIB)
    assert not bench.core.answer(number, -errno.EAGAIN)
    assert bench.ended() == [(id_, 4 * KIB, errno.EAGAIN)]


def test_direct_io_does_not_go_on_from_an_unaligned_place(bench: Bench) -> None:
    id_ = bench.submit(DEMAND, 64 * KIB)
    ((number, *_),) = bench.pull_all()
    assert not bench.core.answer(number, 4 * KIB + 512)
    assert bench.ended() == [(id_, 4 * KIB + 512, 0)]


def test_a_sync_answers_nought_and_its_errors_count(bench: Bench) -> None:
    good, bad = bench.submit(DEMOTION, 0, SYNC), bench.submit(DEMOTION, 0, SYNC)
    first, second = bench.pull_all()
    bench.core.answer(second[0], -errno.EIO)
    bench.core.answer(first[0], 0)
    assert bench.ended() == [(bad, 0, errno.EIO), (good, 0, 0)]


def test_hooks_see_each_completion_once(bench: Bench) -> None:
    hooks = [_native.Recorder() for _ in range(3)]
    ops = [
        (n + 1, READ, DEMAND, bench.file, 0, (MEMORY[: 4 * KIB],), 1, hook, None) for n, hook in enumerate(hooks[:2])
    ]
    assert bench.core.submit([*ops, (3, CALL, DEMAND, None, 0, (), 1, hooks[2], None)])
    one, other = bench.pull_all()
    bench.core.answer(one[0], -errno.EIO)
    bench.core.answer(other[0], 4 * KIB)
    bench.core.close()
    assert select.select([bench.core.quiet_fd], [], [], 10.0)[0]
    assert sorted(bench.ended()) == [(1, 0, errno.EIO), (2, 4 * KIB, 0), (3, 0, 0)]
    assert [(hook.runs, hook.nbytes, hook.error) for hook in hooks] == [
        (1, 0, errno.EIO),
        (1, 4 * KIB, 0),
        (1, 0, 0),
    ]
    assert bench.core.end()


def test_what_had_not_started_when_it_ends_never_does(bench: Bench) -> None:
    started = bench.submit(DEMAND, 4 * KIB)
    ((number, *_),) = bench.pull_all()
    bench.submit(DEMAND, 4 * KIB)
    bench.core.close()
    assert not bench.core.end()
    assert bench.pull_all() == []
    bench.core.answer(number, 4 * KIB)
    assert bench.ended() == [(started, 4 * KIB, 0)]
    assert (bench.core.in_flight, bench.core.end()) == (1, False)


# Deadlines


def late(bench: Bench) -> list[tuple[int, int, int, bool, bool]]:
    """(id, bytes, errno, expired, lent) of what is there to take."""
    return [(*row[:3], *row[6:]) for row in bench.core.take()[0]]


def test_what_waits_at_its_deadline_never_goes_to_the_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=1)
    bench.core.set_now(50.0)
    first = bench.submit(DEMAND, 4 * KIB)
    ((number, *_),) = bench.pull_all()
    waits, other = bench.submit(DEMAND, 4 * KIB, deadline_s=2.0), bench.submit(DEMAND, 4 * KIB, deadline_s=3.0)
    bench.core.set_now(51.999)
    assert late(bench) == []
    bench.core.set_now(52.0)
    assert late(bench) == [(waits, 0, 0, True, False)]
    bench.core.answer(number, 4 * KIB)
    ((_, id_, *_),) = bench.pull_all()
    assert id_ == other
    assert late(bench) == [(first, 4 * KIB, 0, False, False)]
    assert bench.core.in_flight == 1


def test_what_leaves_the_middle_of_a_queue_at_its_deadline_leaves_the_rest_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=1)
    waiting = [bench.submit(SCRUB, 4 * KIB, deadline_s=None if n % 3 else 10.0 - n / 10) for n in range(30)]
    bench.core.set_now(10.1)
    assert sorted(id_ for id_, _, _ in bench.ended()) == waiting[::3]
    order = []
    while pieces := bench.pull_all():
        ((number, id_, _, nbytes),) = pieces
        order.append(id_)
        bench.core.answer(number, nbytes)
    assert order == [id_ for n, id_ in enumerate(waiting) if n % 3]


def test_what_is_in_the_device_at_its_deadline_is_told_once_and_lent_until_it_comes(bench: Bench) -> None:
    id_ = bench.submit(DEMAND, 4 * MIB, deadline_s=1.0)
    numbers = [piece[0] for piece in bench.pull_all()]
    bench.core.answer(numbers[0], MIB)
    bench.core.set_now(1.0)
    assert late(bench) == [(id_, 0, 0, True, True)]
    assert (bench.core.in_flight, bench.core.unfinished) == (1, 1)
    bench.core.set_now(9.0)
    assert late(bench) == []
    assert bench.core.recalls() == numbers[1:] and bench.core.recalls() == []
    assert not bench.core.answer(numbers[1], MIB)  # it was done before it could be called back
    assert not bench.core.answer(numbers[3], -errno.ECANCELED)
    assert late(bench) == []
    assert not bench.core.answer(numbers[2], -errno.EINTR)  # interrupted for being called back: not repeated
    assert late(bench) == [(id_, 2 * MIB, 0, True, False)]
    assert (bench.core.in_flight, bench.core.unfinished) == (0, 0)


def test_what_comes_whole_or_fails_after_its_deadline_says_so(bench: Bench) -> None:
    whole, failed, short = (bench.submit(DEMAND, 8 * KIB, deadline_s=1.0) for _ in range(3))
    pieces = bench.pull_all()
    bench.core.set_now(2.0)
    assert late(bench) == [(id_, 0, 0, True, True) for id_ in (whole, failed, short)]
    bench.core.recalls()
    bench.core.answer(pieces[0][0], 8 * KIB)
    bench.core.answer(pieces[1][0], -errno.EIO)
    assert not bench.core.answer(pieces[2][0], 4 * KIB)  # what was called back does not go on
    assert late(bench) == [
        (whole, 8 * KIB, 0, False, False),
        (failed, 0, errno.EIO, False, False),
        (short, 4 * KIB, 0, True, False),
    ]


def test_a_long_write_stops_at_its_deadline(bench: Bench) -> None:
    id_ = bench.submit(DEMOTION, 16 * MIB, WRITE, deadline_s=1.0)
    running = bench.pull_all()
    bench.core.set_now(1.0)
    assert late(bench) == [(id_, 0, 0, True, True)]
    for number, *_, nbytes in running:
        bench.core.answer(number, nbytes)
    assert bench.pull_all() == []
    assert late(bench) == [(id_, 4 * MIB, 0, True, False)]


def test_a_sync_knows_a_deadline_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=2)
    runs, waits = (bench.submit(DEMOTION, 0, SYNC, deadline_s=1.0) for _ in range(2))
    ((number, *_),) = bench.pull_all()
    bench.core.set_now(1.0)
    assert sorted(late(bench)) == [(runs, 0, 0, True, True), (waits, 0, 0, True, False)]
    bench.core.answer(number, 0)
    assert late(bench) == [(runs, 0, 0, False, False)]


def test_hooks_of_what_expired_see_an_error(bench: Bench) -> None:
    hook = _native.Recorder()
    assert bench.core.submit([(1, READ, DEMAND, bench.file, 0, (MEMORY[: 4 * KIB],), 1, hook, 0.0)])
    assert bench.pull_all() == []
    bench.core.close()
    assert select.select([bench.core.quiet_fd], [], [], 10.0)[0]
    assert late(bench) == [(1, 0, 0, True, False)]
    assert (hook.runs, hook.nbytes, hook.error) == (1, 0, errno.ECANCELED)


def test_an_end_with_something_in_flight_forgets_the_deadlines_of_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, depth=1)
    started = bench.submit(DEMAND, 4 * KIB)
    ((number, *_),) = bench.pull_all()
    bench.submit(DEMAND, 4 * KIB, deadline_s=1.0)
    bench.core.close()
    assert not bench.core.end()
    bench.core.set_now(2.0)
    bench.core.answer(number, 4 * KIB)
    assert late(bench) == [(started, 4 * KIB, 0, False, False)]


_PAGES = st.integers(1, 700)
_STEP = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([DEMAND, PREFETCH, DEMOTION, SCRUB]), _PAGES),
    st.tuples(st.just("answer"), st.integers(0, 63), st.sampled_from(["all", "short", "none", "error"])),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.02]), st.just(0)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scheduler")


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(_STEP, max_size=60), depth=st.integers(1, 40))
def test_bounds_order_and_results_hold_in_any_run(folder: Path, steps: list[tuple[str, int, int]], depth: int) -> None:
    """Against a model that knows the rules from the outside: what is in the device, and what each answer means."""
    bench = Bench(folder, depth)
    now_s, demand_s = 0.0, -1.0
    classes: dict[int, int] = {}
    sizes: dict[int, int] = {}
    handed: dict[int, int] = {}
    moved: dict[tuple[int, int], tuple[int, int]] = {}  # (operation, start) -> (bytes, errno)
    spans: dict[tuple[int, int], int] = {}
    stopped: set[int] = set()
    running: list[tuple[int, int, int, int]] = []

    def take() -> None:
        nonlocal demand_s
        for piece in bench.pull_all():
            _, id_, start, nbytes = piece
            io_class = classes[id_]
            ready = [n for n in classes if handed[n] < sizes[n] and n not in stopped]
            assert (io_class, id_) == min((classes[n], n) for n in ready)
            assert start == handed[id_]
            assert nbytes == min(sizes[id_] - start, MIB if io_class == DEMAND else 512 * KIB)
            busy = now_s - demand_s < 0.010 or any(classes[one[1]] == DEMAND for one in running)
            running.append(piece)
            handed[id_] += nbytes
            spans[id_, start] = nbytes
            if io_class == DEMAND:
                demand_s = now_s
            lower = [one for one in running if classes[one[1]] != DEMAND]
            assert len(running) <= depth and len(lower) <= max(1, depth // 2)
            if io_class != DEMAND:
                assert sum(one[3] for one in lower) <= (MIB if busy else 4 * MIB)

    def expected(id_: int) -> tuple[int, int]:
        total = 0
        for start in sorted(start for one, start in moved if one == id_):
            nbytes, number = moved[id_, start]
            total += nbytes
            if nbytes < spans[id_, start]:
                return total, number
        return total, 0

    def answer(piece: tuple[int, int, int, int], how: str) -> None:
        nonlocal demand_s
        number, id_, start, nbytes = piece
        running.remove(piece)
        got, code = nbytes, 0
        if how == "all":
            bench.core.answer(number, nbytes)
        else:
            got = PAGE_NBYTES if how == "short" and nbytes > PAGE_NBYTES else 0
            if got:
                assert bench.core.answer(number, got)
            code = errno.EIO if how == "error" else 0
            assert not bench.core.answer(number, -code)
            stopped.add(id_)
        moved[id_, start] = got, code
        if classes[id_] == DEMAND:
            demand_s = now_s

    results: dict[int, tuple[int, int]] = {}
    for what, first, second in steps:
        if what == "submit":
            id_ = bench.submit(first, second * PAGE_NBYTES)
            classes[id_], sizes[id_], handed[id_] = first, second * PAGE_NBYTES, 0
        elif what == "wait":
            now_s += first
            bench.core.set_now(now_s)
        elif running:
            answer(running[first % len(running)], str(second))
        take()
        results |= {id_: (nbytes, code) for id_, nbytes, code in bench.ended()}
    while running:
        answer(running[0], "all")
        take()
    results |= {id_: (nbytes, code) for id_, nbytes, code in bench.ended()}
    assert results == {id_: expected(id_) for id_ in classes}
    bench.core.close()
    assert bench.core.end()
