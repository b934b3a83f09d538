"""How many pieces a device is given at once, against a drive made of so many servers: stepped by hand."""

from __future__ import annotations

import heapq
from pathlib import Path

import pytest

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from tests.unit.test_io_scheduler import DEMAND, DEMOTION, KIB, MIB, Bench

#: What one server takes for a piece, in seconds; a power of two, so that sums are exact.
SERVICE_S = 2.0**-10


class Drive:
    """`servers` that take pieces first come first served: more than that in the device only wait there."""

    def __init__(self, bench: Bench, servers: int, now_s: float = 0.0) -> None:
        self.bench, self.now_s = bench, now_s
        self.free_s = [now_s + SERVICE_S * n / servers for n in range(servers)]
        self.running: list[tuple[float, int, int]] = []
        self.depths: list[int] = []  # each that it was asked for, as it changes

    def run(self, pieces: int, nbytes: int = 4 * KIB, io_class: int = DEMAND, backlog: int = 80) -> None:
        """Let so many pieces end, with at least `backlog` submitted all the time."""
        for done in range(pieces + backlog):
            if done < backlog:
                self.bench.submit(io_class, nbytes)
                continue
            self.bench.submit(io_class, nbytes)
            for number, _, _, size in self.bench.pull_all():
                end_s = max(self.now_s, heapq.heappop(self.free_s)) + SERVICE_S
                heapq.heappush(self.free_s, end_s)
                heapq.heappush(self.running, (end_s, number, size))
            self.now_s, number, size = heapq.heappop(self.running)
            self.bench.core.set_now(self.now_s)
            self.bench.core.answer(number, size)
            depth = self.bench.core.depth
            if self.depths[-1:] != [depth]:
                self.depths.append(depth)


def test_it_gives_a_drive_of_twelve_servers_no_more_than_it_can_use(tmp_path: Path) -> None:
    """By hand: a quarter less each time (48, 36, 27, 21, 16, 12), as long as twelve servers stay busy; nine are three
    quarters of that, 20 are no more. So it goes back to 12 from either.
    """
    drive = Drive(Bench(tmp_path), 12)
    drive.run(20_000)
    assert drive.depths[:12] == [64, 48, 36, 27, 21, 16, 12, 9, 12, 20, 12, 9]
    assert set(drive.depths[6:]) == {12, 9, 20}


def test_it_leaves_a_drive_all_that_it_can_use(tmp_path: Path) -> None:
    drive = Drive(Bench(tmp_path), 100)
    drive.run(40_000)
    assert drive.depths[:4] == [64, 48, 64, 48]
    assert set(drive.depths) == {64, 48}


def test_it_climbs_again_when_the_drive_takes_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    slow = Drive(bench, 8)
    slow.run(20_000)
    assert bench.core.depth in (8, 16)  # 16 is the trial
    fast = Drive(bench, 100, slow.now_s)
    fast.running = slow.running
    fast.run(60_000)
    assert fast.depths[-1] in (64, 48)


def test_it_is_never_below_eight_nor_above_the_limit(tmp_path: Path) -> None:
    drive = Drive(Bench(tmp_path, depth=20), 1)
    drive.run(20_000)
    assert drive.depths[:4] == [20, 15, 12, 9]
    assert min(drive.depths) == 8
    assert max(drive.depths) == 20
    few = Drive(Bench(tmp_path, depth=6), 1)
    few.run(5_000)
    assert few.depths == [6]


def test_a_drive_that_is_not_kept_busy_says_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    drive = Drive(bench, 1)
    drive.run(5_000, backlog=40)  # never 64 at once
    assert drive.depths == [64]


def test_what_the_bound_in_bytes_keeps_back_says_nothing(tmp_path: Path) -> None:
    drive = Drive(Bench(tmp_path), 1)
    drive.run(3_000, MIB, DEMOTION)
    assert drive.depths == [64]


def test_pieces_of_another_size_end_a_trial(tmp_path: Path) -> None:
    """A measurement is 1024 pieces and the one that begins it."""
    bench = Bench(tmp_path)
    drive = Drive(bench, 1)
    drive.run(1100)
    assert drive.depths == [64, 48]
    drive.run(2500, 64 * KIB)
    assert drive.depths[:3] == [64, 48, 64]
