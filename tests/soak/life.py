"""One life of a store: opened over whatever the last one left, under load and faults, closed or killed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.soak.clients import Client, Keeper
from tests.soak.inject import Injector, SoakPlan
from tests.soak.judge import Seen, settle
from tests.soak.truth import Conversation, Grave, Graves, MiB, Pool, chain_of, content, shape_of
from tests.soak.verdict import LogTap, Verdict
from tests.soak.watch import Watchdog
from tests.soak.witness import Segments, Witness

from kvterrace import Hit, Present, Store, Stored, StoreStats
from kvterrace.clock import SystemClock
from kvterrace.engine.blocks import NOWHERE
from kvterrace.engine.dirty import WritePolicy
from kvterrace.io.probe import best_engine
from kvterrace.testing.clock_jump import ClockJump
from kvterrace.testing.faults import FaultyEngine
from kvterrace.testing.invariants import check_invariants
from kvterrace.tiers.directory import StoreDirectory

DRAM_NBYTES = 24 * MiB
SSD_NBYTES = 96 * MiB
CLIENTS = 4
BUSY_AFTER_S = 2.0
#: A store without faults must have come to itself after this long: writing pauses for 5 s after failures, reads for up
#: to a minute.
RECOVER_S = 40.0
CLOSE_S = 30.0


@dataclass
class World:
    """What outlives a store: the truth, and who judges."""

    folder: Path
    seed: int
    pool: Pool
    graves: Graves
    segments: Segments
    verdict: Verdict
    watchdog: Watchdog
    log: LogTap
    every_s: float
    ballast: Path | None
    without: frozenset[str] = frozenset()  # kinds of faults

    @property
    def partition(self) -> Path:
        return self.folder / "partitions" / "main"


class Life:
    """A store, its clients and its faults."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.pool, self.graves, self.verdict, self.watchdog = world.pool, world.graves, world.verdict, world.watchdog
        self.rng = random.Random(f"{world.seed} life {number}")
        self.ending, self.closing = threading.Event(), threading.Event()
        self.seen = Seen()
        self.plan = SoakPlan(random.Random(f"{world.seed} plan {number}"), world.segments)
        self.clock = ClockJump(SystemClock())
        self.stats: StoreStats | None = None
        self.ended: Counter[str] = Counter()
        self.opened_s = 0.0
        self._disturbed = 0
        world.log.new_life()
        self.store = self._open()
        self._injector = Injector(
            self.rng,
            self.plan,
            self.engine,
            self.clock,
            world.segments,
            world.partition,
            world.verdict,
            ballast=world.ballast,
            every_s=world.every_s,
            without=world.without,
        )
        self._clients = [Client(self, at, random.Random(f"{world.seed} {number} {at}")) for at in range(CLIENTS)]
        self._keeper = Keeper(self, random.Random(f"{world.seed} keeper {number}"), check_invariants)

    def _open(self) -> Store:
        if self.number and self.rng.random() < 0.3 and "opening" not in self.world.without:
            self.plan.arm(self.rng.choice(["read-flip", "read-flip-many", "read-short", "read-eio", "read-eio-burst"]))
        clock = self.clock
        with self.watchdog.op("open", 30.0):
            directory = StoreDirectory.open(self.world.folder, "main", created_unix_s=clock.unix_s())
            self.engine = FaultyEngine(best_engine()[0], self.plan)
            witness = Witness(self.engine, self.world.segments)
            self.plan.witness = witness
            store = Store(
                dram_nbytes=DRAM_NBYTES,
                ssd_nbytes=SSD_NBYTES,
                directory=directory,
                engine=witness,
                clock=clock,
                writes=WritePolicy(after_s=0.5),
                busy_after_s=BUSY_AFTER_S,
            )
        self.plan.disarm()
        if self.plan.counts:  # a segment read wrongly has shown fewer tombstones than it holds
            self._forget_lost()
        self.opened_s = time.monotonic()
        return store

    def start(self) -> None:
        for thread in (*self._clients, self._keeper, self._injector):
            thread.start()

    @property
    def ops(self) -> int:
        return sum(client.ops for client in self._clients)

    @property
    def leaps(self) -> int:
        return self.plan.counts["clock-leap"]

    @property
    def unmet(self) -> Counter[str]:
        return self._injector.unmet

    def disturb(self) -> None:
        """Somebody invalidates: what others have pinned may go."""
        self._disturbed += 1

    def disturbances(self) -> int:
        """Rises with whatever may take a pinned block off the ladder: with faults, and with what comes of them."""
        log = self.world.log
        noticed = sum(count for what, count in log.warnings.items() if "by somebody else" in what)
        return self._disturbed + len(log.discards) + noticed + sum(self.plan.counts.values())

    def dig(self, grave: Grave) -> None:
        """No block of it is ever to be seen again."""
        self.graves.dig(grave)

    def flush(self, timeout_s: float) -> bool:
        """Flush; what was invalidated before it is durable if it says so."""
        fresh = self.graves.fresh()
        with self.watchdog.op("flush", timeout_s + 5.0):
            fine = self.store.flush(timeout_s)
        self.seen.add("flushes" if fine else "flushes in vain")
        if fine:
            self.made_durable(fresh)
        return fine

    def made_durable(self, graves: list[Grave]) -> None:
        """A flush that began after these were dug has returned True."""
        for one in graves:
            one.durable = True

    # The end

    def end_quietly(self) -> list[tuple[Conversation, int]]:
        """No more faults, let all come to rest, and close. Returns conversations and how much of each must be there
        when the store is opened again.
        """
        self._injector.end()
        recovered = self._recovers()
        self.ending.set()
        self._join()
        kept: list[tuple[Conversation, int]] = []
        if not recovered:
            self._close(must=False)
            self._settle(at_rest=False)
            return kept
        if self.flush(RECOVER_S):
            try:
                with self.watchdog.op("audit", 5.0):
                    check_invariants(self.store)
            except AssertionError as error:
                self.verdict.fail("books", f"at rest: {error}")
            reclaimed = self.store.stats().reclaimed_segments
            kept = self._on_ssd()
        else:
            self.verdict.fail("flush", "at rest, without faults, and a flush says False")
        self._close(must=True)
        if kept and self.store.stats().reclaimed_segments != reclaimed:
            kept = []  # room was still being made when these were looked at: some may have gone for it
        self._settle(at_rest=True)
        return kept

    def end_abruptly(self) -> None:
        """Close under load, with faults armed; what hangs is let go a moment later."""
        self.closing.set()
        late = threading.Timer(self.rng.uniform(0.0, 1.5), self.engine.release)
        late.start()
        releaser = threading.Timer(3.0, self._injector.end)
        releaser.start()
        self._close(must=False)
        for timer in (late, releaser):
            timer.join()
        self.ending.set()
        self._join()
        self._settle(at_rest=False)

    def _join(self) -> None:
        with self.watchdog.op("clients end", 60.0):
            for thread in (*self._clients, self._keeper):
                thread.join()

    def _recovers(self) -> bool:
        """Whether after the last fault the store takes, writes and gives blocks again by itself."""
        end_s = time.monotonic() + RECOVER_S
        one = Conversation(0, 0, 10**6 + self.number)
        chain = chain_of(one)
        nbytes = chain.namespace.layout.block_nbytes
        while time.monotonic() < end_s:
            source = b"".join(content(key, nbytes).tobytes() for key in chain)
            with self.watchdog.op("put", 10.0):
                put = self.store.wait(self.store.put(chain, source))
            out = bytearray(len(source))
            with self.watchdog.op("wait for a get", 40.0):
                got = self.store.wait(self.store.get(chain, out))
            self.seen.put(put, 0)
            self.seen.get(got, 0)
            if all(isinstance(one, Stored | Present) for one in put) and all(isinstance(one, Hit) for one in got):
                if bytes(out) != source:
                    self.verdict.fail("wrong bytes", "after the faults")
                if self.flush(10.0):
                    return True
            time.sleep(0.2)
        self.verdict.fail("recovery", f"{RECOVER_S:.0f} s after the last fault: {put[:2]}, {got[:2]}; {self._state()}")
        return False

    def _state(self) -> str:
        """What a store that does not recover is doing."""
        stats, space = self.store.stats(), self.store._core.ledger.space
        assert space is not None
        writers = self.store._mover.writers
        assert writers is not None
        (writer,) = writers.each
        states = Counter(segment.state.value for segment in space.segments.values())
        return (
            f"{stats}; segments {dict(states)}, {space.file_nbytes} of {space.cap_nbytes} B, open {space.open}; "
            f"reclaiming {writer._reclaimer._reclaiming}; "
            f"{self.engine.in_flight} in flight, {self.engine.hanging} hanging; "
            f"faults {dict(self.plan.counts)}; warnings {dict(self.world.log.warnings)}"
        )

    def _on_ssd(self) -> list[tuple[Conversation, int]]:
        """How many blocks of a conversation's prefix are on the drive, in segments that no fault has reached."""
        core, kept = self.store._core, []
        bad = [int(name.removesuffix(".seg"), 16) for name in self.world.segments.untrusted]
        for number, row in enumerate(self.pool.generations):
            for slot in self.rng.sample(range(len(row)), min(40, len(row))):
                one = Conversation(number, slot, row[slot])
                places = core.ledger.table.segment[core.ledger.find(chain_of(one))]
                lost = np.flatnonzero((places == NOWHERE) | np.isin(places, bad))
                kept.append((one, int(lost[0]) if len(lost) else len(places)))
        return kept

    def _close(self, *, must: bool) -> None:
        fresh = self.graves.fresh()
        with self.watchdog.op("close", CLOSE_S + 5.0):
            fine = self.store.close(CLOSE_S)
        self.seen.add("closed" if fine else "closed in vain")
        if fine:
            self.made_durable(fresh)
        elif must:
            self.verdict.fail("close", "at rest, without faults, and close says False")
        with self.watchdog.op("stats", 5.0):
            self.stats = self.store.stats()
        self.closed_s = time.monotonic()

    def _settle(self, *, at_rest: bool) -> None:
        for client in self._clients:
            client.check_late(float("inf"))
        assert self.stats is not None
        stats, world = self.store.stats(), self.world
        self.ended = settle(
            self.seen, stats, self.plan.shots, world.log.discards, world.segments, world.verdict, at_rest=at_rest
        )
        self._forget_lost()
        world.segments.forget_missing(world.partition)

    def _forget_lost(self) -> None:
        lost = self.world.segments.lost_tombstones()
        self.graves.end_of_life(lambda grave: bool(grave.keys & lost))


def check_kept(life: Life, kept: list[tuple[Conversation, int]]) -> int:
    """What lay undamaged on the drive at the last close is there now; blocks looked at."""
    for one, blocks in kept:
        there = life.store.match(chain_of(one)).blocks
        if there < blocks and not life.plan.counts:
            life.verdict.fail("lost", f"{blocks} blocks of {one} {shape_of(one)} were on the drive, {there} are found")
    return sum(blocks for _, blocks in kept)
