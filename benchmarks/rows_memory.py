"""Rows without a drive: one block from tmpfs, and many from the DRAM tier."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.common import (
    BLOCK_NBYTES,
    chain_of,
    filled_all,
    finished,
    memory_of,
    noise_of,
    opened,
    require_ends,
    require_equal,
    shm,
    singles,
    timed_get,
)
from benchmarks.pairs import Row, Side, Skip

from kvterrace.types import Hit, Stored, Tier

BLOCKS = 128

ONE_BLOCK = Row(
    "one-block",
    1.15,
    "lower",
    what="get of one 2 MiB block that lies on tmpfs and not in DRAM / pread and google_crc32c of the same bytes",
    unit="ms",
)
DRAM_GET = Row(
    "dram-get",
    0.90,
    what="get of 128 x 2 MiB from the DRAM tier, one batch / numpy.copyto of as much into the same memory",
    unit="GB/s",
)


@contextlib.contextmanager
def one_block(_: Path) -> Iterator[tuple[Side, Side]]:
    """Prompts of one block, each by a get of its own, after the store was opened anew; milliseconds for one."""
    try:
        import google_crc32c
    except ImportError:
        raise Skip("google-crc32c is not installed: pip install -r benchmarks/requirements.txt") from None
    with shm() as folder:
        source, target = noise_of(BLOCKS * BLOCK_NBYTES), memory_of(BLOCKS * BLOCK_NBYTES)
        chains = singles(BLOCKS)
        filled_all(folder / "store", chains, source)
        plain = folder / "plain"
        plain.write_bytes(source)
        sums = [google_crc32c.value(block.tobytes()) for block in source.reshape(BLOCKS, -1)]

        def ours() -> float:
            with opened(folder / "store", BLOCKS) as store:
                ends = []
                began_s = time.perf_counter()
                for at in range(BLOCKS):
                    out = target[at * BLOCK_NBYTES : (at + 1) * BLOCK_NBYTES]
                    ends += store.wait(store.get(chains[at], out))
                taken_s = time.perf_counter() - began_s
            require_ends(ends, Hit(Tier.SSD))
            require_equal(target, source, "get of one block")
            return taken_s * 1e3 / BLOCKS

        def theirs() -> float:
            fd = os.open(plain, os.O_RDONLY)
            try:
                found = []
                began_s = time.perf_counter()
                for at in range(BLOCKS):
                    out = target[at * BLOCK_NBYTES : (at + 1) * BLOCK_NBYTES]
                    assert os.preadv(fd, [out.data], at * BLOCK_NBYTES) == BLOCK_NBYTES
                    out.flags.writeable = False  # it sums nothing else in place
                    found.append(google_crc32c.value(out))
                taken_s = time.perf_counter() - began_s
            finally:
                os.close(fd)
            assert found == sums
            require_equal(target, source, "pread")
            return taken_s * 1e3 / BLOCKS

        yield ours, theirs


@contextlib.contextmanager
def dram_get(folder: Path) -> Iterator[tuple[Side, Side]]:
    """All blocks by one get; GB/s."""
    nbytes = BLOCKS * BLOCK_NBYTES
    chain, source, target = chain_of(BLOCKS), noise_of(nbytes), memory_of(nbytes)
    with opened(folder / "store", BLOCKS) as store:
        require_ends(finished(store, store.put(chain, source)), Stored(Tier.DRAM))
        assert store.flush(120.0)

        def ours() -> float:
            taken_s = timed_get(store, chain, target, Tier.DRAM)
            require_equal(target, source, "get from DRAM")
            return nbytes / taken_s / 1e9

        def theirs() -> float:
            began_s = time.perf_counter()
            np.copyto(target, source)
            taken_s = time.perf_counter() - began_s
            require_equal(target, source, "copyto")
            return nbytes / taken_s / 1e9

        yield ours, theirs


BENCHES = [(ONE_BLOCK, one_block), (DRAM_GET, dram_get)]
