"""Bytes written to the SSD for each byte written for the first time, when the production ledger replays a trace.

usage: python benchmarks/write_amplification.py TRACE... [--dram 0.02] [--ssd 0.10] [--lru]

TRACE is a file in Mooncake's format (hash_ids) or with run-length coded ids (hash_runs), gzipped or not. Sizes
are shares of the trace's different blocks. No bytes are moved and the clock is the trace's: seconds to minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvterrace.policy.directories import default_policy
from kvterrace.policy.eviction import LruTailFirst
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.sim.traces import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--dram", type=float, default=0.02)
    parser.add_argument("--ssd", type=float, default=0.10)
    parser.add_argument("--coarsen", type=int, default=1, help="take blocks of this many of the trace's")
    parser.add_argument("--lru", action="store_true", help="least recently used, instead of the default order")
    options = parser.parse_args()
    make_policy = LruTailFirst if options.lru else default_policy
    print("| trace | DRAM, SSD (blocks) | hits | of them DRAM | segments reclaimed | write amplification |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for path in options.traces:
        requests = list(read_trace(path, coarsen=options.coarsen))
        different = len(np.unique(np.concatenate([request.ids for request in requests])))
        dram, ssd = int(options.dram * different), int(options.ssd * different)
        # without an order of its own, the SSD gives up its oldest segments
        ladder = LedgerLadder(dram, ssd, policy=make_policy(), ssd_policy=None if options.lru else make_policy())
        for request in requests:
            ladder.request(request.ids, request.at_s)
        counts = ladder.counts
        hits = (counts.dram_hits + counts.ssd_hits) / counts.accesses
        print(
            f"| {path.name} | {dram}, {ssd} | {hits:.1%} | {counts.dram_hits / counts.accesses:.1%} "
            f"| {counts.reclaimed_segments} | {counts.write_amplification:.3f} |"
        )


if __name__ == "__main__":
    main()
