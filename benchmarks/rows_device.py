"""Rows over a drive of known speed: whether a batch keeps it busy, and what demand reads suffer from the rest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.common import (
    MIB,
    chain_of,
    dram_nbytes_for,
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
from kvterrace.clock import SystemClock
from kvterrace.io.base import IoEngine
from kvterrace.keys import KeyChain
from kvterrace.store import Store
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import Hit, Stored, Tier

_LATENCY_S = 1e-3
_PARALLEL = 32
#: 256 MiB in blocks of 32 KiB: even the ideal drive moves 1 GB/s of these, which this machine can check and copy.
BATCH_LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16", block_tokens=32)
BATCH_BLOCKS = 8192

BATCH = Row(
    "batch",
    0.95,
    what="one get of 8192 blocks of 32 KiB, apart from each other, from a drive of 1 ms and 32 places / 8192 / 32 x 1 ms",
    unit="blocks/s",
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
    """Blocks a second. Blocks of two chains were written in turn, so that no two reads can be merged."""
    nbytes = BATCH_BLOCKS * BATCH_LAYOUT.block_nbytes
    chain, other = chain_of(BATCH_BLOCKS, BATCH_LAYOUT), chain_of(BATCH_BLOCKS, BATCH_LAYOUT, "other")
    source, target = noise_of(nbytes), memory_of(nbytes)
    with shm() as folder:
        _interleave(folder / "store", (chain, other), source)

        def ours() -> float:
            drive = paced_drive(latency_s=_LATENCY_S, parallel=_PARALLEL)
            with _paced_store(folder / "store", drive, BATCH_BLOCKS, BATCH_LAYOUT) as store:
                taken_s = timed_get(store, chain, target, Tier.SSD)
                assert store.stats().ssd_read_requests == BATCH_BLOCKS, "reads were merged: the ideal is another"
            require_equal(target, source, "batched get")
            return BATCH_BLOCKS / taken_s

        yield ours, lambda: _PARALLEL / _LATENCY_S


def _interleave(folder: Path, chains: tuple[KeyChain, ...], source: np.ndarray) -> None:
    layout, blocks = chains[0].namespace.layout, len(chains[0])
    with opened(folder, 2 * blocks, layout) as store:
        for at, block in enumerate(source.reshape(blocks, layout.block_nbytes)):
            for chain in chains:
                require_ends(store.wait(store.put(chain, block, start=at, stop=at + 1)), Stored(Tier.DRAM))
                assert store.flush(10.0)


BENCHES = [(BATCH, batch)]
__all__ = ["BENCHES", "MIB", "Hit", "threading", "time"]
