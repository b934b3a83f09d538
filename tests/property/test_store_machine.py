"""A store against a dict: any order of calls, time and completions, and what may never happen.

Everything runs in virtual time on a fake drive, so that an example is the same each time. The books are counted after
each step (`check_invariants`), and every byte that a read brings is compared with what its key stands for.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.harness import SEGMENT_NBYTES, SMALL, Box, Get, chain_of
from tests.property.paths import ALL, named, names

from kvterrace.engine.transfers import Transfer
from kvterrace.handles import Pin
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Effect, Fail, FaultPlan, FlipBit, Hang, PretendDone, Short, Slow, Torn
from kvterrace.keys import KeyChain
from kvterrace.policy.directories import default_policy
from kvterrace.policy.eviction import EvictionPolicy
from kvterrace.types import Busy, Hint, Hit, Miss, Pending, Present, Rejected, Stored

_ROOT = Path(tempfile.mkdtemp(prefix="kvterrace-machine-"))


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Any:
    yield
    shutil.rmtree(_ROOT, ignore_errors=True)


_SILENTLY_TORN = [Torn(pages) for pages in range(6)]


class StoreMachine(RuleBasedStateMachine):
    """No faults. What is stored stays until it is given up on purpose, is pushed out, or the drive is full."""

    faulty = False
    drives = 1

    def __init__(self) -> None:
        super().__init__()
        self.box: Box
        self.puts: list[tuple[Transfer, KeyChain]] = []
        self.gets: list[tuple[Get, set[bytes]]] = []
        self.ended: list[Get] = []
        self.prefetches: list[Transfer] = []
        self.pins: list[tuple[Pin, KeyChain]] = []
        self.void: set[Pin] = set()
        self.given_up: set[bytes] = set()  # keys that were invalidated and not put since
        self.there: set[bytes] = set()  # keys that must be found, if nothing was dropped
        self.dropped = 0
        self.asked_put = self.asked_get = 0
        self.counted_put = self.counted_get = 0

    @initialize(
        dram_blocks=st.integers(4, 12),
        segments=st.integers(5, 9),
        batch_blocks=st.sampled_from([1, 3, 1024]),
        after_s=st.sampled_from([0.0, 2.0]),
        daily_blocks=st.sampled_from([None, 0, 10, 1000]),
        make_policy=st.sampled_from([None, default_policy]),
    )
    def open(
        self,
        dram_blocks: int,
        segments: int,
        batch_blocks: int,
        after_s: float,
        daily_blocks: int | None,
        make_policy: Callable[[], EvictionPolicy] | None,
    ) -> None:
        self.box = Box(
            _ROOT / f"store{self.drives}",
            dram_blocks=dram_blocks,
            segments=segments,
            batch_nbytes=batch_blocks * 8192,
            after_s=after_s,
            faults=FaultPlan(),
            drives=self.drives,
            daily_write_nbytes=None if daily_blocks is None else daily_blocks * 8192,
            make_policy=make_policy,
        )

    # -- calls -----------------------------------------------------------------------------------------------------

    @rule(name=names(), data=st.data(), sequence=st.sampled_from([b"", b"a"]), wait=st.booleans())
    def put(self, name: str, data: st.DataObject, sequence: bytes, wait: bool) -> None:
        chain = named(name)
        start = data.draw(st.integers(0, max(0, self.box.store.match(chain).blocks)), label="start")
        start = min(start, len(chain))
        stop = data.draw(st.integers(start, len(chain)), label="stop")
        deadline_s = data.draw(st.sampled_from([None, 0.0, 0.001, 20.0]), label="deadline_s")
        self.given_up.difference_update(list(chain)[start:stop])
        transfer = self.box.put(chain, start, stop, sequence=sequence, deadline_s=deadline_s)
        self.asked_put += stop - start
        self.puts.append((transfer, chain))
        if wait:
            self.box.wait(transfer, 100.0)
            assert transfer.done, "a put without an end"
        self.settle()

    @rule(name=names(), data=st.data(), wait=st.booleans())
    def get(self, name: str, data: st.DataObject, wait: bool) -> None:
        chain = named(name)
        start = data.draw(st.integers(0, len(chain) - 1), label="start")
        stop = data.draw(st.integers(start, len(chain)), label="stop")
        layers = data.draw(st.sampled_from([None, None, range(1), range(1, 2), range(2)]), label="layers")
        deadline_s = data.draw(st.sampled_from([None, 0.0, 0.00005, 0.0002, 0.001]), label="deadline_s")
        in_pages = data.draw(st.booleans(), label="in_pages")
        self.submit_get(chain, start, stop, layers, deadline_s, wait, in_pages)

    def submit_get(
        self,
        chain: KeyChain,
        start: int,
        stop: int,
        layers: range | None,
        deadline_s: float | None,
        wait: bool,
        in_pages: bool = True,
    ) -> Get:
        get = Get(self.box.store, chain, start, stop, layers=layers, deadline_s=deadline_s, in_pages=in_pages)
        self.asked_get += stop - start
        self.gets.append((get, self.given_up & set(list(chain)[start:stop])))
        if wait:
            self.wait(get.transfer)
            assert get.transfer.done, "a get without an end"
        self.settle()
        return get

    @rule(name=names())
    def match_then_get(self, name: str) -> None:
        """What a match finds is then had, unless there is no room for it, or it was dropped meanwhile."""
        chain = named(name)
        dropped = self.box.store.stats().dropped_blocks
        found = self.box.store.match(chain)
        for shorter in range(len(chain)):
            assert self.box.store.match(chain[:shorter]).tiers == found.tiers[:shorter], "not prefix-closed"
        get = self.submit_get(chain, 0, len(chain), None, None, True)
        if self.faulty or self.box.store.stats().dropped_blocks != dropped:
            return
        for outcome in get.transfer.outcomes[: found.blocks]:
            assert isinstance(outcome, Hit | Busy), f"matched, and then {outcome}"
        for outcome in get.transfer.outcomes[found.blocks :]:
            assert isinstance(outcome, Hit | Miss | Busy), outcome

    @rule(name=names(), wait=st.booleans())
    def prefetch(self, name: str, wait: bool) -> None:
        chain = named(name)
        transfer = self.box.store.prefetch(chain)
        self.prefetches.append(transfer)
        if wait:
            self.wait(transfer)
            assert transfer.done, "a prefetch without an end"
        self.settle()

    @rule(name=names())
    def pin(self, name: str) -> None:
        chain = named(name)
        if sum(pin.blocks for pin, _ in self.pins) < 12:
            self.pins.append((self.box.store.pin(chain), chain))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[0].release()
        self.settle()

    @rule(name=names(), seed=st.integers(0, 3))
    def touch(self, name: str, seed: int) -> None:
        chain = named(name)
        scores = np.random.default_rng(seed).random(len(chain)) if seed else None
        self.box.store.touch(chain, scores=scores)

    @rule(kind=st.sampled_from(Hint), seconds=st.sampled_from([0.0, 1.0, 1000.0]))
    def hint(self, kind: Hint, seconds: float) -> None:
        """What is not written for it counts as dropped when it goes."""
        self.box.store.hint(b"a", kind, seconds=seconds)

    @rule(name=names(), data=st.data())
    def invalidate(self, name: str, data: st.DataObject) -> None:
        chain = named(name)
        start = data.draw(st.integers(0, len(chain) - 1))
        self.box.store.invalidate(chain, start=start)
        for other in ALL:
            if other.data[: (start + 1) * 32] == chain.data[: (start + 1) * 32]:
                self.given_up.update(list(other)[start:])
        self.there -= self.given_up
        assert self.box.store.match(chain).blocks <= start, "invalidated, and still found"
        for pin, pinned in self.pins:
            if self.given_up.intersection(list(pinned)[: pin.blocks]):
                self.void.add(pin)  # it holds what nobody finds any more, until it is released
            self.there.difference_update(pinned)
        self.settle()

    @rule()
    def flush(self) -> None:
        self.box.store.flush(50.0)
        self.settle()

    @rule()
    def evict(self) -> None:
        self.box.store._core.ledger.evict_idle()

    @rule(seconds=st.sampled_from([0.0, 0.00003, 0.0001, 0.001, 0.1, 3.0]))
    def step(self, seconds: float) -> None:
        self.box.step(seconds)
        self.settle()

    @rule()
    def reopen(self) -> None:
        for pin, _ in self.pins:
            pin.release()
        self.pins.clear()
        for transfer, _ in self.puts:
            self.box.wait(transfer, 100.0)
        for get, _ in self.gets:
            self.box.wait(get.transfer, 100.0)
        self.settle()
        self.check_counts()
        old = self.box.store
        fine = self.box.reopen()
        assert fine or self.faulty, "a healthy store does not close"
        self.asked_get = self.asked_put = 0
        self.dropped -= old.stats().dropped_blocks  # 0 if nothing was dropped while closing
        for chain in ALL:
            back = self.given_up.intersection(list(chain)[: self.box.store.match(chain).blocks])
            assert not back or not fine or self.lied(), "back after a restart"
            self.given_up -= back
        self.settle()

    @precondition(lambda self: not self.gets and not self.puts)
    @rule(name=names(), runs=st.integers(1, 2))
    def come_and_go(self, name: str, runs: int) -> None:
        """Runs of the store in each of which little is put, so that segments go on from one to the next."""
        chain = named(name)
        for _ in range(runs):
            at = self.box.store.match(chain).blocks
            if at < len(chain):
                self.given_up.discard(chain.key(at))
                transfer = self.box.put(chain, at, at + 1)
                self.asked_put += 1
                self.puts.append((transfer, chain))
                self.settle()
            self.reopen()
            if not self.faulty:
                files = [path for path in self.box.device.snapshot() if path.suffix == ".seg"]
                assert len(files) <= 2 * self.box.cap_nbytes // SEGMENT_NBYTES + 1, "too many files"

    def wait(self, transfer: Transfer) -> None:
        """Wait for a read."""
        self.box.wait(transfer, 100.0)

    # -- what must hold --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take in what has ended, and count."""
        for transfer, chain in [one for one in self.puts if one[0].done]:
            for index, outcome in enumerate(transfer.outcomes, transfer.start):
                assert isinstance(outcome, Stored | Present | Busy | Rejected), outcome
                if isinstance(outcome, Stored) and chain.key(index) not in self.given_up:
                    self.there.add(chain.key(index))
        self.puts = [one for one in self.puts if not one[0].done]
        for get, forbidden in [one for one in self.gets if one[0].transfer.done]:
            get.check()
            self.check_outcomes(get, forbidden)
            self.ended.append(get)
        self.gets = [one for one in self.gets if not one[0].transfer.done]
        for get in self.ended[-8:]:
            get.check()
        self.prefetches = [one for one in self.prefetches if not one.done]
        for transfer in self.prefetches:
            assert any(isinstance(outcome, Pending) for outcome in transfer.outcomes)
        self.box.check()
        if not (self.puts or self.gets):
            self.check_counts()
        self.check_there()

    def check_outcomes(self, get: Get, forbidden: set[bytes]) -> None:
        for index, outcome in enumerate(get.transfer.outcomes, get.start):
            if not self.faulty:
                assert type(outcome).__name__ in ("Hit", "Miss", "Expired", "Busy"), outcome
            if isinstance(outcome, Hit):
                assert get.chain.key(index) not in forbidden & self.given_up, "invalidated, and served"

    def check_counts(self) -> None:
        stats = self.box.store.stats()
        put = [getattr(stats, name) for name in stats.__slots__ if name.startswith("put_")]
        get = [getattr(stats, name) for name in stats.__slots__ if name.startswith("get_")]
        assert sum(put) == self.asked_put, "put outcomes do not add up"
        assert sum(get) == self.asked_get, "get outcomes do not add up"

    def check_there(self) -> None:
        """What was stored is found, if nothing was dropped; what was dropped is not asked for any more."""
        dropped = self.box.store.stats().dropped_blocks
        found = {chain: self.box.store.match(chain).blocks for chain in ALL}
        if dropped == self.dropped and not self.faulty:
            for chain, blocks in found.items():
                keys = list(chain)
                stored = next((i for i, key in enumerate(keys) if key not in self.there), len(keys))
                assert stored <= blocks, f"{stored} blocks are stored, {blocks} are found"
        self.dropped = dropped
        self.there &= {key for chain, blocks in found.items() for key in list(chain)[:blocks]}
        if not self.faulty:
            for pin, chain in self.pins:
                if pin not in self.void:
                    assert self.box.store.match(chain).blocks >= pin.blocks, "a pinned block is lost"

    def teardown(self) -> None:
        if not hasattr(self, "box"):
            return
        self.end()
        for pin, _ in self.pins:
            pin.release()
        self.box.rest()
        self.settle()
        assert not self.puts and not self.gets and not self.prefetches
        self.box.store.close(100.0)
        for get in self.ended:
            get.check()

    def lied(self) -> bool:
        """Whether the drive has taken a write that never arrived: it may have been an invalidation."""
        return any(
            operation.kind is IoKind.WRITE and (isinstance(effect, PretendDone) or effect in _SILENTLY_TORN)
            for operation, effect in self.box.faults.fired
        )

    def end(self) -> None:
        """Before the last look."""


class FaultyStoreMachine(StoreMachine):
    """The same on a drive that lies, fails, tears, stalls and is full. Blocks may be lost, never wrong."""

    faulty = True

    @rule(
        effect=st.one_of(
            st.just(Fail(errno.EIO)),
            st.just(PretendDone()),
            st.builds(FlipBit, st.integers(0, 20_000), st.integers(0, 7)),
            st.builds(Short, st.integers(0, 5).map(lambda pages: pages * 4096)),
            st.builds(Slow, st.sampled_from([0.001, 1.0, 10.0])),
            st.just(Hang()),
        ),
        nth=st.integers(1, 3),
    )
    def read_fault(self, effect: Effect, nth: int) -> None:
        self.box.faults.add(effect, IoKind.READ, nth=nth)

    @rule(
        effect=st.one_of(
            st.just(Fail(errno.EIO)),
            st.just(Fail(errno.ENOSPC)),
            st.just(PretendDone()),
            st.builds(Short, st.integers(0, 5).map(lambda pages: pages * 4096)),
            st.builds(Torn, st.integers(0, 5), st.sampled_from([None, errno.EIO])),
            st.builds(Slow, st.sampled_from([0.001, 1.0, 10.0])),
            st.just(Hang()),
        ),
        nth=st.integers(1, 3),
    )
    def write_fault(self, effect: Effect, nth: int) -> None:
        self.box.faults.add(effect, IoKind.WRITE, nth=nth)

    @rule(effect=st.sampled_from([Fail(errno.ENOSPC), Fail(errno.EIO)]), nth=st.integers(1, 2))
    def create_fault(self, effect: Effect, nth: int) -> None:
        self.box.faults.add(effect, "create", nth=nth)

    @rule(effect=st.sampled_from([Fail(errno.EIO), Slow(1.0)]))
    def sync_fault(self, effect: Effect) -> None:
        self.box.faults.add(effect, IoKind.SYNC, nth=1)

    @rule()
    def heal(self) -> None:
        self.box.faults.clear()
        self.box.device.release()
        self.box.step(0.001)
        self.settle()

    def wait(self, transfer: Transfer) -> None:
        """A read without a deadline waits as long as the drive hangs."""
        while not transfer.done:
            self.box.device.release()
            self.box.wait(transfer, 12.0)

    def settle(self) -> None:
        if self.box.device._hung and any(  # somebody waits for ever otherwise
            not one[0].done for one in self.puts
        ):
            self.box.device.release()
        super().settle()

    def check_there(self) -> None:
        self.there.clear()

    @precondition(lambda self: not self.gets and not self.puts)
    @rule()
    def reopen(self) -> None:
        self.heal()
        super().reopen()

    def end(self) -> None:
        """The faults are over: the store goes on, and takes again what was lost."""
        self.heal()
        for pin, _ in self.pins:
            pin.release()
        self.pins.clear()
        self.box.rest()
        self.box.step(6.0)  # longer than writes pause after a failure
        self.settle()
        chain = chain_of(SMALL, [1, 0])
        self.given_up.difference_update(chain)
        outcomes = self.box.put_now(chain)
        assert all(isinstance(outcome, Stored | Present) for outcome in outcomes), outcomes
        got = self.box.get_now(chain)
        if not all(isinstance(outcome, Hit) for outcome in got):  # a write that never happened had the last word
            assert all(isinstance(outcome, Stored | Present) for outcome in self.box.put_now(chain))
            assert all(isinstance(outcome, Hit) for outcome in self.box.get_now(chain))
        self.asked_put, self.asked_get = -1, -1

    def check_counts(self) -> None:
        if self.asked_put >= 0:
            super().check_counts()


class StripedStoreMachine(StoreMachine):
    """A store over three drives."""

    drives = 3


class FaultyStripedStoreMachine(FaultyStoreMachine):
    """Of two drives, the first is the one with the faults."""

    drives = 2


_SETTINGS = {
    "stateful_step_count": 30,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=150, **_SETTINGS)  # type: ignore[arg-type]
TestFaultyStore = FaultyStoreMachine.TestCase
TestFaultyStore.settings = settings(max_examples=150, **_SETTINGS)  # type: ignore[arg-type]
TestStripedStore = StripedStoreMachine.TestCase
TestStripedStore.settings = settings(max_examples=100, **_SETTINGS)  # type: ignore[arg-type]
TestFaultyStripedStore = FaultyStripedStoreMachine.TestCase
TestFaultyStripedStore.settings = settings(max_examples=100, **_SETTINGS)  # type: ignore[arg-type]
