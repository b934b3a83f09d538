"""What a store of a million blocks costs: memory of the index, reopening, matching, and work under the store's lock.

usage: python benchmarks/scale.py [SECTION...] [--blocks 1000000] [--folder DIR] [--repeats 3] [--json]

Sections (default: all): memory, reopen, match, lock, transfers. Segments are real files with real headers and footers,
and a hole where the records would lie: a terabyte takes well under a gigabyte of drive. Figures are medians over
`--repeats`; CPU seconds stand beside wall seconds. Each measurement runs in a process of its own. Takes about five
minutes and 3 GB of memory for a million blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.clock import SystemClock
from kvterrace.engine import reclaim
from kvterrace.engine.core import Core
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.rebuild import rebuild
from kvterrace.engine.space import SegmentSpace
from kvterrace.format.record import PAGE_NBYTES, header_nbytes_for
from kvterrace.format.recovery import SegmentContents, SegmentState
from kvterrace.format.segment import (
    ENTRY_DTYPE,
    TOMBSTONE_DTYPE,
    EntryTable,
    Footer,
    SegmentHeader,
    build_footer,
    encode_segment_header,
)
from kvterrace.io.posix import PosixEngine
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.layout import KVLayout
from kvterrace.store import Store
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.memory import Arena
from kvterrace.tiers.segments import RecoveredSegment, footer_room_nbytes

MiB = 1 << 20
#: Records of 8 KiB, 64 KiB and 1 MiB.
TINY = Namespace("tiny", KVLayout(layers=1, kv_heads=1, head_dim=32, dtype="float16", block_tokens=16))
SMALL = Namespace("small", KVLayout(layers=15, kv_heads=1, head_dim=64, dtype="float16", block_tokens=16))
LARGE = Namespace("large", KVLayout(layers=15, kv_heads=17, head_dim=64, dtype="float16", block_tokens=16))
#: Blocks of one run, blocks of one chain.
SHAPES = {"1": (1, 1), "1 in chains of 1000": (1, 1000), "10": (10, 10), "1000": (1000, 1000)}
SECTIONS = ("memory", "reopen", "match", "lock", "transfers")
Row = tuple[str, float, str]


def geometry_of(namespace: Namespace) -> Geometry:
    return Geometry(header_nbytes_for(namespace.layout.parts), namespace.layout.block_nbytes)


def entries_of(namespace: Namespace, blocks: int, run: int, chain: int) -> EntryTable:
    """Chains of `chain` blocks, end to end, whose sequence changes every `run` blocks."""
    geometry = geometry_of(namespace)
    entries = np.zeros(blocks, ENTRY_DTYPE)
    keys = np.random.default_rng(1).integers(0, 2**64, (blocks, 4), np.uint64)
    entries["key"] = keys.view("V32")[:, 0]
    depth = np.arange(blocks) % chain
    entries["parent"][depth > 0] = entries["key"][np.flatnonzero(depth > 0) - 1]
    entries["sequence"] = np.repeat(np.arange(blocks, dtype=np.uint64) // run, 2).view("V16")
    entries["put_seq"] = np.arange(1, blocks + 1)
    entries["record_nbytes"] = geometry.record_nbytes
    entries["payload_nbytes"] = geometry.payload_nbytes
    entries["header_nbytes"] = geometry.header_nbytes
    entries["parts"] = namespace.layout.parts
    entries["depth"] = depth
    entries["kind"] = 1
    return entries


def chain_of(namespace: Namespace, entries: EntryTable, start: int, stop: int) -> KeyChain:
    return KeyChain(namespace, bytes(KEY_NBYTES), entries["key"][start:stop].tobytes())


def per_segment(namespace: Namespace, segment_nbytes: int) -> int:
    record_nbytes = geometry_of(namespace).record_nbytes
    count = (segment_nbytes - PAGE_NBYTES) // record_nbytes
    while PAGE_NBYTES + count * record_nbytes + footer_room_nbytes(count, 1) > segment_nbytes:
        count -= 1
    return count


def cut(namespace: Namespace, entries: EntryTable, segment_nbytes: int) -> list[EntryTable]:
    """Entries by segment, each with its place."""
    count = per_segment(namespace, segment_nbytes)
    record_nbytes = geometry_of(namespace).record_nbytes
    entries["offset"] = PAGE_NBYTES + np.arange(len(entries)) % count * record_nbytes
    return [entries[at : at + count] for at in range(0, len(entries), count)]


def build(folder: Path, namespace: Namespace, entries: EntryTable, segment_nbytes: int) -> int:
    """A store in `folder` that holds `entries`; returns how many segments it has."""
    directory = StoreDirectory.open(folder, "main", created_unix_s=0.0)
    tables = cut(namespace, entries, segment_nbytes)
    page = np.zeros(PAGE_NBYTES, np.uint8)
    for number, table in enumerate(tables, 1):
        nonce = os.urandom(16)
        encode_segment_header(SegmentHeader(directory.store_uuid, nonce, number, 0, segment_nbytes), page)
        data_end = int(table["offset"][-1] + table["record_nbytes"][-1])
        footer = Footer(table, (namespace.digest,), np.zeros(0, TOMBSTONE_DTYPE))
        tail = build_footer(footer, nonce=nonce, segment_id=number, data_end=data_end)
        with (directory.partition / f"{number:08x}.seg").open("wb") as file:
            file.write(page)
            file.truncate(data_end)
            file.seek(data_end)
            file.write(tail)
        if number % 1000 == 0:
            say(f"  {number} of {len(tables)} segments built")
    directory.close()
    os.sync()
    return len(tables)


def opened(folder: Path, dram_nbytes: int = 16 * MiB, segment_nbytes: int = 64 * MiB) -> Store:
    """The store in `folder`, driven by nobody; its cap is far away."""
    return Store(
        dram_nbytes=dram_nbytes,
        ssd_nbytes=1 << 50,
        directory=StoreDirectory.open(folder, "main", created_unix_s=0.0),
        engine=PosixEngine(),
        clock=SystemClock(),
        segment_nbytes=segment_nbytes,
        background=False,
    )


def drop_caches(folder: Path) -> None:
    for path in folder.rglob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with contextlib.suppress(OSError):  # folder entries, too, where we may
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def rss_nbytes() -> int:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def timed(call: Callable[[], Any], times: int, before: Callable[[], Any] | None = None) -> tuple[list[float], float]:
    """Wall seconds of each call, ascending, and CPU seconds of one, on average."""
    walls, cpu = [], 0.0
    for _ in range(times):
        if before is not None:
            before()
        cpu_start, start = time.process_time(), time.perf_counter()
        call()
        walls.append(time.perf_counter() - start)
        cpu += time.process_time() - cpu_start
    return sorted(walls), cpu / times


def rows_of(what: str, walls: list[float], cpu: float) -> list[Row]:
    return [
        (f"{what}, p50", walls[len(walls) // 2] * 1e3, "ms"),
        (f"{what}, p99", walls[min(len(walls) - 1, len(walls) * 99 // 100)] * 1e3, "ms"),
        (f"{what}, CPU", cpu * 1e3, "ms"),
    ]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_ssd(blocks: int, shape: str, traced: str) -> list[Row]:
    """Bytes for each block that is on the SSD only, as after a restart."""
    run, chain = SHAPES[shape]
    clock = SystemClock()
    space = SegmentSpace(1 << 50, 64 * MiB, footer_room_nbytes)
    core = Core(Ledger(MiB, space), Arena(MiB), PosixEngine(), None, clock)
    entries_of(SMALL, 1000, run, chain)
    before = rss_nbytes()
    found = [
        RecoveredSegment(number, 64 * MiB, _contents(number, table))
        for number, table in enumerate(cut(SMALL, entries_of(SMALL, blocks, run, chain), 64 * MiB), 1)
    ]
    if traced:
        tracemalloc.start()
    assert rebuild(core, found, 0.0) == blocks
    del found
    gc.collect()
    if traced:
        return [(f"SSD only, runs of {shape}: tracemalloc", tracemalloc.get_traced_memory()[0] / blocks, "B/block")]
    return [(f"SSD only, runs of {shape}: RSS", (rss_nbytes() - before) / blocks, "B/block")]


def _contents(number: int, table: EntryTable) -> SegmentContents:
    header = SegmentHeader(bytes(16), number.to_bytes(16, "little"), number, 0, 64 * MiB)
    data_end = int(table["offset"][-1] + table["record_nbytes"][-1])
    dead = np.zeros(0, TOMBSTONE_DTYPE)
    return SegmentContents(header, SegmentState.SEALED, table, (SMALL.digest,), dead, data_end, 64 * MiB)


def dirty_ledger(blocks: int, shape: str) -> Ledger:
    """A ledger whose DRAM tier is full of blocks that have no copy below."""
    run, chain = SHAPES[shape]
    record_nbytes = geometry_of(TINY).record_nbytes
    space = SegmentSpace(1 << 50, 64 * MiB, footer_room_nbytes)
    ledger = Ledger(blocks * record_nbytes, space)
    ledger.add_namespace(0, geometry_of(TINY), TINY.digest)
    entries = entries_of(TINY, blocks, run, chain)
    for at in range(0, blocks, chain):
        for start in range(0, chain, run):
            keys = chain_of(TINY, entries, at, at + start + run)
            sequence = (at + start).to_bytes(16, "little")
            ids, _ = ledger.begin_put(keys, start, start + run, namespace=0, sequence=sequence, now_s=0.0)
            for block in ids.tolist():
                ledger.filled(block, 0.0)
            for block in ids.tolist():
                ledger.let_go(block)
    return ledger


def memory_dram(blocks: int, shape: str, traced: str) -> list[Row]:
    """Bytes for each block that is in DRAM and waits to be written: the most that a block can cost."""
    np.random.default_rng(1)
    before = rss_nbytes()
    if traced:
        tracemalloc.start()
    ledger = dirty_ledger(blocks, shape)
    gc.collect()
    assert ledger.table.used == blocks
    if traced:
        return [(f"DRAM, dirty, runs of {shape}: tracemalloc", tracemalloc.get_traced_memory()[0] / blocks, "B/block")]
    return [(f"DRAM, dirty, runs of {shape}: RSS", (rss_nbytes() - before) / blocks, "B/block")]


# -- reopen, match, lock -----------------------------------------------------------------------------------------------


def reopen(folder: str, blocks: int) -> list[Row]:
    cpu, start = time.process_time(), time.perf_counter()
    store = opened(Path(folder))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert store.stats().blocks == blocks
    os._exit(show([("wall", wall_s, "s"), ("CPU", cpu_s, "s"), ("peak RSS", peak / MiB, "MiB")]))


def match(folder: str, blocks: int) -> list[Row]:
    """A chain of 1,000 blocks out of a million, in one run and in 1,000."""
    store = opened(Path(folder))
    entries = entries_of(SMALL, blocks, 1000, 1000)
    chains = [chain_of(SMALL, entries, at, at + 1000) for at in range(0, blocks, 1000)][:: max(1, blocks // 50_000)]
    rows: list[Row] = []
    calls = [lambda chain=chain: store.match(chain) for chain in chains] * (2000 // len(chains))
    turn = iter(calls)
    assert store.match(chains[0]).blocks == 1000
    rows += rows_of("match of 1,000 blocks in one run", *timed(lambda: next(turn)(), len(calls)))
    for chain in chains:
        for stop in range(999, 0, -1):
            store.touch(chain[:stop])
    assert store.match(chains[0]).blocks == 1000 and len(store._core.ledger.tree.walk(chains[0])) == 1000  # noqa: SLF001
    turn = iter(calls)
    rows += rows_of("match of 1,000 blocks in 1,000 runs", *timed(lambda: next(turn)(), len(calls)))
    os._exit(show(rows))


def lock(folder: str, blocks: int) -> list[Row]:
    """What runs under the store's lock, at 16,000 segments."""
    store = opened(Path(folder))
    mover, ledger = store._mover, store._core.ledger  # noqa: SLF001 - it times what a user does not call
    now_s = store._clock.monotonic_s()  # noqa: SLF001
    rows: list[Row] = []
    store.stats()
    rows += rows_of("pump", *timed(mover.pump, 300))
    rows += rows_of("stats", *timed(store.stats, 30))
    rows += rows_of("reclaim.choose, ages apart", *timed(lambda: reclaim.choose(ledger, now_s), 20))
    entries = entries_of(LARGE, blocks, 10, 10)
    for at in range(0, blocks, 10):
        ledger.touch(chain_of(LARGE, entries, at, at + 10), 10, now_s)
    rows += rows_of("reclaim.choose, all of one age", *timed(lambda: reclaim.choose(ledger, now_s + 9.0), 20))
    one = chain_of(LARGE, entries, 0, 10)
    rows += rows_of("touch of 10 blocks", *timed(lambda: ledger.touch(one, 10, now_s), 1000))
    os._exit(show(rows))


def victims(blocks: int) -> list[Row]:
    """Asking a DRAM tier for room where nothing can go, as every pump does while a put waits."""
    ledger = dirty_ledger(blocks, "10")
    assert ledger.reserve_extent(8192) is None
    return rows_of("room in a DRAM tier that is all dirty", *timed(lambda: ledger.reserve_extent(8192), 30))


# -- transfers ---------------------------------------------------------------------------------------------------------


def transfers(count: int) -> list[Row]:
    """CPU time for each block of a long chain, of all threads: the copies of 1 KiB a block are the least of it."""
    store = Store(
        dram_nbytes=(count + 64) * geometry_of(TINY).record_nbytes,
        ssd_nbytes=0,
        directory=None,
        engine=PosixEngine(),
        clock=SystemClock(),
        background=False,
    )
    chain = chain_of(TINY, entries_of(TINY, count, count, count), 0, count)
    payload = np.zeros(count * TINY.layout.block_nbytes, np.uint8)
    rows: list[Row] = []
    for what, call in (
        ("put", lambda: store.wait(store.put(chain, payload))),
        ("put again", lambda: store.wait(store.put(chain, payload))),
        ("get", lambda: store.wait(store.get(chain, payload))),
        ("match", lambda: store.match(chain)),
        ("invalidate", lambda: store.invalidate(chain)),
    ):
        walls, cpu = timed(call, 1)
        rows.append((f"{what} of {count} blocks, CPU", cpu / count * 1e6, "us/block"))
        rows.append((f"{what} of {count} blocks, wall", walls[0] / count * 1e6, "us/block"))
        say(f"  {what}: {walls[0]:.2f} s")
    assert store.match(chain).blocks == 0
    store.close()
    return rows


# -- running -----------------------------------------------------------------------------------------------------------

CHILDREN: dict[str, Callable[..., list[Row]]] = {
    "memory_ssd": lambda blocks, shape, traced: memory_ssd(int(blocks), shape, traced),
    "memory_dram": lambda blocks, shape, traced: memory_dram(int(blocks), shape, traced),
    "reopen": lambda folder, blocks: reopen(folder, int(blocks)),
    "match": lambda folder, blocks: match(folder, int(blocks)),
    "lock": lambda folder, blocks: lock(folder, int(blocks)),
    "victims": lambda blocks: victims(int(blocks)),
    "transfers": lambda count: transfers(int(count)),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(rows: list[Row]) -> int:
    print(json.dumps(rows), flush=True)
    return 0


def child(repeats: int, what: str, *arguments: object, prepare: Callable[[], None] | None = None) -> list[Row]:
    """Medians of what `repeats` processes measured."""
    found: list[list[Row]] = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        command = [sys.executable, __file__, "--child", what, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found.append([(name, value, unit) for name, value, unit in json.loads(done.stdout.splitlines()[-1])])
    each = list(zip(*found, strict=True))
    return [(same[0][0], statistics.median(value for _, value, _ in same), same[0][2]) for same in each]


def sections(wanted: list[str], blocks: int, folder: Path, repeats: int) -> list[Row]:
    rows: list[Row] = []

    def add(section: str, more: list[Row], prefix: str = "") -> None:
        for name, value, unit in more:
            rows.append((f"{section}: {prefix}{name}", value, unit))
            say(f"{rows[-1][0]:<90} {value:>12.3f} {unit}")

    if "memory" in wanted:
        for shape in SHAPES:
            # to put a chain piece by piece takes time that grows with its square
            for kind in ("memory_ssd", *(["memory_dram"] if shape in ("1", "10", "1000") else [])):
                for traced in ("", "traced"):
                    add("memory", child(1, kind, blocks, shape, traced))
    variants = [
        ("64 KiB records, 64 MiB segments, runs of 10", SMALL, 64 * MiB, "10", ("reopen",)),
        ("64 KiB records, 64 MiB segments, runs of 1", SMALL, 64 * MiB, "1", ("reopen",)),
        ("64 KiB records, 64 MiB segments, runs of 1000", SMALL, 64 * MiB, "1000", ("reopen", "match")),
        ("64 KiB records, 16 MiB segments, runs of 10", SMALL, 16 * MiB, "10", ("reopen",)),
        ("1 MiB records, 64 MiB segments, runs of 10", LARGE, 64 * MiB, "10", ("reopen", "lock")),
    ]
    for name, namespace, segment_nbytes, shape, uses in variants:
        if not set(uses) & set(wanted):
            continue
        place = folder / "store"
        count = build(place, namespace, entries_of(namespace, blocks, *SHAPES[shape]), segment_nbytes)
        for use in uses:
            if use in wanted:
                drop = lambda: drop_caches(place) if use == "reopen" else None  # noqa: B023, E731
                prefix = f"{count} segments of {name}: " if use == "reopen" else ""
                add(use, child(repeats if use == "reopen" else 1, use, place, blocks, prepare=drop), prefix)
        shutil.rmtree(place)
    if "lock" in wanted:
        add("lock", child(1, "victims", blocks))
    if "transfers" in wanted:
        add("transfers", child(1, "transfers", blocks // 10))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", default=SECTIONS)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="a multiple of 10,000")
    parser.add_argument("--folder", type=Path, help="where to build stores (default: the folder for temporary files)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        show(CHILDREN[options.sections[0]](*options.sections[1:]))
        return
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvterrace-scale-") as folder:
        rows = sections(list(options.sections), options.blocks, Path(folder), options.repeats)
    if options.json:
        print(json.dumps([{"what": name, "value": value, "unit": unit} for name, value, unit in rows], indent=1))
        return
    print("| what | figure | unit |\n| --- | ---: | --- |")
    for name, value, unit in rows:
        print(f"| {name} | {value:.3f} | {unit} |")


if __name__ == "__main__":
    main()
