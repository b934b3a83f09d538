"""Power cuts at every completed step of a workload: torn pages, lost writes, names that come back (FakeDevice)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.crash.kit import MiB, chain_of, checked, put, stored

from kvterrace import Hit, KeyChain, Miss, Store
from kvterrace.clock import ManualClock
from kvterrace.engine.dirty import WritePolicy
from kvterrace.io.base import IoResult
from kvterrace.io.fake import FakeDevice, keep_randomly
from kvterrace.tiers.directory import StoreDirectory

_SEGMENT_NBYTES = 64 << 10
_UUID = bytes(range(16))
_SEEDS = 3


class _Rig:
    """A store on a fake drive; at every completion, images of the drive after a power cut are opened and read."""

    def __init__(self, root: Path, segments: int) -> None:
        self.root = root
        self.clock = ManualClock(1000.0)
        self.cap = segments * _SEGMENT_NBYTES
        self.device = FakeDevice(self.clock, parallel=3)
        self.durable: dict[bytes, KeyChain] = {}  # chains that a flush has covered, by last key
        self.dead: dict[bytes, KeyChain] = {}  # of an invalidation that a flush has covered
        self.images = 0
        self.seeds = itertools.count()
        self.poll = self.device.poll
        self.store = self.opened(self.device)
        self.device.poll = self._watched  # type: ignore[method-assign]

    def opened(self, device: FakeDevice) -> Store:
        return Store(
            dram_nbytes=MiB,
            ssd_nbytes=self.cap,
            directory=StoreDirectory(self.root, self.root / "partitions" / "main", _UUID, None),
            engine=device,
            clock=self.clock,
            writes=WritePolicy(after_s=0.01, batch_nbytes=4 * 8192),
            segment_nbytes=_SEGMENT_NBYTES,
            background=False,
        )

    def _watched(self, timeout_s: float) -> list[IoResult]:
        results = self.poll(timeout_s)
        if any(result.request.file is not None or result.value is not None for result in results):
            self.cut()
        return results

    def cut(self) -> None:
        """Cut the power now, in several ways, and look."""
        for share in (0.0, 0.5, 1.0)[:_SEEDS]:
            rng = random.Random(next(self.seeds))
            image = self.device.crash_image(keep_randomly(rng, changes=share, names=rng.choice((0.0, 0.5, 1.0))))
            self.images += 1
            assert sum(len(data) for data in image.snapshot().values()) <= self.cap
            self.look(self.opened(image))

    def restart(self, *, close: bool) -> None:
        """The process ends or is killed; the drive, and what it has not made durable, stay. Another one opens it."""
        if close:
            assert self.store.close(1000.0)
        device = FakeDevice(self.clock, parallel=3)
        device._medium = self.device._medium
        self.device, self.poll = device, device.poll
        self.store = self.opened(device)
        device.poll = self._watched  # type: ignore[method-assign]

    def look(self, store: Store) -> None:
        for chain in self.durable.values():
            outcomes = checked(store, chain)
            assert all(isinstance(one, Hit) for one in outcomes), f"lost after a flush: {outcomes}"
        for chain in self.dead.values():
            assert store.match(chain).blocks == 0, "an invalidated block is back"
        for number in range(30):
            outcomes = checked(store, chain_of(number, 6))
            assert all(isinstance(one, (Hit, Miss)) for one in outcomes), outcomes
        fresh = chain_of(1000, 3)
        stored(store, fresh)
        assert store.flush(60.0)
        assert store.close(60.0)

    def flush(self, *chains: KeyChain) -> None:
        assert self.store.flush(1000.0)
        self.durable.update((chain.key(len(chain) - 1), chain) for chain in chains)


def _grow(rig: _Rig) -> None:
    store = rig.store
    for number in range(6):
        stored(store, chain_of(number, 6), sequence=bytes([number % 3]))
        if number % 2:
            rig.flush(chain_of(number, 6), chain_of(number - 1, 6))
    rig.clock.advance(1.0)
    store.poll()
    rig.durable.pop(chain_of(2, 6).key(5))
    store.invalidate(chain_of(2, 6))
    assert store.flush(1000.0)
    rig.dead[b"2"] = chain_of(2, 6)
    rig.durable.pop(chain_of(3, 6).key(5))
    store.invalidate(chain_of(3, 6), start=3)
    rig.flush(chain_of(3, 3))
    rig.dead.pop(b"2")
    stored(store, chain_of(2, 6))
    rig.flush(chain_of(2, 6))
    put(store, chain_of(7, 6))
    assert store.close(1000.0)


def _crowd(rig: _Rig) -> None:
    """More than the drive holds: segments go, what was invalidated stays dead."""
    store = rig.store
    hot, dead = chain_of(40, 4), chain_of(50, 2)  # one segment; its tombstone goes to the next
    stored(store, hot)
    stored(store, dead)
    rig.flush()
    store.invalidate(dead)
    rig.flush()
    rig.dead[b"50"] = dead
    for number in range(30):
        stored(store, chain_of(number, 6))
        checked(store, chain_of(number // 2, 6))
        rig.clock.advance(30.0)  # so that age counts
        checked(store, hot)
        if number % 5 == 0:
            rig.flush()
    assert store.stats().reclaimed_segments > 5
    assert store.close(1000.0)


def _come_and_go(rig: _Rig) -> None:
    """Little is put in each run: segments go on over restarts, some of which are kills in the middle of a write."""
    for number in range(9):
        mine, last = chain_of(number, 2), chain_of(number - 1, 2)
        stored(rig.store, mine)
        if number % 3 != 2:
            rig.flush(mine)
        if number % 3 == 1:
            rig.durable.pop(last.key(1))
            rig.store.invalidate(last)
            rig.flush()
            rig.dead[bytes([number])] = last
        if number % 4 == 3:
            put(rig.store, chain_of(20 + number, 3))
            rig.clock.advance(0.02)
            rig.store.poll()
        rig.restart(close=number % 2 == 0)
        if number in (2, 8):  # not flushed, but close said that all was written
            rig.durable[mine.key(1)] = mine
    assert rig.store.close(1000.0)


@pytest.mark.parametrize(("workload", "segments"), [(_grow, 40), (_crowd, 6), (_come_and_go, 30)])
def test_power_cuts_at_every_step(tmp_path: Path, workload: Callable[[_Rig], None], segments: int) -> None:
    rig = _Rig(tmp_path, segments)
    workload(rig)
    assert rig.images > 100
    rig.cut()


def test_a_flush_whose_sync_fails_says_so(tmp_path: Path) -> None:
    import errno

    from kvterrace.io.base import IoKind
    from kvterrace.io.faults import Fail

    rig = _Rig(tmp_path, 40)
    stored(rig.store, chain_of(0, 6))
    rig.device.faults.add(Fail(errno.EIO), IoKind.SYNC, nth=1)
    assert not rig.store.flush(1000.0)
    rig.clock.advance(60.0)
    rig.store.poll()
    rig.flush(chain_of(0, 6))  # written anew, elsewhere: a second SYNC of the same file would prove nothing
    rig.cut()
    assert rig.store.close(1000.0)


def test_what_is_written_during_a_sync_is_synced_by_the_next_flush(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, 40)
    chains: Sequence[KeyChain] = [chain_of(number, 3) for number in range(12)]
    for number, chain in enumerate(chains):
        stored(rig.store, chain)
        if number % 4 == 3:
            rig.flush(*chains[: number + 1])
        else:
            rig.clock.advance(0.02)
            rig.store.poll()
    rig.cut()
