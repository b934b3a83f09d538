"""What recording a trace costs: CPU time of a get of blocks in DRAM with and without, of the recorder's thread, bytes.

    python benchmarks/micro_trace.py [--blocks 64] [--requests 2000]

Pairs of runs in turns; the median of their differences. The recorder's own work is measured by draining its queue.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvterrace import KeyChain, KVLayout, Namespace, Store, TraceRecorder, open_store
from kvterrace.clock import SystemClock

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=32, dtype="float16", block_tokens=16)
NAMESPACE = Namespace("bench", LAYOUT)


def chains_of(requests: int, blocks: int, seed: int) -> list[KeyChain]:
    """Conversations of eight turns, each an eighth of `blocks` longer than the one before; `blocks` on average."""
    rng = np.random.default_rng(seed)
    turn = max(1, blocks // 8)
    chains, data = [], b""
    for number in range(requests):
        data = rng.bytes(32 * (blocks - 4 * turn)) if number % 8 == 0 else data
        data += rng.bytes(32 * turn)
        chains.append(KeyChain(NAMESPACE, bytes(32), data))
    return chains


def run(store: Store, chains: list[KeyChain]) -> float:
    """Seconds of CPU of this thread for one get of each chain: what the engine's thread pays."""
    out = bytearray(LAYOUT.block_nbytes * max(map(len, chains)))
    spent = 0.0
    for chain in chains:
        began = time.thread_time()
        transfer = store.get(chain, memoryview(out)[: LAYOUT.block_nbytes * len(chain)])
        store.wait(transfer)
        spent += time.thread_time() - began
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    differences, plain = [], []
    for pair in range(options.pairs):
        chains = chains_of(options.requests, options.blocks, pair)
        spent = {}
        for traced in (pair % 2 == 0, pair % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace" if traced else None
                with open_store(None, dram_bytes="64MiB", sigterm_flush=False, trace=trace) as store:
                    spent[traced] = run(store, chains) / len(chains)
        differences.append(spent[True] - spent[False])
        plain.append(spent[False])
    blocks = statistics.mean(map(len, chains))
    print(f"a get of {blocks:.0f} blocks: {1e6 * statistics.median(plain):.1f} us of the caller's CPU")
    print(
        f"recording it adds {1e6 * statistics.median(differences):+.1f} us (from {1e6 * min(differences):+.1f} to "
        f"{1e6 * max(differences):+.1f})"
    )
    with tempfile.TemporaryDirectory() as folder:
        recorder = TraceRecorder(Path(folder) / "trace")
        recorder.start(SystemClock(), background=False)
        with open_store(None, dram_bytes="64MiB", sigterm_flush=False) as store:
            store._mover.recorder = recorder  # noqa: SLF001 - on its own, to be drained here
            run(store, chains)
        began = time.thread_time()
        recorder.drain()
        recorder.close()
        spent_s = time.thread_time() - began
        stats = recorder.stats()
        accesses = sum(map(len, chains))
        print(f"the recorder's thread: {1e6 * spent_s / len(chains):.1f} us a get, {stats.lost_events} lost")
        print(
            f"on the drive: {stats.nbytes / len(chains):.0f} B a get, {stats.nbytes / accesses:.2f} B an access, "
            f"{stats.nbytes / len({key for chain in chains for key in chain}):.1f} B a different block"
        )


if __name__ == "__main__":
    main()
