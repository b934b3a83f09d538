"""The shipped conformance suite, run against DRAM alone, and DRAM over SSD on real files and on a fake drive."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvterrace.clock import Clock, ManualClock, SystemClock
from kvterrace.engine.dirty import WritePolicy
from kvterrace.io import IoEngine, IoKind, PosixEngine
from kvterrace.io.fake import FakeDevice
from kvterrace.opening import open_store
from kvterrace.store import Store
from kvterrace.testing.conformance import LadderConformance
from kvterrace.testing.faults import FaultPlan, FaultyEngine, Hang
from kvterrace.tiers.directory import StoreDirectory


class TestDramAlone(LadderConformance):
    def open_ladder(self) -> Store:
        return open_store(None, dram_bytes=self.DRAM_NBYTES, busy_after_s=0.5, sigterm_flush=False)


class TestReaderOfAnEmptyStore(LadderConformance):
    """What a reader keeps in its own DRAM."""

    def setup_method(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvterrace-")
        open_store(self._folder.name, dram_bytes=self.DRAM_NBYTES, sigterm_flush=False).close()
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self._folder.cleanup()

    def open_ladder(self) -> Store:
        return open_store(self._folder.name, dram_bytes=self.DRAM_NBYTES, busy_after_s=0.5, read_only=True)


class OnDrive(LadderConformance):
    """Shared by the ladders with an SSD tier."""

    durable = True
    has_lower_tier = True
    background = True

    def engine(self) -> tuple[IoEngine, Clock]:
        raise NotImplementedError

    def setup_method(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvterrace-")
        self.plan = FaultPlan()
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self._folder.cleanup()

    def open_ladder(self) -> Store:
        inner, clock = self.engine()
        self.faulty = FaultyEngine(inner, self.plan, clock)
        return Store(
            dram_nbytes=self.DRAM_NBYTES,
            ssd_nbytes=self.LOWER_NBYTES,
            directory=StoreDirectory.open(Path(self._folder.name), "main", created_unix_s=0.0),
            engine=self.faulty,
            clock=clock,
            busy_after_s=20.0,
            segment_nbytes=12 * self.RECORD_NBYTES,  # so that the suite's chain of six fills half of one
            background=self.background,
        )

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        self.plan.add(Hang(), IoKind.READ)
        yield
        self.plan.clear()
        self.faulty.release()


class TestSsdOnFiles(OnDrive):
    def engine(self) -> tuple[IoEngine, Clock]:
        return PosixEngine(threads=4), SystemClock()

    def damage(self, key: bytes) -> bool:
        for path in Path(self._folder.name).rglob("*.seg"):
            at = payload_of(key, path.read_bytes())
            if at is not None:
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(b"damaged")
                return True
        return False


class TestSsdOnTwoDrives(TestSsdOnFiles):
    """The first and the second hang together."""

    def damage(self, key: bytes) -> bool:
        # how many blocks each drive gets is chance; what is in a segment that was left open is scanned at the next
        # open, and damage there is a miss
        whole_nbytes = 6 * self.RECORD_NBYTES
        for path in Path(self._folder.name).rglob("*.seg"):
            if payload_of(key, path.read_bytes()) is not None and path.stat().st_size >= whole_nbytes:
                return False
        return super().damage(key)

    def open_ladder(self) -> Store:
        engines: list[FaultyEngine] = []
        self.plans = [self.plan, FaultPlan()]
        for plan in self.plans:
            inner, clock = self.engine()
            engines.append(FaultyEngine(inner, plan, clock))
        self.both = engines
        roots = [Path(self._folder.name) / name for name in "ab"]
        directories = [StoreDirectory.open(root, "main", created_unix_s=0.0) for root in roots]
        return Store(
            dram_nbytes=self.DRAM_NBYTES,
            ssd_nbytes=2 * self.LOWER_NBYTES,
            directory=directories[0],
            engine=engines[0],
            more=[(directories[1], engines[1])],
            clock=clock,
            writes=WritePolicy(batch_nbytes=8192),
            busy_after_s=20.0,
            segment_nbytes=6 * self.RECORD_NBYTES,  # the suite's chain of six fills half of one on each drive
        )

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        for plan in self.plans:
            plan.add(Hang(), IoKind.READ)
        yield
        for plan, engine in zip(self.plans, self.both, strict=True):
            plan.clear()
            engine.release()


class TestSsdOnAFakeDrive(OnDrive):
    background = False

    def setup_method(self) -> None:
        self.clock: Clock = ManualClock()
        self.drive = FakeDevice(self.clock)
        super().setup_method()

    def engine(self) -> tuple[IoEngine, Clock]:
        self.drive = self.drive.crash_image(lambda _: True)  # a closed device does not open again
        return self.drive, self.clock

    def test_threads_share_a_store(self) -> None:
        # a clock that moves whenever anybody polls runs away while the thread that has the results sleeps
        self.store.close()
        self.clock, self.background = SystemClock(), True
        self.drive = FakeDevice(self.clock)
        self.store = self.open_ladder()
        super().test_threads_share_a_store()

    def damage(self, key: bytes) -> bool:
        for path, data in self.drive.snapshot().items():
            at = payload_of(key, data)
            if at is not None:
                self.drive.poke(path, at + 100, b"damaged")
                return True
        return False


def payload_of(key: bytes, data: bytes) -> int | None:
    """Where in a segment the payload of a block begins (docs/design.md: one page after the record's header)."""
    at = data.find(b"KVTRECRD")
    while at >= 0:
        if data[at + 88 : at + 120] == key:
            return at + 4096
        at = data.find(b"KVTRECRD", at + 1)
    return None
