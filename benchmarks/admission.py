"""SSD hits against bytes written: the production ledger on traces, with less and less to write.

usage: python benchmarks/admission.py TRACE... [--dram 0.02] [--ssd 0.30] [--requests N] [--csv FILE]

TRACE is a file in Mooncake's format (hash_ids) or with run-length coded ids (hash_runs), gzipped or not. Sizes are
shares of the trace's different blocks, and so are budgets: of the whole trace, given out evenly, with a tenth of it
saved up at most. Beside the store's own choice runs second touch: what was used in two turns, while there is budget.
No bytes are moved and the clock is the trace's.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvterrace.policy.admission import Admission, History, WriteBudget
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.sim.traces import TraceRequest, read_trace

#: Of the trace's different blocks; None: no budget, all is written.
BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.8, None)


class SecondTouch(Admission):
    """Nothing but what was used in two turns."""

    def is_short(self, now_s: float) -> bool:  # noqa: ARG002 - whatever is left
        return True

    def admits(self, history: History, now_s: float) -> bool:
        assert self.budget is not None
        return history is History.SEEN and self.budget.left_nbytes(now_s) > 0


def budget_of(share: float, blocks: int, seconds: float, record_nbytes: int) -> WriteBudget:
    """`share` of `blocks` over `seconds`, of which a tenth may be saved up; half of that is there at the start."""
    most_nbytes = share * blocks * record_nbytes / 10
    return WriteBudget(most_nbytes, left_nbytes=most_nbytes / 2, day_s=seconds / 10)


def rows(name: str, requests: Sequence[TraceRequest], dram: float, ssd: float) -> Iterator[tuple[object, ...]]:
    """(trace, rule, budget, bytes written by the trace's different blocks, DRAM hits, SSD hits), of all accesses."""
    blocks = len(np.unique(np.concatenate([request.ids for request in requests])))
    seconds = requests[-1].at_s - requests[0].at_s
    record_nbytes, enough = 1 << 20, False
    for rule, share in itertools.product(("second touch", "kvterrace"), BUDGETS):
        if rule == "second touch" and (share is None or enough):
            continue  # it has no use for more
        budget = None if share is None else budget_of(share, blocks, seconds, record_nbytes)
        ladder = LedgerLadder(int(dram * blocks), int(ssd * blocks), record_nbytes=record_nbytes, budget=budget)
        if rule == "second touch":
            ladder.ledger.admitting.admission = SecondTouch(budget)
        for request in requests:
            ladder.request(request.ids, request.at_s)
        counts = ladder.counts
        written = counts.written_nbytes / record_nbytes / blocks
        enough = share is not None and written < 0.8 * share
        shares = (counts.dram_hits / counts.accesses, counts.ssd_hits / counts.accesses)
        yield name, rule, "" if share is None else share, written, *shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--dram", type=float, default=0.02)
    parser.add_argument("--ssd", type=float, default=0.30)
    parser.add_argument("--coarsen", type=int, default=1, help="take blocks of this many of the trace's")
    parser.add_argument("--requests", type=int, default=None, help="no more than the first N")
    parser.add_argument("--csv", type=Path, default=None, help="write the figures here, too")
    options = parser.parse_args()
    print("| trace | rule | budget | written | DRAM hits | SSD hits |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    found: list[tuple[object, ...]] = []
    for path in options.traces:
        requests = list(read_trace(path, coarsen=options.coarsen))[: options.requests]
        for row in rows(path.name.split(".")[0], requests, options.dram, options.ssd):
            found.append(row)
            name, rule, share, written, dram, ssd = row
            print(f"| {name} | {rule} | {share} | {written:.2f} | {dram:.1%} | {ssd:.1%} |")
            sys.stdout.flush()
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("trace", "rule", "budget", "written", "dram_hits", "ssd_hits"))
            writer.writerows(found)


if __name__ == "__main__":
    main()
