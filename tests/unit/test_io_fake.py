"""The fake drive: virtual time, planned faults, power cuts."""

from __future__ import annotations

import errno
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.clock import ManualClock, SystemClock
from kvterrace.io import PAGE_NBYTES, IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.fake import FakeDevice, Unsynced, keep_randomly
from kvterrace.io.faults import Effect, Fail, FaultPlan, FlipBit, Hang, PretendDone, Short, Slow, Torn

PAGE = PAGE_NBYTES
A, B = Path("/x/a"), Path("/x/b")


def page(value: int = 0, count: int = 1) -> Bytes:
    memory: Bytes = np.frombuffer(mmap.mmap(-1, count * PAGE), dtype=np.uint8)
    memory[:] = value
    return memory


def device(clock: ManualClock | None = None, faults: FaultPlan | None = None, parallel: int = 4) -> FakeDevice:
    return FakeDevice(
        clock or ManualClock(),
        latency_s=0.5,
        bytes_per_s=PAGE,
        parallel=parallel,
        capacity_nbytes=64 * PAGE,
        faults=faults,
    )


def do(drive: FakeDevice, kind: IoKind, file: IoFile, offset: int = 0, *memory: Bytes) -> IoResult:
    drive.submit([IoRequest(kind, IoClass.DEMAND, file, offset, memory)])
    (result,) = drive.poll(1000.0)
    return result


def test_time_is_latency_then_a_shared_link() -> None:
    clock = ManualClock()
    drive = device(clock, parallel=2)
    file = drive.create(A, 8 * PAGE)
    drive.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, n * PAGE, [page(n)], tag=n) for n in range(4)])
    times = []
    while drive.in_flight:
        times += [(clock.monotonic_s(), result.request.tag) for result in drive.poll(10.0)]
    # Two at once: the first ends at 0.5 + 1, the second waits for the link. The third starts at 1.5.
    assert times == [(1.5, 0), (2.5, 1), (3.5, 2), (4.5, 3)]


def test_poll_moves_a_manual_clock_no_further_than_asked() -> None:
    clock = ManualClock()
    drive = device(clock)
    assert drive.poll(2.0) == []
    assert clock.monotonic_s() == 2.0
    drive.submit([IoRequest(IoKind.SYNC, IoClass.DEMAND, drive.create(A, 0))])
    assert drive.poll(0.25) == []
    assert drive.poll(0.0) == []
    assert clock.monotonic_s() == 2.25
    assert len(drive.poll(100.0)) == 1
    assert clock.monotonic_s() == 2.5


def test_awkward_times_end_nevertheless() -> None:
    drive = FakeDevice(ManualClock(0.1), latency_s=0.1 / 3, bytes_per_s=7e5, parallel=3)
    file = drive.create(A, PAGE * 64)
    drive.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, n * PAGE, [page(n)]) for n in range(64)])
    polls = 0
    while drive.in_flight:
        drive.poll(10.0)
        polls += 1
    assert polls <= 64


def test_a_demand_overtakes_at_the_next_free_server_only() -> None:
    clock = ManualClock()
    drive = device(clock, parallel=1)
    file = drive.create(A, 8 * PAGE)
    drive.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, n * PAGE, [page()], tag=n) for n in range(3)])
    clock.advance(2.0)  # the first ended at 1.5 and the second has started, although nobody polled
    drive.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [page()], tag="read")])
    tags = []
    while drive.in_flight:
        tags += [result.request.tag for result in drive.poll(10.0)]
    assert tags == [0, 1, "read", 2]


def test_another_clock_is_waited_for() -> None:
    drive = FakeDevice(SystemClock(), latency_s=0.001)
    result = do(drive, IoKind.SYNC, drive.create(A, 0))
    assert result.complete
    assert drive.close(1.0)


def test_a_bounded_drive_fills_up() -> None:
    drive = device()
    with pytest.raises(OSError, match="No space"):
        drive.create(A, 65 * PAGE)
    file = drive.create(A, 62 * PAGE)
    assert drive.free_nbytes(A.parent) == 2 * PAGE
    result = do(drive, IoKind.WRITE, file, 60 * PAGE, page(1, 8))
    assert result.error is not None
    assert (result.error.errno, result.nbytes) == (errno.ENOSPC, 4 * PAGE)
    with pytest.raises(OSError, match="No space"):
        drive.truncate(file, 65 * PAGE)
    drive.unlink(A)
    assert drive.free_nbytes(A.parent) == 0
    drive.close_file(file)
    assert drive.free_nbytes(A.parent) == 64 * PAGE


@pytest.mark.parametrize(
    ("effect", "kind", "error", "nbytes", "seen"),
    [
        (Fail(errno.EIO), IoKind.READ, errno.EIO, 0, [9, 9]),
        (Short(PAGE + 7), IoKind.READ, None, PAGE + 7, [1, None]),
        (PretendDone(), IoKind.READ, None, 2 * PAGE, [9, 9]),
        (Slow(5.0), IoKind.READ, None, 2 * PAGE, [1, 2]),
        (Fail(errno.ENOSPC), IoKind.WRITE, errno.ENOSPC, 0, [1, 2]),
        (Short(PAGE), IoKind.WRITE, None, PAGE, [9, 2]),
        (PretendDone(), IoKind.WRITE, None, 2 * PAGE, [1, 2]),
        (Torn(1), IoKind.WRITE, None, 2 * PAGE, [9, 2]),
        (Torn(1, errno.EIO), IoKind.WRITE, errno.EIO, PAGE, [9, 2]),
        (Fail(errno.EIO), IoKind.SYNC, errno.EIO, 0, [1, 2]),
    ],
)
def test_effects(effect: Effect, kind: IoKind, error: int | None, nbytes: int, seen: list[int | None]) -> None:
    clock, plan = ManualClock(), FaultPlan()
    drive = device(clock, plan)
    file = drive.create(A, 2 * PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1), page(2))
    plan.add(effect, kind, nth=1)
    memory = page(9, 2)
    start_s = clock.monotonic_s()
    result = do(drive, kind, file, 0, *([] if kind is IoKind.SYNC else [memory[:PAGE], memory[PAGE:]]))
    assert (result.error.errno if result.error else None, result.nbytes) == (error, nbytes)
    if isinstance(effect, Slow):
        assert clock.monotonic_s() == start_s + 2.5 + effect.seconds
    if kind is not IoKind.READ:
        memory = np.frombuffer(drive.snapshot()[A], dtype=np.uint8)
    for n, value in enumerate(seen):
        assert value is None or (memory[n * PAGE : (n + 1) * PAGE] == value).all()
    assert [fired for _, fired in plan.fired] == [effect]
    assert do(drive, kind, file, 0, *([] if kind is IoKind.SYNC else [page(), page()])).complete  # only the first


def test_a_flipped_bit_is_in_what_arrives_not_on_the_medium() -> None:
    plan = FaultPlan().add(FlipBit(PAGE + 3, 6), IoKind.READ, nth=2)
    drive = device(faults=plan)
    file = drive.create(A, 2 * PAGE)
    first, second = page(), page()
    assert drive.read_now(file, 0, page(count=2)) == 2 * PAGE
    assert do(drive, IoKind.READ, file, 0, first, second).complete
    assert not first.any()
    assert second.nonzero()[0].tolist() == [3]
    assert second[3] == 64
    assert drive.snapshot()[A] == bytes(2 * PAGE)


def test_a_hanging_read_touches_nothing_until_released_and_holds_its_server() -> None:
    plan = FaultPlan().add(Hang(), IoKind.READ, nth=1)
    drive = device(faults=plan, parallel=2)
    file = drive.create(A, PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1))
    memory = page(9)
    drive.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [memory], tag="hung")])
    assert do(drive, IoKind.READ, file, 0, page()).complete
    assert drive.poll(1000.0) == []
    assert not drive.close(1000.0)
    assert ((memory == 9).all(), drive.in_flight) == (True, 1)
    assert drive.release() == 1
    assert drive.close(10.0)
    assert [result.request.tag for result in drive.poll(0.0)] == ["hung"]
    assert (memory == 1).all()


def test_rules_match_by_predicate_and_can_be_cleared() -> None:
    plan = FaultPlan().add(Fail(errno.EIO), when=lambda op: op.path == A and op.offset == PAGE)
    plan.add(Fail(errno.ENOSPC), "create", nth=2)
    drive = device(faults=plan)
    file = drive.create(A, 2 * PAGE)
    with pytest.raises(OSError, match="No space"):
        drive.create(B, PAGE)
    drive.create(B, PAGE)
    with pytest.raises(OSError, match="Input/output"):
        drive.read_now(file, PAGE, page())
    assert drive.read_now(file, 0, page()) == PAGE
    plan.clear()
    assert drive.read_now(file, PAGE, page()) == PAGE


# Power cuts


def only(*pages: int) -> Callable[[Unsynced], bool]:
    return lambda change: change.what == "name" or change.page in pages


def test_pages_not_synced_are_kept_or_lost_one_by_one() -> None:
    drive = device()
    file = drive.create(A, 4 * PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1))
    assert do(drive, IoKind.SYNC, file).complete
    do(drive, IoKind.WRITE, file, 0, page(2), page(3), page(4))
    full = drive.snapshot()
    assert full[A] == bytes([2]) * PAGE + bytes([3]) * PAGE + bytes([4]) * PAGE + bytes(PAGE)
    image = drive.crash_image(only(2))
    assert image.snapshot()[A] == bytes([1]) * PAGE + bytes(PAGE) + bytes([4]) * PAGE + bytes(PAGE)
    assert drive.crash_image(lambda _: True).snapshot() == full == drive.snapshot()
    assert image.crash_image(lambda _: False).snapshot() == image.snapshot()  # what survived once is durable
    assert image.read_now(image.open(A), 0, page()) == PAGE


def test_an_older_version_of_a_page_may_survive() -> None:
    drive = device()
    file = drive.create(A, PAGE)
    for value in (1, 2, 3):
        do(drive, IoKind.WRITE, file, 0, page(value))
    drive.sync_folder(A.parent)
    answers = iter([True, True, False])
    assert drive.crash_image(lambda _: next(answers)).snapshot()[A] == bytes([2]) * PAGE


def test_a_sync_covers_what_had_landed_when_it_started() -> None:
    drive = device()
    file = drive.create(A, 2 * PAGE)
    drive.sync_folder(A.parent)
    do(drive, IoKind.WRITE, file, 0, page(1))
    drive.submit(
        [
            IoRequest(IoKind.WRITE, IoClass.DEMAND, file, PAGE, [page(2)]),
            IoRequest(IoKind.SYNC, IoClass.DEMAND, file),
        ]
    )
    (first,) = drive.poll(10.0)
    assert first.request.kind is IoKind.SYNC
    assert len(drive.poll(10.0)) == 1
    assert drive.crash_image(lambda _: False).snapshot()[A] == bytes([1]) * PAGE + bytes(PAGE)


def test_a_lost_sync_makes_nothing_durable() -> None:
    drive = device(faults=FaultPlan().add(PretendDone(), IoKind.SYNC))
    file = drive.create(A, PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1))
    assert do(drive, IoKind.SYNC, file).complete
    drive.sync_folder(A.parent)
    assert drive.crash_image(lambda _: False).snapshot()[A] == bytes(PAGE)


def test_writes_in_flight_may_be_torn_and_waiting_ones_have_not_begun() -> None:
    drive = device(parallel=1)
    file = drive.create(A, 4 * PAGE)
    drive.sync_folder(A.parent)
    drive.submit(
        [
            IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page(1), page(2)]),
            IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 2 * PAGE, [page(3)]),
        ]
    )
    asked: list[Unsynced] = []

    def second_page(change: Unsynced) -> bool:
        asked.append(change)
        return change.page == 1

    assert drive.crash_image(second_page).snapshot()[A] == bytes(PAGE) + bytes([2]) * PAGE + bytes(2 * PAGE)
    assert asked == [Unsynced(A, "page", 0), Unsynced(A, "page", 1)]


def test_names_and_sizes_can_go_back() -> None:
    drive = device()
    file = drive.create(A, 2 * PAGE)
    drive.sync_folder(A.parent)
    drive.truncate(file, 100)
    drive.unlink(A)
    drive.create(B, PAGE)
    lost = drive.crash_image(lambda _: False)
    assert lost.snapshot() == {A: bytes(2 * PAGE)}
    assert lost.free_nbytes(A.parent) == 62 * PAGE
    assert drive.crash_image(lambda change: change.what == "size").snapshot() == {A: bytes(100)}
    assert drive.crash_image(lambda _: True).snapshot() == {B: bytes(PAGE)}


def test_random_power_cuts_are_reproducible() -> None:
    drive = device()
    file = drive.create(A, 32 * PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1, 32))
    cuts = [drive.crash_image(keep_randomly(random.Random(seed))).snapshot() for seed in (1, 1, 2)]
    assert cuts[0] == cuts[1] != cuts[2]
    assert 0 < cuts[0][A].count(1) < 32 * PAGE
    assert drive.crash_image(keep_randomly(random.Random(1), names=0.0)).snapshot() == {}


def test_poke_changes_the_medium() -> None:
    drive = device()
    file = drive.create(A, PAGE)
    do(drive, IoKind.WRITE, file, 0, page(1))
    drive.sync_folder(A.parent)
    drive.poke(A, 5, b"\x07\x07")
    want = bytes([1]) * 5 + b"\x07\x07" + bytes([1]) * (PAGE - 7)
    assert drive.snapshot()[A] == drive.crash_image(lambda _: False).snapshot()[A] == want


# Deadlines


def test_what_waits_at_its_deadline_is_dropped_and_what_runs_is_told_and_goes_on() -> None:
    """One at a time: 0.5 s and a page, 1 s. The first ends at 1.5, the third starts then."""
    clock = ManualClock()
    drive = device(clock, parallel=1)
    file = drive.create(A, 8 * PAGE)
    memory = [page(n + 1) for n in range(3)]
    drive.submit(
        [
            IoRequest(IoKind.WRITE, IoClass.DEMAND, file, n * PAGE, [memory[n]], tag=n, deadline_s=[1.0, 1.2, None][n])
            for n in range(3)
        ]
    )
    seen = []
    while drive.in_flight:
        seen += [
            (clock.monotonic_s(), result.request.tag, result.expired, result.lent, result.complete)
            for result in drive.poll(10.0)
        ]
    assert seen == [
        (1.0, 0, True, True, False),
        (1.2, 1, True, False, False),
        (1.5, 0, False, False, True),
        (3.0, 2, False, False, True),
    ]
    back = page(9, 3)
    assert drive.read_now(file, 0, back) == 3 * PAGE
    assert [int(back[n * PAGE]) for n in range(3)] == [1, 0, 3]


def test_what_hangs_at_its_deadline_stays_lent_until_the_drive_lets_go() -> None:
    clock = ManualClock()
    drive = device(clock, FaultPlan().add(Hang(), IoKind.READ))
    file = drive.create(A, PAGE)
    finished: list[bool] = []
    request = IoRequest(
        IoKind.READ, IoClass.DEMAND, file, 0, [page()], deadline_s=2.0, finish=lambda _: finished.append(True)
    )
    drive.submit([request])
    (told,) = drive.poll(10.0)
    assert (clock.monotonic_s(), told.expired, told.lent, finished, drive.in_flight) == (2.0, True, True, [], 1)
    assert drive.poll(10.0) == []
    drive.faults.clear()
    assert drive.release() == 1
    (result,) = drive.poll(10.0)
    assert (result.complete, result.lent, finished, drive.in_flight) == (True, False, [True], 0)


def test_close_answers_what_is_due_and_waits_for_what_runs() -> None:
    drive = device(parallel=1)
    file = drive.create(A, 8 * PAGE)
    drive.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, [page()], deadline_s=1.0) for _ in range(2)])
    assert drive.close(10.0)
    assert [(result.expired, result.lent) for result in drive.poll(0.0)] == [
        (True, True),
        (True, False),
        (False, False),
    ]
