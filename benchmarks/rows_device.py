"""Rows over a drive of known speed: whether a batch keeps it busy, and what demand reads suffer from the rest."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.common import (
    chain_of,
    dram_nbytes_for,
    filled,
    filled_all,
    memory_of,
    noise_of,
    opened,
    require_ends,
    require_equal,
    shm,
    ssd_nbytes_for,
    timed_get,
)
from benchmarks.paced import paced_drive
from benchmarks.pairs import Row, Side

from kvterrace import KVLayout
from kvterrace.buffers import Bytes
from kvterrace.clock import ManualClock, SystemClock
from kvterrace.io.base import IoEngine
from kvterrace.io.fake import FakeDevice
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.store import Store
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Hit, Stored, Tier

_LATENCY_S = 1e-3
_PARALLEL = 32
#: 256 MiB in blocks of 32 KiB: of these, the ideal drive moves 1 GB/s.
BATCH_LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16", block_tokens=32)
BATCH_BLOCKS = 8192

BATCH = Row(
    "batch",
    0.95,
    what="one get of 8192 blocks of 32 KiB, as a chain lies, from a drive of 1 ms and 32 places / 8192 / 32 x 1 ms",
    unit="blocks/s",
)
SCATTERED = Row(
    "batch-scattered",
    0.95,
    what="the same of blocks of which no two are neighbours, so that each is read by itself",
    unit="blocks/s",
)

#: 256 MiB in blocks of 256 KiB, in virtual time.
FAKE_LAYOUT = KVLayout(layers=16, kv_heads=2, head_dim=64, dtype="float16", block_tokens=32)
FAKE_BLOCKS = 1024

FAKE_BATCH = Row(
    "batch-fake",
    0.95,
    what="one get of 1024 blocks of 256 KiB, no two of them neighbours, from the fake device (virtual time: the "
    "order of things alone, no program and no memory) of 1 ms and 32 places / 1024 / 32 x 1 ms",
    unit="blocks/s",
)

#: 1 MiB, as many pieces as a demand read is cut into: one.
DEMAND_LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=128, dtype="float16", block_tokens=16)
DEMAND_BLOCKS = 256
#: What waits to be moved meanwhile, all from the start: prefetches go before demotion, so fewer of them; and together
#: more than the drive moves in that time.
PREFETCHED_BLOCKS, DEMOTED_BLOCKS = 128, 1024
_BYTES_PER_S = 2e9

DEMAND_P99 = Row(
    "demand-p99",
    1.5,
    "lower",
    what="p99 of 256 gets of 1 MiB one by one from a drive of 1 ms and 2 GB/s, beside a prefetch of 128 MiB and "
    "a flush of 1 GiB / alone",
    unit="ms",
)


def _paced_store(folder: Path, drive: IoEngine, blocks: int, layout: KVLayout) -> Store:
    clock = SystemClock()
    return Store(
        dram_nbytes=dram_nbytes_for(blocks, layout),
        ssd_nbytes=ssd_nbytes_for(2 * blocks * layout.block_nbytes),
        directory=StoreDirectory.open(folder, "main", created_unix_s=clock.unix_s()),
        engine=drive,
        clock=clock,
    )


@contextlib.contextmanager
def batch(_: Path) -> Iterator[tuple[Side, Side]]:
    """Blocks a second. Neighbours are merged into requests of 4 MiB, as always: the drive is asked less than once a
    block, which is why this can do better than the ideal.
    """
    chain, source = chain_of(BATCH_BLOCKS, BATCH_LAYOUT), noise_of(BATCH_BLOCKS * BATCH_LAYOUT.block_nbytes)
    with shm() as folder:
        filled(folder / "store", chain, source)
        with _batch(folder / "store", chain, source) as sides:
            yield sides


@contextlib.contextmanager
def scattered(_: Path) -> Iterator[tuple[Side, Side]]:
    """Blocks a second. Blocks of two chains were written in turn, so that no two reads can be merged."""
    chain, other = (chain_of(BATCH_BLOCKS, BATCH_LAYOUT, name) for name in ("bench", "other"))
    source = noise_of(BATCH_BLOCKS * BATCH_LAYOUT.block_nbytes)
    with shm() as folder:
        _interleave(folder / "store", (chain, other), source)
        with _batch(folder / "store", chain, source, requests=BATCH_BLOCKS) as sides:
            yield sides


@contextlib.contextmanager
def _batch(place: Path, chain: KeyChain, source: Bytes, requests: int = 0) -> Iterator[tuple[Side, Side]]:
    """`requests`: as many as it must take; 0: any number."""
    target = memory_of(source.nbytes)

    def ours() -> float:
        drive = paced_drive(latency_s=_LATENCY_S, parallel=_PARALLEL)
        with _paced_store(place, drive, len(chain), chain.namespace.layout) as store:
            taken_s = timed_get(store, chain, target, Tier.SSD)
            assert not requests or store.stats().ssd_read_requests == requests, "reads were merged"
        require_equal(target, source, "batched get")
        return len(chain) / taken_s

    yield ours, lambda: _PARALLEL / _LATENCY_S


@contextlib.contextmanager
def fake_batch(folder: Path) -> Iterator[tuple[Side, Side]]:
    """Blocks a second of virtual time."""
    chains = tuple(chain_of(FAKE_BLOCKS, FAKE_LAYOUT, name) for name in ("bench", "other"))
    source, target = noise_of(FAKE_BLOCKS * FAKE_LAYOUT.block_nbytes), memory_of(FAKE_BLOCKS * FAKE_LAYOUT.block_nbytes)
    clock = ManualClock(1000.0)
    drive = FakeDevice(clock, latency_s=_LATENCY_S, parallel=_PARALLEL, bytes_per_s=float("inf"))
    store = Store(
        dram_nbytes=dram_nbytes_for(2 * FAKE_BLOCKS, FAKE_LAYOUT),
        ssd_nbytes=ssd_nbytes_for(4 * FAKE_BLOCKS * FAKE_LAYOUT.block_nbytes),
        directory=StoreDirectory.open(folder, "main", created_unix_s=0.0),
        engine=drive,
        clock=clock,
        background=False,
    )
    _fill_in_turn(store, chains, source)

    def ours() -> float:
        store._core.ledger.evict_idle()  # noqa: SLF001 - all has a copy on the drive
        asked = store.stats().ssd_read_requests
        began_s = clock.monotonic_s()
        ends = store.wait(store.get(chains[0], target))
        taken_s = clock.monotonic_s() - began_s
        require_ends(ends, Hit(Tier.SSD))
        assert store.stats().ssd_read_requests - asked == FAKE_BLOCKS, "reads were merged"
        require_equal(target, source, "batched get")
        return FAKE_BLOCKS / taken_s

    with store:
        yield ours, lambda: _PARALLEL / _LATENCY_S


def _interleave(folder: Path, chains: tuple[KeyChain, ...], source: np.ndarray) -> None:
    layout, blocks = chains[0].namespace.layout, len(chains[0])
    with opened(folder, 2 * blocks, layout) as store:
        _fill_in_turn(store, chains, source)


def _fill_in_turn(store: Store, chains: tuple[KeyChain, ...], source: np.ndarray) -> None:
    for at, block in enumerate(source.reshape(len(chains[0]), -1)):
        for chain in chains:
            require_ends(store.wait(store.put(chain, block, start=at, stop=at + 1)), Stored(Tier.DRAM))
            assert store.flush(10.0)


@contextlib.contextmanager
def demand_p99(_: Path) -> Iterator[tuple[Side, Side]]:
    """Milliseconds, of gets that follow each other by less than the scheduler takes for a pause of demand."""
    layout, nbytes = DEMAND_LAYOUT, DEMAND_BLOCKS * DEMAND_LAYOUT.block_nbytes
    source, target = noise_of(nbytes), memory_of(nbytes)
    namespace = Namespace("demand", layout)
    wanted = [
        chain_keys(namespace, np.arange(at, at + layout.block_tokens))
        for at in range(0, DEMAND_BLOCKS * layout.block_tokens, layout.block_tokens)
    ]
    prefetched, demoted = (chain_of(count, layout, f"{count}") for count in (PREFETCHED_BLOCKS, DEMOTED_BLOCKS))
    load = noise_of(DEMOTED_BLOCKS * layout.block_nbytes, seed=2)
    turn = iter(range(1 << 30))
    with shm() as folder:
        filled_all(folder / "store", [*wanted, prefetched], np.concatenate([source, source]))

        def side(*, beside: bool) -> float:
            place = folder / f"store{next(turn)}"
            shutil.copytree(folder / "store", place)
            drive = paced_drive(latency_s=_LATENCY_S, parallel=_PARALLEL, bytes_per_s=_BYTES_PER_S)
            with _paced_store(place, drive, DEMAND_BLOCKS + PREFETCHED_BLOCKS + DEMOTED_BLOCKS, layout) as store:
                flush = threading.Thread(target=store.flush, args=(60.0,))
                if beside:
                    require_ends(store.wait(store.put(demoted, load)), Stored(Tier.DRAM))
                    prefetch = store.prefetch(prefetched)
                    flush.start()
                taken_s, ends = [], []
                for chain, out in zip(wanted, target.reshape(DEMAND_BLOCKS, -1), strict=True):
                    began_s = time.perf_counter()
                    ends += store.wait(store.get(chain, out))
                    taken_s.append(time.perf_counter() - began_s)
                if beside:
                    assert flush.is_alive(), "the load ended before the gets"
                    assert prefetch.done_blocks and store.stats().ssd_written_nbytes, "there was no load"
                    flush.join()
                    require_ends(store.wait(prefetch), Hit(Tier.SSD))
                require_ends(ends, Hit(Tier.SSD))
            require_equal(target, source, "gets one by one")
            shutil.rmtree(place)
            return float(np.percentile(taken_s, 99, method="higher")) * 1e3

        yield lambda: side(beside=True), lambda: side(beside=False)


BENCHES = [(FAKE_BATCH, fake_batch), (BATCH, batch), (SCATTERED, scattered), (DEMAND_P99, demand_p99)]
