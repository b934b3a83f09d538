"""A store on a fake drive in virtual time: deterministic, stepped by who holds it. And what its blocks must hold."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.clock import ManualClock
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.space import SegmentState
from kvterrace.engine.transfers import Transfer
from kvterrace.io.base import IoKind, IoRequest
from kvterrace.io.fake import FakeDevice
from kvterrace.io.faults import FaultPlan
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.policy.eviction import EvictionPolicy
from kvterrace.store import Store
from kvterrace.testing.invariants import check_invariants
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Hit

#: A record of two pages (header, 256 B of payload), and one of four (12,288 B in six parts, none on a page boundary but
#: every second).
SMALL = Namespace("small", KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4))
LARGE = Namespace("large", KVLayout(layers=3, kv_heads=2, head_dim=64, dtype="float16", block_tokens=8))
SMALL_NBYTES = 2 * 4096
LARGE_NBYTES = 4 * 4096
SEGMENT_NBYTES = 64 << 10
UNTOUCHED = 0xA5

_numbers = itertools.count()


def chain_of(namespace: Namespace, path: Sequence[int]) -> KeyChain:
    """A chain of `len(path)` blocks; chains share as many blocks as their paths share steps."""
    return _chain_of(namespace, tuple(path))


@functools.lru_cache(4096)
def _chain_of(namespace: Namespace, path: tuple[int, ...]) -> KeyChain:
    return chain_keys(namespace, np.repeat(np.array(path, np.int64), namespace.layout.block_tokens))


@functools.lru_cache(8192)
def content(key: bytes, nbytes: int) -> bytes:
    """What the block of `key` holds: from the key alone, by a way that the library does not know."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).bytes(nbytes)


def contents(chain: KeyChain, start: int = 0, stop: int | None = None) -> bytearray:
    """What blocks `start..stop` hold, end to end."""
    nbytes = chain.namespace.layout.block_nbytes
    return bytearray(b"".join(content(key, nbytes) for key in list(chain)[start:stop]))


def layer_bytes(chain: KeyChain, index: int, layers: range | None) -> bytes:
    """What a read of `layers` must bring of block `index`."""
    layout = chain.namespace.layout
    whole = content(chain.key(index), layout.block_nbytes)
    if layers is None:
        return whole
    per_layer = layout.block_nbytes // layout.layers
    return whole[layers.start * per_layer : layers.stop * per_layer]


class Box:
    """A store, its drives and its clock. `device` and `faults` are those of the first drive.

    `reads` and `writes` are what the drives were asked for: (file name, offset, bytes), in order of submission. `asked`
    is that of everything, by drive and call of `submit`, and with the kind of request.
    """

    def __init__(
        self,
        root: Path | None,
        *,
        dram_blocks: int = 12,
        segments: int = 6,
        faults: FaultPlan | None = None,
        busy_after_s: float = 5.0,
        after_s: float = 2.0,
        batch_nbytes: int = 8 << 20,
        parallel: int = 4,
        latency_s: float = 100e-6,
        bytes_per_s: float = 2e9,
        drives: int = 1,
        daily_write_nbytes: int | None = None,
        make_policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        """`segments`: room on each drive. Copies in memory run on the only drive, or beside them if there are more."""
        self.clock = ManualClock(1000.0)
        self.root = root
        self.partition = f"p{next(_numbers)}"
        self.faults = faults or FaultPlan()
        self.plans = [self.faults, *(FaultPlan() for _ in range(1, drives))]
        #: Whether no fault was ever planned.
        self.sound = True
        for plan in self.plans:
            plan.add = self._noting(plan.add)  # type: ignore[method-assign]
        self.dram_nbytes = dram_blocks * SMALL_NBYTES
        self.cap_nbytes = segments * SEGMENT_NBYTES * drives
        self.segment_nbytes = SEGMENT_NBYTES
        self.busy_after_s = busy_after_s
        self.daily_write_nbytes = daily_write_nbytes
        self.make_policy = make_policy
        self.writes_policy = WritePolicy(after_s=after_s, batch_nbytes=batch_nbytes)
        self.reads: list[tuple[str, int, int]] = []
        self.writes: list[tuple[str, int, int]] = []
        self.asked: list[tuple[int, list[tuple[IoKind, str, int, int]]]] = []
        self.devices = [
            FakeDevice(self.clock, parallel=parallel, faults=plan, latency_s=latency_s, bytes_per_s=bytes_per_s)
            for plan in self.plans
        ]
        #: Requests that the store may still submit until the next `check`: an example must not go on for ever.
        self.patience = 5000
        #: What a test has the store count though it is not there: others' files.
        self.made_up_nbytes = 0
        self.store = self._open()

    def _noting(self, add: Callable[..., FaultPlan]) -> Callable[..., FaultPlan]:
        def noted(*arguments: Any, **named: Any) -> FaultPlan:
            self.sound = False
            return add(*arguments, **named)

        return noted

    def _open(self) -> Store:
        for number, device in enumerate(self.devices):
            self._watch(number, device)
        directories = []
        if self.root is not None:
            alone = len(self.devices) == 1
            roots = [self.root if alone else self.root / f"d{number}" for number in range(len(self.devices))]
            directories = [StoreDirectory.open(root, self.partition, created_unix_s=0.0) for root in roots]
        if self.daily_write_nbytes is not None:  # its file is in the real folder, which the fake drive does not list
            there = bool(directories) and (directories[0].partition / "budget").exists()
            self.made_up_nbytes = 0 if there or not directories else 4096
        pairs = list(zip(directories, self.devices, strict=False))
        one = len(pairs) == 1
        self.copies = self.device if len(pairs) < 2 else FakeDevice(self.clock)
        return Store(
            dram_nbytes=self.dram_nbytes,
            ssd_nbytes=self.cap_nbytes,
            directory=directories[0] if one else None,
            engine=self.copies,
            more=[] if one else pairs,
            clock=self.clock,
            writes=self.writes_policy,
            busy_after_s=self.busy_after_s,
            segment_nbytes=self.segment_nbytes,
            background=False,
            daily_write_nbytes=self.daily_write_nbytes,
            make_policy=self.make_policy,
        )

    @property
    def device(self) -> FakeDevice:
        return self.devices[0]

    @device.setter
    def device(self, device: FakeDevice) -> None:
        self.devices[0] = device

    def _watch(self, number: int, device: FakeDevice) -> None:
        submit = device.submit

        def watched(requests: Sequence[IoRequest]) -> None:
            batch: list[tuple[IoKind, str, int, int]] = []
            self.asked.append((number, batch))
            self.patience -= len(requests)
            assert self.patience > 0, "the store is busy and gets nowhere"
            for request in requests:
                if request.file is None:
                    continue
                place = request.file.path.name, request.offset, sum(buffer.nbytes for buffer in request.buffers)
                batch.append((request.kind, *place))
                log = {IoKind.READ: self.reads, IoKind.WRITE: self.writes}.get(request.kind)
                if log is not None:
                    log.append(place)
            submit(requests)

        device.submit = watched  # type: ignore[method-assign]

    def reopen(self, timeout_s: float = 1000.0) -> bool:
        """Close the store and open it again on the same drives. What `close` said."""
        fine = self.store.close(timeout_s)
        self._reopen()
        return fine

    def kill(self) -> None:
        """The process dies, and another one opens the same drives."""
        for directory, _ in self.store._drives:
            directory.close()
        self._reopen()

    def _reopen(self) -> None:
        self.devices = [device.crash_image(lambda _: True) for device in self.devices]
        for device, plan in zip(self.devices, self.plans, strict=True):
            device.faults = plan
        self.store = self._open()

    def wait(self, transfer: Transfer, timeout_s: float = 100.0) -> None:
        """As `Store.wait`, but a loop in which no time passes fails rather than hangs."""
        limit_s, rounds = self.clock.monotonic_s() + timeout_s, 0
        while not transfer.done and self.clock.monotonic_s() < limit_s:
            rounds += 1
            assert rounds < 20_000, "the store is busy and gets nowhere"
            driver, mover = self.store._driver, self.store._mover
            driver._step(min(limit_s - self.clock.monotonic_s(), mover.timeout_s()))
        self.store.wait(transfer, 0.0)

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and the store take in what has happened."""
        self.clock.advance(seconds)
        self.store.poll()

    def rest(self, timeout_s: float = 100.0, tick_s: float = 0.05) -> None:
        """Go on until no transfer is open and the drive is idle."""
        for _ in range(round(timeout_s / tick_s)):
            if not self.store._mover.active and not any(engine.in_flight for engine in self.store._core.engines):
                return
            self.step(tick_s)
        stats = self.store.stats()
        raise AssertionError(f"the store does not come to rest: {stats}, {self.store._core.ledger.spaces}")

    @property
    def writer(self) -> Any:
        """The writer of the first drive, for who looks inside."""
        writers = self.store._mover.writers
        assert writers is not None
        return writers.each[0]

    def put(self, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> Transfer:
        return self.store.put(chain, contents(chain, start, stop), start=start, stop=stop, **options)

    def put_now(self, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> list[Any]:
        transfer = self.put(chain, start, stop, **options)
        self.wait(transfer)
        return transfer.outcomes

    def get_now(self, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> list[Any]:
        """Read, and compare what arrived; the outcomes."""
        got = Get(self.store, chain, start, stop, **options)
        self.wait(got.transfer)
        got.check()
        return got.transfer.outcomes

    def cool(self) -> None:
        """Write everything, and empty DRAM."""
        assert self.store.flush(1000.0)
        self.store._core.ledger.evict_idle()

    def check(self) -> None:
        """The books are in order, and the drive holds no more than it may."""
        check_invariants(self.store)
        self.patience = 5000
        cap_nbytes = self.cap_nbytes // len(self.devices)
        for device in self.devices:
            taken = sum(file.allocated_nbytes for file in device._medium.names.values())
            assert taken <= cap_nbytes, f"{taken} B on the drive, over the cap of {cap_nbytes} B"
        self.check_count()

    def check_count(self) -> None:
        """What the store counts is at least what the drive holds; to the byte, where nothing is on its way and no fault
        was planned: of a file of which a fault leaves the size in doubt, the larger one is counted.
        """
        for device, drive in zip(self.devices, self.store._core.volumes, strict=False):
            taken = sum(file.allocated_nbytes for file in device._medium.names.values())
            counted = drive.space.file_nbytes - self.made_up_nbytes
            assert counted >= taken, f"{counted} B counted, {taken} B on the drive"
            # of a stuck one the name may be gone, and come back
            changing = SegmentState.CREATING, SegmentState.SEALING, SegmentState.RECLAIMING, SegmentState.STUCK
            at_rest = not device.in_flight and not any(drive.space.in_state(state) for state in changing)
            if self.sound and at_rest:
                assert counted == taken, f"{counted} B counted, {taken} B on the drive at rest"


def memory_of(nbytes: int, *, in_pages: bool = True) -> Bytes:
    """Memory of a caller's, full of `UNTOUCHED`, that begins on a page boundary or just does not."""
    memory = np.full(nbytes + 2 * 4096, UNTOUCHED, np.uint8)
    start = -memory.ctypes.data % 4096 + (0 if in_pages else 64)
    return memory[start : start + nbytes]


class Get:
    """A read in flight, and the memory it may write to. `in_pages`: a drive could read into it."""

    def __init__(
        self,
        store: Store,
        chain: KeyChain,
        start: int = 0,
        stop: int | None = None,
        *,
        layers: range | None = None,
        deadline_s: float | None = None,
        in_pages: bool = True,
    ) -> None:
        self.chain, self.start, self.layers = chain, start, layers
        stop = len(chain) if stop is None else stop
        layout = chain.namespace.layout
        self.width = layout.block_nbytes if layers is None else layout.block_nbytes // layout.layers * len(layers)
        self.out: Bytes = memory_of((stop - start) * self.width, in_pages=in_pages)
        whole_pages = in_pages and layers is None and self.width % 4096 == 0
        #: Whether blocks that do not end in a Hit may have been written to.
        self.lent = whole_pages and deadline_s is None
        self.transfer = store.get(chain, self.out, start=start, stop=stop, layers=layers, deadline_s=deadline_s)

    def check(self) -> None:
        """Hits hold what they must, all other memory is as it was, unless it was lent to the drive. Only for a transfer
        that is done.
        """
        assert self.transfer.done
        for at, outcome in enumerate(self.transfer.outcomes):
            found = self.out[at * self.width : (at + 1) * self.width].tobytes()
            if isinstance(outcome, Hit):
                assert found == layer_bytes(self.chain, self.start + at, self.layers), f"wrong bytes as {outcome}"
            elif not self.lent:
                assert found == bytes([UNTOUCHED]) * self.width, f"memory was touched and the outcome is {outcome}"


def kinds(outcomes: Sequence[object]) -> list[str]:
    """Names of outcomes, for short comparisons."""
    return [type(outcome).__name__ for outcome in outcomes]
