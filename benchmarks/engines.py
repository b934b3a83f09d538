"""The I/O engines side by side on one drive: reads, their CPU time, and demand reads beside a flood of writes.

    python benchmarks/engines.py FOLDER [--size 1GiB] [--rounds 3] [--depths]

Reads are of blocks laid end to end, in random order, all submitted at once. Engines take turns in each round, so that a
drive that drifts drifts for all; medians are shown, with the range. CPU is that of this process, kernel included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvterrace.config import parse_nbytes
from kvterrace.io import IoClass, IoEngine, IoFile, IoKind, IoRequest, PosixEngine
from kvterrace.io.native import NativePosixEngine, UringEngine
from kvterrace.testing.engine_suite import aligned

KIB, MIB = 1 << 10, 1 << 20
ENGINES: dict[str, Callable[[], IoEngine]] = {
    "posix": PosixEngine,
    "native-posix": NativePosixEngine,
    "uring": UringEngine,
}


def drain(engine: IoEngine, count: int) -> list:
    results = []
    while len(results) < count:
        results += engine.poll(30.0)
    assert all(result.complete for result in results)
    return results


def fill(engine: IoEngine, path: Path, nbytes: int) -> None:
    file = engine.create(path, nbytes)
    memory = aligned(1, 4 * MIB)[0]
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    for at in range(0, nbytes, 4 * MIB):
        engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, at, [memory])])
    drain(engine, nbytes // (4 * MIB))
    engine.submit([IoRequest(IoKind.SYNC, IoClass.DEMOTION, file)])
    drain(engine, 1)
    engine.close_file(file)


def read_all(engine: IoEngine, file: IoFile, nbytes: int, block: int, memory: list, seed: int) -> tuple[float, float]:
    """(bytes a second, CPU seconds per GB) of reading `nbytes` in blocks of `block`."""
    order = np.random.default_rng(seed).permutation(nbytes // block)
    requests = [
        IoRequest(IoKind.READ, IoClass.DEMAND, file, int(n) * block, [memory[i % len(memory)]])
        for i, n in enumerate(order)
    ]
    began_s, cpu_s = time.monotonic(), time.process_time()
    engine.submit(requests)
    drain(engine, len(requests))
    return nbytes / (time.monotonic() - began_s), (time.process_time() - cpu_s) / (nbytes / 1e9)


def latency(engine: IoEngine, file: IoFile, sink: IoFile, nbytes: int, block: int, *, flood: bool) -> np.ndarray:
    """Seconds that each of 200 demand reads took, one at a time, from submit to poll."""
    rng = np.random.default_rng(2)
    memory, source = aligned(1, block)[0], aligned(1, 4 * MIB)[0]
    taken, writing, at = [], 0, 0
    for _ in range(200):
        while flood and writing < 16:  # 64 MiB of writes always wait
            engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, sink, at, [source])])
            writing, at = writing + 1, (at + 4 * MIB) % nbytes
        began_s = time.monotonic()
        offset = int(rng.integers(0, nbytes // block)) * block
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, offset, [memory], tag="wanted")])
        wanted = False
        while not wanted:
            for result in engine.poll(30.0):
                assert result.complete
                wanted |= result.request.tag == "wanted"
                writing -= result.request.tag != "wanted"
        taken.append(time.monotonic() - began_s)
        time.sleep(0.005)
    drain(engine, writing)
    return np.array(taken)


def spread(values: list[float], scale: float, digits: int) -> str:
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid * scale:.{digits}f} ({low * scale:.{digits}f}-{high * scale:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", action="store_true", help="throughput of io_uring by depth, instead")
    arguments = parser.parse_args()
    nbytes = parse_nbytes(arguments.size, "--size") // (64 * MIB) * 64 * MIB
    path, sink_path = arguments.folder / "engines.data", arguments.folder / "engines.sink"
    for one in (path, sink_path):
        one.unlink(missing_ok=True)
    maker = PosixEngine()
    fill(maker, path, nbytes)
    fill(maker, sink_path, nbytes)
    maker.close(10.0)
    try:
        if arguments.depths:
            by_depth(path, nbytes, arguments.rounds)
        else:
            side_by_side(path, sink_path, nbytes, arguments.rounds)
    finally:
        path.unlink()
        sink_path.unlink()


def by_depth(path: Path, nbytes: int, rounds: int) -> None:
    for block in (128 * KIB, 2 * MIB):
        memory = aligned(64, block)
        depths = [1, 2, 4, 8, 16, 32, 64, 128]
        speeds: dict[int, list[float]] = {depth: [] for depth in depths}
        for seed in range(rounds):
            for depth in depths:
                engine = UringEngine(depth=depth)
                speeds[depth].append(read_all(engine, engine.open(path), nbytes, block, memory, seed)[0])
                assert engine.close(10.0)
        for depth in depths:
            print(f"{block // KIB} KiB, depth {depth}: {spread(speeds[depth], 1e-9, 2)} GB/s")


def side_by_side(path: Path, sink_path: Path, nbytes: int, rounds: int) -> None:
    for block in (16 * KIB, 128 * KIB, 2 * MIB):
        memory = aligned(64, block)
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
        for seed in range(rounds):
            for name, make in ENGINES.items():
                engine = make()
                size = min(nbytes, block * 8192)
                seen[name].append(read_all(engine, engine.open(path), size, block, memory, seed))
                assert engine.close(10.0)
        for name, values in seen.items():
            speed, cpu = spread([one[0] for one in values], 1e-9, 2), spread([one[1] for one in values], 1e3, 0)
            print(f"read {block // KIB} KiB, {name}: {speed} GB/s, {cpu} CPU ms per GB")
    for flood in (False, True):
        for name, make in ENGINES.items():
            engine = make()
            taken = latency(engine, engine.open(path), engine.reopen(sink_path), nbytes, 128 * KIB, flood=flood)
            assert engine.close(30.0)
            p50, p99 = np.percentile(taken, [50, 99]) * 1e6
            beside = "beside writes" if flood else "alone"
            print(f"demand read 128 KiB {beside}, {name}: p50 {p50:.0f} us, p99 {p99:.0f} us")


if __name__ == "__main__":
    main()
