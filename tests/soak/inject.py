"""Faults, one every second or two: armed by kind from a shuffled deck, met by the next operation that can suffer them.

Each is written down with what it must lead to, and the judge settles the account when the life of the store ends.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.truth import BY_RECORD, PAGE
from tests.soak.verdict import Verdict
from tests.soak.witness import Segments, Witness

from kvterrace.io.base import IoKind, IoRequest
from kvterrace.testing.clock_jump import ClockJump
from kvterrace.testing.faults import (
    Astray,
    Effect,
    Fail,
    FaultPlan,
    FaultyEngine,
    FlipBit,
    Hang,
    Operation,
    PretendDone,
    Short,
    Slow,
    Torn,
)

READ, WRITE, SYNC = IoKind.READ, IoKind.WRITE, IoKind.SYNC
#: Kinds of faults of the engine: what they hit, and how many operations in a row.
ENGINE: dict[str, tuple[IoKind | str, int]] = {
    "read-flip": (READ, 1),
    "read-flip-many": (READ, 6),
    "read-stale": (READ, 2),
    "read-astray": (READ, 3),
    "read-short": (READ, 2),
    "read-eio": (READ, 1),
    "read-eio-burst": (READ, 8),
    "read-hang": (READ, 3),
    "read-slow": (READ, 3),
    "write-eio": (WRITE, 1),
    "write-enospc": (WRITE, 1),
    "write-short": (WRITE, 1),
    "write-torn": (WRITE, 1),
    "write-torn-error": (WRITE, 1),
    "write-lost": (WRITE, 1),
    "write-hang": (WRITE, 1),
    "write-slow": (WRITE, 2),
    "sync-eio": (SYNC, 1),
    "sync-lost": (SYNC, 2),
    "sync-slow": (SYNC, 2),
    "create-enospc": ("create", 1),
    "create-hang": ("create", 1),
    "truncate-eio": ("truncate", 1),
    "unlink-eperm": ("unlink", 1),
    "unlink-slow": ("unlink", 1),
    "folder-eio": ("sync_folder", 1),
}
#: Kinds that come from outside the process.
OUTSIDE = ("truncated", "deleted", "rot", "clock-leap", "clock-back", "drive-full")
#: Failed writes that the store must count, each once; and those that it may.
COUNTED = ("write-eio", "write-enospc", "write-short", "write-torn-error", "create-enospc", "truncate-eio")
MAY_COUNT = ("sync-eio", "folder-eio")
#: After these, reads may be stopped for a while.
STOPS_READS = ("read-eio", "read-eio-burst", "read-hang", "read-slow", "clock-leap")


@dataclass
class Shot:
    """A fault that has happened. `must`: places of which the library has to say that they were bad."""

    kind: str
    name: str
    start: int
    end: float
    must: list[str] = field(default_factory=list)


class SoakPlan(FaultPlan):
    """Faults for whatever comes next. Thread-safe."""

    def __init__(self, rng: random.Random, segments: Segments) -> None:
        super().__init__()
        self._rng = rng
        self._segments = segments
        self._armed: dict[str, int] = {}
        self._mutex = threading.Lock()
        self._read_at: dict[tuple[str, int], int] = {}  # file, record size -> offset of one that was read
        self.witness: Witness | None = None
        self.shots: list[Shot] = []
        self.counts: Counter[str] = Counter()

    def arm(self, kind: str) -> None:
        with self._mutex:
            self._armed[kind] = ENGINE[kind][1]

    def disarm(self, kind: str | None = None) -> bool:
        """Take back what has met nothing; whether there was something."""
        with self._mutex:
            if kind is None:
                left = bool(self._armed)
                self._armed.clear()
                return left
            return self._armed.pop(kind, 0) == ENGINE[kind][1]

    def effect_on(self, operation: Operation) -> Effect | None:
        with self._mutex:
            chosen = self._choose(operation)
            request = self.witness.current if self.witness is not None else None
            if chosen is None and operation.kind is READ and request is not None and request.finish is not None:
                self._read_at[operation.path.name, _first_nbytes(request)] = operation.offset
            return chosen

    def _choose(self, operation: Operation) -> Effect | None:
        for kind in self._armed:
            if ENGINE[kind][0] == operation.kind and operation.path.suffix in (".seg", ""):
                effect = self._effect(kind, operation)
                if effect is None:
                    continue
                self._armed[kind] -= 1
                if not self._armed[kind]:
                    del self._armed[kind]
                self.counts[kind] += 1
                return effect
        return None

    def note(self, shot: Shot) -> None:
        """A fault from outside has happened."""
        with self._mutex:
            self.shots.append(shot)
            self.counts[shot.kind] += 1

    def _effect(self, kind: str, operation: Operation) -> Effect | None:
        rng, nbytes, name = self._rng, operation.nbytes, operation.path.name
        request = self.witness.current if self.witness is not None else None
        shot = Shot(kind, name, operation.offset, operation.offset + max(nbytes, 1))
        opening = operation.kind is READ and request is None
        if opening:
            self._segments.distrust(name)
        effect: Effect
        match kind.split("-", 1)[1]:
            case "flip" | "flip-many":
                effect, shot.must = self._flip(operation)
            case "stale":
                effect = PretendDone()
                if request is not None and request.finish is not None:
                    shot.must = self._places(operation)
            case "astray":
                # to a record as large as this one, whole and in order, that was read a while ago
                other = self._read_at.get((name, _first_nbytes(request)))
                if request is None or other is None or other == operation.offset:
                    return None
                effect = Astray(other)
                if request.finish is not None:
                    shot.must = self._places(operation)
            case "short" if operation.kind is READ:
                effect = Short(rng.randrange(nbytes))
            case "short":
                effect = Short(rng.randrange(nbytes))
                self._segments.damage(name, operation.offset, shot.end)
            case "eio" | "eio-burst":
                effect = Fail(errno.EIO)
            case "enospc":
                effect = Fail(errno.ENOSPC)
            case "eperm":
                effect = Fail(errno.EPERM)
            case "torn":
                effect = Torn(rng.randrange(nbytes // PAGE))
                self._segments.damage(name, 0 if operation.offset == 0 else operation.offset, shot.end)
            case "torn-error":
                effect = Torn(rng.randrange(nbytes // PAGE), errno.EIO)
                self._segments.damage(name, operation.offset, shot.end)
            case "lost":
                effect = PretendDone()
                if operation.kind is WRITE:
                    self._segments.damage(name, operation.offset, shot.end)
            case "hang":
                effect = Hang()
            case "slow":
                effect = Slow(rng.uniform(0.05, 1.0))
            case _:
                raise AssertionError(kind)
        self.shots.append(shot)
        return effect

    def _flip(self, operation: Operation) -> tuple[FlipBit, list[str]]:
        """A bit of one of the records that are read, most often one that a checksum covers."""
        request = self.witness.current if self.witness is not None else None
        bit = self._rng.randrange(8)
        if request is None or request.finish is None:  # at open; or single layers: which bytes count is not known here
            return FlipBit(self._rng.randrange(operation.nbytes), bit), []
        chosen = self._rng.randrange(len(request.buffers))
        at = sum(buffer.nbytes for buffer in request.buffers[:chosen])
        kind = BY_RECORD[request.buffers[chosen].nbytes]
        byte = self._rng.randrange(kind.record_nbytes)
        if self._rng.random() < 0.9:
            byte = self._rng.randrange(kind.covered_nbytes)
        must = [f"{operation.path}@{operation.offset + at}"] if byte < kind.covered_nbytes else []
        return FlipBit(at + byte, bit), must

    def _places(self, operation: Operation) -> list[str]:
        """Every record that a read of whole records asks for."""
        assert self.witness is not None and self.witness.current is not None
        at, places = operation.offset, []
        for buffer in self.witness.current.buffers:
            places.append(f"{operation.path}@{at}")
            at += buffer.nbytes
        return places


def _first_nbytes(request: IoRequest | None) -> int:
    return request.buffers[0].nbytes if request is not None and request.buffers else 0


class Injector(threading.Thread):
    """Arms faults, lets go of what hangs, and does what comes from outside. One for each life of a store."""

    def __init__(
        self,
        rng: random.Random,
        plan: SoakPlan,
        engine: FaultyEngine,
        clock: ClockJump,
        segments: Segments,
        folder: Path,
        verdict: Verdict,
        *,
        ballast: Path | None,
        every_s: float,
        without: frozenset[str],
    ) -> None:
        super().__init__(name="soak-injector", daemon=True)
        self._rng, self._plan, self._engine, self._clock = rng, plan, engine, clock
        self._segments, self._folder, self._verdict = segments, folder, verdict
        self._ballast, self._every_s = ballast, every_s
        self._kinds = [kind for kind in (*ENGINE, *OUTSIDE) if kind not in without]
        self._ending = threading.Event()
        self._deck: list[str] = []
        self._release_s = 0.0
        self._drain_s = 0.0
        #: Kinds that were armed and met no operation.
        self.unmet: Counter[str] = Counter()

    def run(self) -> None:
        try:
            while not self._ending.wait(self._rng.uniform(0.5, 1.5) * self._every_s):
                self._tidy(time.monotonic())
                kind = self._next()
                if kind in OUTSIDE:
                    self._outside(kind)
                    continue
                self._plan.arm(kind)
                if self._ending.wait(self._every_s):
                    break
                if self._plan.disarm(kind):
                    self.unmet[kind] += 1
        except Exception as error:  # noqa: BLE001 - a soak without faults proves nothing
            self._verdict.fail("soak", f"the injector has failed: {error!r}")

    def end(self) -> None:
        """No more faults; what hangs goes on; the ballast is thrown off."""
        self._ending.set()
        self.join()
        self._plan.disarm()
        self._engine.release()
        if self._ballast is not None:
            self._ballast.unlink(missing_ok=True)

    def _next(self) -> str:
        if not self._deck:
            self._deck = list(self._kinds)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _tidy(self, now_s: float) -> None:
        if self._engine.hanging and not self._release_s:
            self._release_s = now_s + self._rng.choice([1.0, 4.0, 8.0, 12.0])
        if self._release_s and now_s >= self._release_s:
            self._engine.release()
            self._release_s = 0.0
        if self._drain_s and now_s >= self._drain_s and self._ballast is not None:
            self._ballast.unlink(missing_ok=True)
            self._drain_s = 0.0

    def _outside(self, kind: str) -> None:
        if kind == "clock-leap":
            self._plan.note(Shot(kind, "", 0, 0))
            self._clock.leap(self._rng.choice([3.0, 20.0, 90.0]))
        elif kind == "clock-back":
            self._plan.note(Shot(kind, "", 0, 0))
            self._clock.set_back(self._rng.choice([-86400.0, 3600.0]))
        elif kind == "drive-full":
            if self._ballast is not None and not self._drain_s:
                self._plan.note(Shot(kind, "", 0, 0))
                _fill(self._ballast)
                self._drain_s = time.monotonic() + self._rng.uniform(1.0, 6.0)
        else:
            self._damage(kind)

    def _damage(self, kind: str) -> None:
        """Something is done to a segment behind the store's back."""
        names = sorted(one.name for one in self._folder.glob("*.seg"))
        if not names:
            return
        path = self._folder / self._rng.choice(names)
        try:
            nbytes = path.stat().st_size
            at = self._rng.randrange(0, nbytes, PAGE) if nbytes else 0
            end: float = float("inf") if kind != "rot" else at + PAGE
            start = 0 if kind == "deleted" else at
            self._segments.damage(path.name, start, end)
            self._plan.note(Shot(kind, path.name, start, end))
            if kind == "deleted":
                path.unlink()
            elif kind == "truncated":
                os.truncate(path, at + self._rng.choice([0, 1, 2048]))
            else:
                with path.open("r+b", buffering=0) as file:
                    file.seek(at)
                    file.write(self._rng.choice([bytes(PAGE), self._rng.randbytes(PAGE)]))
        except FileNotFoundError:  # reclaimed meanwhile
            return


def _fill(path: Path) -> None:
    """Take all the room that the drive of `path` has."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        step = 16 << 20
        at = 0
        while step >= PAGE:
            try:
                os.posix_fallocate(fd, at, step)
                at += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
    finally:
        os.close(fd)
