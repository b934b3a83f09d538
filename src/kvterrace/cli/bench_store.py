"""What `kvterrace bench store` measures. No terminal here.

Every round takes a fresh store with fresh bytes and, beside it, one plain file with the same bytes: written and read by
threads that do nothing but `pwritev` and `preadv`. The two take turns, and who goes first changes with the round: a
drive that slows down slows both. All memory is faulted in before the clock runs, and every byte that was read is
compared with what was written, after the clock was stopped.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.cli.bench_raw import RawFile
from kvterrace.errors import ConfigError, StoreUnusableError
from kvterrace.format.record import PAGE_NBYTES, record_nbytes_for
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.opening import open_store
from kvterrace.store import Store
from kvterrace.types import Hit, Stored, Tier

__all__ = ["PHASES", "BenchPlan", "BenchResult", "Phase", "Sample", "measure", "plan_for"]

_BATCH_NBYTES = 32 << 20
_SEGMENT_NBYTES = 64 << 20
_LAYER_NBYTES = 64 << 10  # K and V of 8 heads x 128 x 16 tokens, 16 bit
_MAX_BLOCK_NBYTES = 32 << 20
_FLUSH_S = 600.0
_COMPARED_NBYTES = 16 << 20

#: Phases of a round, in the order in which they are shown; the second of each pair is the first's baseline.
PHASES = (("put", "raw_write"), ("get_cold", "raw_read"), ("get_dram", "copy"))


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Checked sizes: `blocks` blocks of `block_nbytes`, moved in batches of `batch_blocks`, `rounds` times."""

    block_nbytes: int
    blocks: int
    batch_blocks: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Payload of a round."""
        return self.block_nbytes * self.blocks

    @property
    def layout(self) -> KVLayout:
        """A layout with blocks of that size: 8 KV heads of 128, 16 tokens, 16 bit; as many layers as it takes."""
        return KVLayout(self.block_nbytes // _LAYER_NBYTES, 8, 128, "float16", 16)

    @property
    def dram_nbytes(self) -> int:
        """DRAM tier that holds all blocks, with room to spare."""
        return self.blocks * record_nbytes_for(self.layout.part_nbytes) * 17 // 16 + (8 << 20)

    def batches(self) -> Iterator[tuple[int, int]]:
        """First and last-but-one block of each batch."""
        for start in range(0, self.blocks, self.batch_blocks):
            yield start, min(start + self.batch_blocks, self.blocks)


@dataclass(slots=True)
class Sample:
    """One phase of one round. `batch_s`: how long each batch took."""

    nbytes: int
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    batch_s: list[float] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.nbytes / 1e9 / self.elapsed_s


@dataclass(slots=True)
class Phase:
    """All rounds of one phase."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        """Median over the rounds."""
        return float(np.median([sample.gb_per_s for sample in self.samples]))

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU seconds of all threads, user and system, for each GiB."""
        return sum(sample.cpu_s for sample in self.samples) / (sum(sample.nbytes for sample in self.samples) / 2**30)

    def batch_s(self, percent: float) -> float:
        """Percentile of the batches' times, over all rounds; always one that was measured."""
        return float(np.percentile(np.concatenate([one.batch_s for one in self.samples]), percent, method="higher"))

    @property
    def batches(self) -> int:
        """Batches measured."""
        return sum(len(sample.batch_s) for sample in self.samples)


@dataclass(slots=True)
class BenchResult:
    """What was measured, by the names in `PHASES`.

    Attributes:
        direct_io: whether the store's and the plain file's I/O bypassed the page cache.
        other_tier_blocks: blocks that a get phase found elsewhere than it should have; 0 unless something is odd.
    """

    plan: BenchPlan
    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for pair in PHASES for name in pair})
    direct_io: bool = True
    verified_nbytes: int = 0
    other_tier_blocks: int = 0

    def ratio(self, phase: str, baseline: str) -> float:
        """Median over the rounds of the phase's rate by its baseline's in the same round."""
        pairs = zip(self.phases[phase].samples, self.phases[baseline].samples, strict=True)
        return float(np.median([one.gb_per_s / other.gb_per_s for one, other in pairs]))


def plan_for(size_nbytes: int, block_nbytes: int, rounds: int, folder: Path) -> BenchPlan:
    """Check what was asked for against what there is. Raises ConfigError."""
    if block_nbytes < _LAYER_NBYTES or block_nbytes % _LAYER_NBYTES or block_nbytes > _MAX_BLOCK_NBYTES:
        raise ConfigError(
            f"--block {block_nbytes} B: give a multiple of {_LAYER_NBYTES} B, at most {_MAX_BLOCK_NBYTES} B, e.g. 2MiB"
        )
    if size_nbytes < block_nbytes:
        raise ConfigError(f"--size {size_nbytes} B is less than one block of {block_nbytes} B: give more, e.g. 512MiB")
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder}: no such folder: give one on the drive to be measured")
    blocks = size_nbytes // block_nbytes
    plan = BenchPlan(block_nbytes, blocks, min(max(1, _BATCH_NBYTES // block_nbytes), blocks), rounds)
    memory, there = plan.dram_nbytes + 2 * plan.nbytes, _free_memory_nbytes()
    if memory > there:
        raise ConfigError(f"--size {plan.nbytes} B takes {memory} B of memory, {there} B are free: give less")
    disk = os.statvfs(folder)
    needed, free = _disk_nbytes(plan), disk.f_bavail * disk.f_frsize
    if needed > free:
        raise ConfigError(f"--dir {folder}: it takes {needed} B for a while, {free} B are free: give --size less")
    return plan


def measure(plan: BenchPlan, folder: Path, on_step: Callable[[str], object]) -> BenchResult:
    """Measure in a folder made under `folder`, and removed afterwards. Blocks. `on_step` hears what is being done.

    Raises:
        StoreUnusableError: the store lost, refused or altered something; what was measured says nothing then.
        OSError: the drive failed.
    """
    result = BenchResult(plan)
    work = Path(tempfile.mkdtemp(prefix="kvterrace-bench-", dir=folder))
    try:
        on_step("making and faulting in memory")
        source, target = _memory(plan.nbytes), _memory(plan.nbytes)
        words = source.view(np.uint64)
        words[:] = np.random.default_rng().integers(0, 2**64, words.size, dtype=np.uint64)
        for number in range(plan.rounds):
            words += np.uint64(0x9E3779B97F4A7C15)  # other bytes in every round: none of an earlier one can pass
            _Round(plan, result, work / f"{number}", source, target, on_step, number).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return result


class _Round:
    """One round: everything once, on fresh files."""

    def __init__(
        self,
        plan: BenchPlan,
        result: BenchResult,
        folder: Path,
        source: Bytes,
        target: Bytes,
        on_step: Callable[[str], object],
        number: int,
    ) -> None:
        self._plan, self._result, self._folder = plan, result, folder
        self._source, self._target = source, target
        self._on_step = on_step
        self._number = number
        namespace = Namespace(f"kvterrace bench {os.urandom(16).hex()}", plan.layout)
        self._chain: KeyChain = chain_keys(namespace, np.arange(plan.blocks * plan.layout.block_tokens))

    def run(self) -> None:
        """Measure."""
        self._folder.mkdir()
        with RawFile(self._folder / "raw", self._plan.nbytes, self._plan.block_nbytes) as raw:
            self._result.direct_io &= raw.direct
            with self._store() as store:
                self._in_turn((self._put, store), (self._raw_write, raw))
            with self._store() as store:
                self._result.direct_io &= store.stats().ssd_direct_io
                self._in_turn((self._get_cold, store), (self._raw_read, raw))
                self._get("get_dram", store, Tier.DRAM)
            self._copy()
        shutil.rmtree(self._folder)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        ssd_nbytes = max(16 * _SEGMENT_NBYTES, _disk_nbytes(self._plan))
        with open_store(
            self._folder / "store",
            dram_bytes=self._plan.dram_nbytes,
            ssd_bytes=ssd_nbytes,
            sigterm_flush=False,
            ssd_daily_write_bytes="1PB",  # all of it is to be written, whatever it is worth
        ) as store:
            yield store

    def _in_turn(self, *steps: tuple[Callable[..., None], Store | RawFile]) -> None:
        for step, device in steps if self._number % 2 else reversed(steps):
            step(device)

    @contextlib.contextmanager
    def _measured(self, phase: str) -> Iterator[Sample]:
        self._on_step(f"round {self._number + 1} of {self._plan.rounds}: {phase.replace('_', ' ')}")
        sample = Sample(self._plan.nbytes)
        cpu_s, began_s = _cpu_s(), time.perf_counter()
        yield sample
        sample.elapsed_s = time.perf_counter() - began_s
        sample.cpu_s = _cpu_s() - cpu_s
        self._result.phases[phase].samples.append(sample)

    def _slice(self, memory: Bytes, start: int, stop: int) -> Bytes:
        return memory[start * self._plan.block_nbytes : stop * self._plan.block_nbytes]

    def _put(self, store: Store) -> None:
        ends = []
        with self._measured("put") as sample:
            for start, stop in self._plan.batches():
                began_s = time.perf_counter()
                blocks = self._slice(self._source, start, stop)
                ends += store.wait(store.put(self._chain, blocks, start=start, stop=stop, sequence=b"bench"))
                sample.batch_s.append(time.perf_counter() - began_s)
            flushed = store.flush(_FLUSH_S)
        odd = [end for end in ends if not isinstance(end, Stored)]
        if odd or not flushed:
            raise StoreUnusableError(
                f"the store did not keep all blocks ({odd[0] if odd else 'not flushed'}): no result"
            )

    def _get_cold(self, store: Store) -> None:
        self._get("get_cold", store, Tier.SSD)

    def _get(self, phase: str, store: Store, tier: Tier) -> None:
        self._target.fill(0)
        ends = []
        with self._measured(phase) as sample:
            for start, stop in self._plan.batches():
                began_s = time.perf_counter()
                blocks = self._slice(self._target, start, stop)
                ends += store.wait(store.get(self._chain, blocks, start=start, stop=stop))
                sample.batch_s.append(time.perf_counter() - began_s)
        odd = [end for end in ends if not isinstance(end, Hit)]
        if odd:
            raise StoreUnusableError(f"{len(odd)} of {len(ends)} blocks were not given back ({odd[0]}): no result")
        self._result.other_tier_blocks += sum(end != Hit(tier) for end in ends)
        self._compare(phase)

    def _raw_write(self, raw: RawFile) -> None:
        with self._measured("raw_write") as sample:
            for start, stop in self._plan.batches():
                began_s = time.perf_counter()
                raw.write(self._slice(self._source, start, stop), start * self._plan.block_nbytes)
                sample.batch_s.append(time.perf_counter() - began_s)
            raw.sync()

    def _raw_read(self, raw: RawFile) -> None:
        self._target.fill(0)
        raw.drop_cache()
        with self._measured("raw_read") as sample:
            for start, stop in self._plan.batches():
                began_s = time.perf_counter()
                raw.read(self._slice(self._target, start, stop), start * self._plan.block_nbytes)
                sample.batch_s.append(time.perf_counter() - began_s)
        self._compare("raw_read")

    def _copy(self) -> None:
        self._target.fill(0)
        with self._measured("copy") as sample:
            for start, stop in self._plan.batches():
                began_s = time.perf_counter()
                np.copyto(self._slice(self._target, start, stop), self._slice(self._source, start, stop))
                sample.batch_s.append(time.perf_counter() - began_s)
        self._compare("copy")

    def _compare(self, phase: str) -> None:
        for at in range(0, self._plan.nbytes, _COMPARED_NBYTES):
            if not np.array_equal(self._source[at : at + _COMPARED_NBYTES], self._target[at : at + _COMPARED_NBYTES]):
                raise StoreUnusableError(f"{phase}: bytes differ from what was written, near byte {at}: no result")
        self._result.verified_nbytes += self._plan.nbytes


def _memory(nbytes: int) -> Bytes:
    """Page-aligned zeros, faulted in by writing them."""
    memory = np.empty(nbytes + PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    view: Bytes = memory[start : start + nbytes]
    view.fill(0)
    return view


def _disk_nbytes(plan: BenchPlan) -> int:
    """Room that a round takes: the plain file, and segments that are never quite full."""
    record_nbytes = record_nbytes_for(plan.layout.part_nbytes)
    in_one = (_SEGMENT_NBYTES - (1 << 20)) // record_nbytes
    return plan.nbytes + (plan.blocks // in_one + 3) * _SEGMENT_NBYTES


def _free_memory_nbytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
