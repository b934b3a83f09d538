"""Rows on the drive: restoring and demoting beside fio, and what a restore costs a thread of Python beside it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import (
    BLOCK_NBYTES,
    GIB,
    LAYOUT,
    chain_of,
    filled,
    finished,
    memory_of,
    noise_of,
    opened,
    require_ends,
    require_equal,
    shm,
    timed_get,
)
from benchmarks.fio import Fio
from benchmarks.pairs import Row, Side

from kvterrace.buffers import Bytes
from kvterrace.keys import KeyChain
from kvterrace.types import Stored, Tier

#: Half a GiB.
BLOCKS = 256
#: Blocks of fio in flight: as many bytes as the store keeps in a drive, 64 MiB for demand reads and 4 MiB for writes.
READ_DEPTH, WRITE_DEPTH = 32, 2

COLD_READ = Row(
    "cold-read",
    0.90,
    what="cold get of 256 x 2 MiB from SSD into one buffer / fio reading as much, 2 MiB at depth 32, O_DIRECT",
    unit="GB/s",
    decides="bound",
)
SCATTERED_READ = Row(
    "scattered-read",
    0.90,
    what="the same into 32 arrays, 64 KiB of each block to each / the same fio",
    unit="GB/s",
    decides="bound",
)
DEMOTION = Row(
    "demotion",
    0.90,
    what="flush of 256 x 2 MiB from DRAM, until durable / fio writing as much, 2 MiB at depth 2, O_DIRECT and fsync",
    unit="GB/s",
    decides="bound",
)
COUNTING = Row(
    "counting",
    0.95,
    what="a thread counting beside a cold restore of 1 GiB by its own process / beside that by another process",
    unit="million counts/s",
)


@contextlib.contextmanager
def cold_read(folder: Path) -> Iterator[tuple[Side, Side]]:
    """GB/s into one buffer."""
    target = memory_of(BLOCKS * BLOCK_NBYTES)
    with _read(folder, target, target) as sides:
        yield sides


@contextlib.contextmanager
def scattered_read(folder: Path) -> Iterator[tuple[Side, Side]]:
    """GB/s into an array for each part, as an engine has them: all blocks of a layer together."""
    target = memory_of(BLOCKS * BLOCK_NBYTES)
    parts = list(target.reshape(LAYOUT.parts, BLOCKS, -1))
    with _read(folder, target, parts) as sides:
        yield sides


@contextlib.contextmanager
def _read(folder: Path, target: object, out: object) -> Iterator[tuple[Side, Side]]:
    nbytes = BLOCKS * BLOCK_NBYTES
    chain, source = chain_of(BLOCKS), noise_of(nbytes)
    filled(folder / "store", chain, source)
    fio = Fio(folder / "plain", nbytes, BLOCK_NBYTES, READ_DEPTH)
    (folder / "plain").write_bytes(source)
    wanted = source
    if out is not target:  # block by block on the drive, part by part in memory
        wanted = memory_of(nbytes)
        wanted.reshape(LAYOUT.parts, BLOCKS, -1)[:] = source.reshape(BLOCKS, LAYOUT.parts, -1).transpose(1, 0, 2)

    def ours() -> float:
        with opened(folder / "store", BLOCKS) as store:
            assert store.stats().ssd_direct_io, "the store's reads go through the page cache"
            taken_s = timed_get(store, chain, out, Tier.SSD)
        require_equal(target, wanted, "cold get")
        return nbytes / taken_s / 1e9

    yield ours, lambda: fio.read() / 1e9


@contextlib.contextmanager
def demotion(folder: Path) -> Iterator[tuple[Side, Side]]:
    """GB/s; what was written is read back from the drive after the clock was stopped."""
    nbytes = BLOCKS * BLOCK_NBYTES
    source, target = noise_of(nbytes), memory_of(nbytes)
    fio = Fio(folder / "plain", nbytes, BLOCK_NBYTES, WRITE_DEPTH)
    turn = iter(range(1 << 30))

    def ours() -> float:
        place = folder / f"store{next(turn)}"
        chain = chain_of(BLOCKS)
        with opened(place, 2 * BLOCKS, write_behind_s=600.0) as store:  # nothing is written before it is asked for
            require_ends(finished(store, store.put(chain, source, sequence=b"bench")), Stored(Tier.DRAM))
            assert store.stats().ssd_written_nbytes == 0, "the demotion began before the clock"
            began_s = time.perf_counter()
            assert store.flush(120.0)
            taken_s = time.perf_counter() - began_s
            assert store.stats().ssd_direct_io, "the store's writes go through the page cache"
        with opened(place, BLOCKS) as store:
            timed_get(store, chain, target, Tier.SSD)
        require_equal(target, source, "flush")
        _remove(place)
        return nbytes / taken_s / 1e9

    yield ours, lambda: fio.write() / 1e9


def _remove(place: Path) -> None:
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    place.rmdir()


# -- counting ----------------------------------------------------------------------------------------------------------

_RESTORED = GIB // BLOCK_NBYTES


class _Counter:
    """A thread that counts, as one that tokenises or schedules would run: it holds the GIL whenever it gets it."""

    def __init__(self) -> None:
        self._count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop:
            self._count += 1

    def __enter__(self) -> _Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def mark(self) -> tuple[int, float]:
        """The count, and when."""
        return self._count, time.perf_counter()


def _rate(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1]) / 1e6


@contextlib.contextmanager
def counting(folder: Path) -> Iterator[tuple[Side, Side]]:
    """Million counts a second, while the restore runs."""
    nbytes = _RESTORED * BLOCK_NBYTES
    chain, source = chain_of(_RESTORED), noise_of(nbytes)
    filled(folder / "store", chain, source)
    with shm() as place, _counting(folder / "store", chain, source, _mapped(place / "target")) as sides:
        yield sides


@contextlib.contextmanager
def _counting(store_at: Path, chain: KeyChain, source: Bytes, target: Any) -> Iterator[tuple[Side, Side]]:
    def ours() -> float:
        with opened(store_at, _RESTORED) as store, _Counter() as counter:
            before = counter.mark()
            timed_get(store, chain, target, Tier.SSD)
            after = counter.mark()
        require_equal(target, source, "restore beside a counter")
        return _rate(before, after)

    def theirs() -> float:
        command = [sys.executable, "-m", "benchmarks.rows_drive", str(store_at), str(target.filename)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            with _Counter() as counter:
                before = counter.mark()
                child.stdin.write("go\n")
                child.stdin.flush()
                assert child.stdout.readline() == "restored\n"
                after = counter.mark()
        require_equal(target, source, "restore by another process")
        return _rate(before, after)

    yield ours, theirs


def _mapped(path: Path) -> Any:
    """Memory for a restore that both processes see, faulted in."""
    memory = np.memmap(path, np.uint8, "w+" if not path.exists() else "r+", shape=(_RESTORED * BLOCK_NBYTES,))
    memory[:] = 0
    return memory


def _child(store_at: Path, target_at: Path) -> None:
    """The other process: restores when it is told to."""
    target = _mapped(target_at)
    with opened(store_at, _RESTORED) as store:
        print("ready", flush=True)
        assert sys.stdin.readline() == "go\n"
        timed_get(store, chain_of(_RESTORED), target, Tier.SSD)
        print("restored", flush=True)


BENCHES = [(COLD_READ, cold_read), (DEMOTION, demotion), (SCATTERED_READ, scattered_read), (COUNTING, counting)]

if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
