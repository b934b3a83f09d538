"""What the rows share: their blocks, their memory, their stores, and the facts of the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from benchmarks.pairs import Skip

from kvterrace import KVLayout, Namespace, chain_keys, open_store
from kvterrace.buffers import Bytes
from kvterrace.engine.transfers import Transfer
from kvterrace.format import checksum
from kvterrace.format.record import PAGE_NBYTES, record_nbytes_for
from kvterrace.io.probe import choose
from kvterrace.keys import KeyChain
from kvterrace.store import Store
from kvterrace.types import Hit, Stored, Tier

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Blocks of 2 MiB in 32 parts of 64 KiB: 16 layers, K and V of 8 heads x 32 tokens x 128 of two bytes.
LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=128, dtype="float16", block_tokens=32)
BLOCK_NBYTES = LAYOUT.block_nbytes


def chain_of(blocks: int, layout: KVLayout = LAYOUT, name: str = "bench") -> KeyChain:
    """A chain of `blocks` blocks; of another `name`, another chain."""
    tokens = np.arange(blocks * layout.block_tokens) % 50_000
    return chain_keys(Namespace(name, layout), tokens)


def singles(count: int) -> list[KeyChain]:
    """Chains of one block each."""
    namespace, size = Namespace("bench", LAYOUT), LAYOUT.block_tokens
    return [chain_keys(namespace, np.arange(at * size, (at + 1) * size)) for at in range(count)]


def memory_of(nbytes: int) -> Bytes:
    """Page-aligned zeros, faulted in by writing them."""
    memory = np.empty(nbytes + PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    view: Bytes = memory[start : start + nbytes]
    view.fill(0)
    return view


def noise_of(nbytes: int, seed: int = 1) -> Bytes:
    """Page-aligned bytes that follow from `seed`, no 8 of them like others."""
    memory = memory_of(nbytes)
    words = memory.view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 2**64, words.size, dtype=np.uint64)
    return memory


def require_equal(found: Bytes, wanted: Bytes, what: str) -> None:
    """Every byte is what was written; else there is nothing to measure. Clears `found`: nothing passes twice."""
    for at in range(0, wanted.nbytes, 16 * MIB):
        if not np.array_equal(found[at : at + 16 * MIB], wanted[at : at + 16 * MIB]):
            raise AssertionError(f"{what}: bytes differ from what was written, in the 16 MiB from {at} on")
    found.fill(0)


def require_ends(ends: Sequence[object], wanted: object) -> None:
    """Every block ended as the row means it to."""
    odd = [end for end in ends if end != wanted]
    if odd:
        raise AssertionError(f"{len(odd)} of {len(ends)} blocks ended in {odd[0]} instead of {wanted}")


def dram_nbytes_for(blocks: int, layout: KVLayout = LAYOUT) -> int:
    """A DRAM tier that holds so many blocks, and a few more."""
    return (blocks + 8) * record_nbytes_for(layout.part_nbytes)


def ssd_nbytes_for(nbytes: int) -> int:
    """An SSD tier in segments of 64 MiB that holds `nbytes` with room to spare."""
    return max(2 * GIB, nbytes * 3 // 2 + 256 * MIB)


def opened(folder: Path, blocks: int, layout: KVLayout = LAYOUT, *, write_behind_s: float = 2.0) -> Store:
    """A store in `folder` whose DRAM tier has room for `blocks` blocks; what lies there is found again."""
    return open_store(
        folder,
        dram_bytes=dram_nbytes_for(blocks, layout),
        ssd_bytes=ssd_nbytes_for(blocks * layout.block_nbytes),
        write_behind_s=write_behind_s,
        sigterm_flush=False,
        ssd_daily_write_bytes="1PB",  # all of it is to be written, whatever it is worth
    )


def filled(folder: Path, chain: KeyChain, source: Bytes) -> None:
    """Make a store in `folder` that holds the blocks of `chain` on its SSD tier, and close it."""
    filled_all(folder, [chain], source)


def filled_all(folder: Path, chains: Sequence[KeyChain], source: Bytes) -> None:
    """The same of several chains, whose blocks lie end to end in `source`."""
    layout, blocks = chains[0].namespace.layout, sum(len(chain) for chain in chains)
    with opened(folder, blocks, layout) as store:
        at = 0
        for chain in chains:
            end = at + len(chain) * layout.block_nbytes
            require_ends(finished(store, store.put(chain, source[at:end], sequence=b"bench")), Stored(Tier.DRAM))
            at = end
        if not store.flush(120.0):
            raise AssertionError("the store was not flushed within 120 s")


def finished(store: Store, transfer: Transfer) -> list[object]:
    """How a transfer ended."""
    return list(store.wait(transfer, 120.0))


def timed_get(store: Store, chain: KeyChain, out: object, tier: Tier) -> float:
    """Seconds that one batched get took, from the call until the last block was in `out`; all came from `tier`."""
    began_s = time.perf_counter()
    ends = store.wait(store.get(chain, out), 120.0)
    taken_s = time.perf_counter() - began_s
    require_ends(ends, Hit(tier))
    return taken_s


@contextlib.contextmanager
def shm() -> Iterator[Path]:
    """A folder in memory. Raises `Skip` where /dev/shm has no room."""
    place = Path("/dev/shm")
    if not place.is_dir() or os.statvfs(place).f_bavail * os.statvfs(place).f_frsize < 2 * GIB:
        raise Skip("/dev/shm has less than 2 GiB free: give it more, or free some")
    with tempfile.TemporaryDirectory(prefix="kvterrace-bench-", dir=place) as folder:
        yield Path(folder)


def facts(folder: Path) -> dict[str, object]:
    """Where and of what a result is."""
    root = Path(__file__).parent.parent
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git(root, "rev-parse", "--short=12", "HEAD"),
        "changed": bool(
            _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "native", "benchmarks")
        ),
        "machine": {
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "drive": _drive(folder),
            "engine": choose().name,
            "crc32c_hardware": checksum.hardware(),
        },
        "load_1min": os.getloadavg()[0],
    }


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _drive(folder: Path) -> str:
    """Kind of the drive under `folder`: its file system, the device, and whether that is a virtual one."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    name, kind = "?", "?"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, more = line.partition(" - ")
            if fields.split()[2] == device:
                kind, name = more.split()[0], more.split()[1]
    virtual = (
        " (virtual)" if "virtio" in os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}") else ""
    )
    return f"{kind} on {name}{virtual}"
