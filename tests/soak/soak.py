"""Life after life of a store, in this process and in children that are killed; sampled all the time."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter

from tests.soak import growth
from tests.soak.killed import run_and_kill
from tests.soak.life import SSD_NBYTES, Life, World, check_kept
from tests.soak.report import Report
from tests.soak.truth import Conversation

_SAMPLE_S = 1.0
_PROGRESS_S = 10.0
#: What a store's start and end do to memory is no growth: samples count from this long after it was opened.
_SETTLE_S = 1.5
#: Mean length of a life in a long run.
_MOST_LIFE_S = 15.0
#: After more failures than this the run ends.
_MOST_FAILURES = 20
#: Until a thread that has been joined is gone for the system, too.
_GONE_S = 5.0


class Soak:
    """The run, and its figures so far."""

    def __init__(self, world: World, report: Report, seconds: float, mutation: str) -> None:
        self.world, self.report, self.seconds, self.mutation = world, report, seconds, mutation
        self.rng = random.Random(f"{world.seed} soak")
        self.start_s = time.monotonic()
        self.lives = self.kills = 0
        self.injected: Counter[str] = Counter()
        self.unmet: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.store_counts: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.nbytes = self.ops = self.killed_ops = self.kept_blocks = 0
        self.disk_most = 0
        #: (seconds, value): medians of each life, with the store open; and between lives, with none.
        self.rss: list[tuple[float, float]] = []
        self.open_fds: list[tuple[float, float]] = []
        self.open_threads: list[tuple[float, float]] = []
        self.rest_rss: list[tuple[float, float]] = []
        self.rest: list[tuple[int, int]] = []
        self._life: Life | None = None
        self._steady = False  # it is neither being opened nor closed
        self._at_rest: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="soak-sampler", daemon=True)
        self._samples: list[tuple[float, float, float]] = []

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s

    def _is_enough(self) -> bool:
        """Enough has failed; of a library that was broken on purpose, the first failure is."""
        return self.world.verdict.count > (0 if self.mutation else _MOST_FAILURES)

    def run(self) -> None:
        self._sampler.start()
        kept: list[tuple[Conversation, int]] = []
        length_s = min(_MOST_LIFE_S, max(4.0, self.seconds / 10))
        while self.elapsed_s < self.seconds and not self._is_enough():
            kept = self._live(kept, self.rng.uniform(0.5, 1.5) * length_s)
            if self.elapsed_s < self.seconds and not self._is_enough() and self.rng.random() < 0.6:
                self.kills += 1
                seconds = self.rng.uniform(0.3, 1.0) * min(8.0, length_s)
                self.killed_ops += run_and_kill(self.world, 10**6 + self.kills, seconds, self.mutation)
                kept = []
                self._check_disk()
        self._stop.set()
        self._sampler.join()
        self._judge_growth()

    def _live(self, kept: list[tuple[Conversation, int]], seconds: float) -> list[tuple[Conversation, int]]:
        life = Life(self.world, self.lives)
        self.kept_blocks += check_kept(life, kept)
        self._samples, self._life, self._steady = [], life, True
        life.start()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._is_enough():
            time.sleep(0.1)
        self._steady = False
        quiet = (self.lives == 0 or self.rng.random() < 0.6) and not self._is_enough()
        kept = life.end_quietly() if quiet else []
        if not quiet:
            life.end_abruptly()
        self._check_disk()
        self._life = None
        self._take(life)
        del life
        self._look_at_rest()
        return kept

    def _take(self, life: Life) -> None:
        self.lives += 1
        self.injected += life.plan.counts
        self.unmet += life.unmet
        self.seen += life.seen.counts
        self.ended += life.ended
        self.nbytes += life.seen.nbytes
        self.ops += life.ops
        if life.stats is not None:
            for name in ("ssd_written_nbytes", "ssd_read_nbytes", "ssd_write_failures", "carried_blocks"):
                self.store_counts[name] += getattr(life.stats, name)
            self.store_counts["reclaimed_segments"] += life.stats.reclaimed_segments
        if self._samples:
            at_s = self.elapsed_s
            for series, place in ((self.rss, 0), (self.open_fds, 1), (self.open_threads, 2)):
                series.append((at_s, statistics.median(one[place] for one in self._samples)))

    def _look_at_rest(self) -> None:
        """No store is open: descriptors and threads must be as after the first life. A thread that has been joined may
        take a moment to be gone.
        """
        growth.trim()
        now = growth.descriptors(), growth.threads()
        end_s = time.monotonic() + _GONE_S
        while self._at_rest is not None and now != self._at_rest and time.monotonic() < end_s:
            time.sleep(0.05)
            now = growth.descriptors(), growth.threads()
        self.rest.append(now)
        self.rest_rss.append((self.elapsed_s, growth.rss_nbytes()))
        if self._at_rest is None:
            self._at_rest = now
        elif now != self._at_rest:
            self.world.verdict.fail(
                "leak",
                f"after life {self.lives - 1}, with no store open: {now[0]} descriptors and {now[1]} threads; after "
                f"the first it was {self._at_rest[0]} and {self._at_rest[1]}; threads: {growth.python_threads()}",
            )

    # Samples

    def _sample(self) -> None:
        progress_s = time.monotonic() + _PROGRESS_S
        while not self._stop.wait(_SAMPLE_S):
            now_s = time.monotonic()
            life = self._life
            self._check_disk()
            if life is not None and self._steady and now_s - life.opened_s > _SETTLE_S:
                self._samples.append((growth.rss_nbytes(), growth.descriptors(), growth.threads()))
            if now_s >= progress_s:
                progress_s = now_s + _PROGRESS_S
                self.report.progress(self, life)

    def _check_disk(self) -> None:
        try:
            nbytes = growth.disk_nbytes(self.world.partition)
        except FileNotFoundError:
            return  # the first store is being made
        self.disk_most = max(self.disk_most, nbytes)
        if nbytes > SSD_NBYTES:
            self.world.verdict.fail("cap", f"the partition takes {nbytes} B, over its cap of {SSD_NBYTES} B")

    def _judge_growth(self) -> None:
        for name, (growing, bound) in self.growth().items():
            if growing > bound:
                self.world.verdict.fail("growth", f"{name} has grown by {growing:.0f}, over {bound:.0f}")

    def growth(self) -> dict[str, tuple[float, float]]:
        """Growth of the last two thirds, by Theil's and Sen's slope over the lives' medians, and what is allowed."""
        end_s = self.elapsed_s
        allowed = {"rss_at_rest": 12.0 * 2**20, "rss_open": 48.0 * 2**20, "descriptors": 16.0, "threads": 1.0}
        series = {
            "rss_at_rest": self.rest_rss,
            "rss_open": self.rss,
            "descriptors": self.open_fds,
            "threads": self.open_threads,
        }
        return {
            name: (growth.grown(growth.after_warm_up(points, 0.0, end_s)), allowed[name])
            for name, points in series.items()
        }
