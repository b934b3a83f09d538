"""SSD hits against bytes written, with less and less to write: what `policy.admission` makes of traces.

usage: python benchmarks/admission.py TRACE... [--dram 0.02] [--ssd 0.30] [--coarsen N] [--requests N] [--csv FILE]
       python benchmarks/admission.py --plot FILE.svg CSV...

TRACE is a file in Mooncake's format (hash_ids) or with run-length coded ids (hash_runs), gzipped or not. Sizes are
shares of the trace's different blocks, and so are budgets: of the whole trace, given out evenly, with a tenth of it
saved up at most. Beside the store's own choice runs second touch, while there is budget: of a run that was used in
two turns, all of it, or the part that was.

The choice is the store's; the tiers around it are plain (least recently used, tail first, block by block), so that a
trace takes seconds. `--ledger` has the production ledger do it: minutes to hours. No bytes are moved, and the clock is
the trace's.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvterrace.policy.admission import Admission, History, WriteBudget
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.sim.traces import TraceRequest, read_trace

#: Of the trace's different blocks; None: no budget, all is written.
BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, None)
BEHIND_S, TURN_S = 2.0, 1.0


class SecondTouch(Admission):
    """Nothing but what was used in two turns: of a run, the part that was, or all of it (plain tiers)."""

    whole_runs = False

    def is_short(self, now_s: float) -> bool:  # noqa: ARG002 - whatever is left
        return True

    def admits(self, history: History, now_s: float) -> bool:
        assert self.budget is not None
        return history is History.SEEN and self.budget.left_nbytes(now_s) > 0


class SecondTouchOfRuns(SecondTouch):
    """A run of which something was used in two turns."""

    whole_runs = True


#: By name. The last is the store's own.
RULES = {"second touch of runs": SecondTouchOfRuns, "second touch": SecondTouch, "kvterrace": Admission}


@dataclass(slots=True)
class Run:
    """New blocks of one request, and how many were before them."""

    ids: list[int]
    begins: int
    parent: int | None
    waits: bool = True


class PlainLadder:
    """DRAM and SSD as plain lists; what is written is asked of an `Admission`. A block is a byte."""

    def __init__(self, dram_blocks: int, ssd_blocks: int, admission: Admission) -> None:
        self._sizes = dram_blocks, ssd_blocks
        self._admission = admission
        self._dram: OrderedDict[int, float] = OrderedDict()  # block -> when it was used
        self._ssd: OrderedDict[int, None] = OrderedDict()
        self._run: dict[int, Run] = {}  # of blocks in DRAM that were new there
        self._seen: set[int] = set()
        self._due: deque[tuple[float, Run]] = deque()
        self.accesses = self.dram_hits = self.ssd_hits = self.written = 0

    def request(self, ids: list[int], now_s: float) -> None:
        """Serve one request."""
        while self._due and self._due[0][0] <= now_s:
            self._judge(self._due.popleft()[1], now_s)
        dram, ssd = self._dram, self._ssd
        hits = next((at for at, one in enumerate(ids) if one not in dram and one not in ssd), len(ids))
        cold = [one for one in ids[:hits] if one not in dram]
        self.accesses += len(ids)
        self.ssd_hits += len(cold)
        self.dram_hits += hits - len(cold)
        choosy = self._admission.budget is not None
        if cold and choosy:
            self._admission.asked(np.array(cold, np.uint64) + np.uint64(1))
        for one in ids[:hits]:
            if now_s - dram.get(one, now_s) >= TURN_S and one not in ssd:
                self._seen.add(one)
                run = self._run.get(one)
                if run is not None and not run.waits:
                    run.waits = True
                    self._due.append((now_s + BEHIND_S, run))
        if hits < len(ids):
            self._new(ids, hits, now_s)
        for one in reversed(ids):
            dram[one] = now_s
            dram.move_to_end(one)
            if one in ssd:
                ssd.move_to_end(one)
        while len(dram) > self._sizes[0]:
            one = next(iter(dram))
            run = self._run.get(one)
            if run is not None and run.waits and one not in ssd:
                self._judge(run, now_s)
            del dram[one]
            self._run.pop(one, None)
            self._seen.discard(one)

    def _new(self, ids: list[int], hits: int, now_s: float) -> None:
        fresh = ids[hits:]
        if self._admission.budget is not None:
            keys = np.array(fresh, np.uint64) + np.uint64(1)
            known = np.flatnonzero(self._admission.seen(keys))
            if len(known):
                self._seen.update(fresh[: known[-1] + 1])
                self._admission.asked(keys)
        run = Run(fresh, hits, ids[hits - 1] if hits else None)
        self._run.update(dict.fromkeys(fresh, run))
        self._due.append((now_s + BEHIND_S, run))

    def _judge(self, run: Run, now_s: float) -> None:
        if not run.waits:
            return
        run.waits = False
        admission, ssd = self._admission, self._ssd
        waiting = [one for one in run.ids if one in self._dram and one not in ssd]
        if not waiting or (run.parent is not None and run.parent not in ssd):
            return  # alone it would be worth nothing
        parts = [(waiting, None)]
        if admission.is_short(now_s):
            seen = next((at for at, one in enumerate(waiting) if one not in self._seen), len(waiting))
            if getattr(admission, "whole_runs", False) and not self._seen.isdisjoint(waiting):
                seen = len(waiting)
            goes_on = run.begins + seen >= len(waiting) - seen
            new = History.GOES_ON if goes_on else History.NEW
            parts = [(waiting[:seen], History.SEEN), (waiting[seen:], new)]  # type: ignore[list-item]
        for part, history in parts:
            if not part:
                continue
            if history is not None:
                admission.judged(np.array(part, np.uint64) + np.uint64(1), history)
                if not admission.admits(history, now_s):
                    return
            self.written += len(part)
            if admission.budget is not None:
                admission.budget.spend(len(part), now_s)
            ssd.update(dict.fromkeys(reversed(part)))
        while len(ssd) > self._sizes[1]:
            ssd.popitem(last=False)


def budget_of(share: float | None, blocks: int, seconds: float, record_nbytes: int) -> WriteBudget | None:
    """`share` of `blocks` over `seconds`, of which a tenth may be saved up; half of that is there at the start."""
    if share is None:
        return None
    most_nbytes = share * blocks * record_nbytes / 10
    return WriteBudget(most_nbytes, left_nbytes=most_nbytes / 2, day_s=seconds / 10)


def replay(
    requests: Sequence[TraceRequest], sizes: tuple[int, int], rule: str, budget: WriteBudget | None, *, nbytes: int
) -> tuple[float, float, float]:
    """Blocks written; shares of accesses that hit DRAM and SSD. `nbytes` of a record: 1 for plain tiers."""
    admission = RULES[rule](budget)
    if nbytes == 1:
        plain = PlainLadder(*sizes, admission)
        for request in requests:
            plain.request(request.ids.tolist(), request.at_s)
        return plain.written, plain.dram_hits / plain.accesses, plain.ssd_hits / plain.accesses
    ladder = LedgerLadder(*sizes, record_nbytes=nbytes, budget=budget)
    ladder.ledger.admitting.admission = admission
    for request in requests:
        ladder.request(request.ids, request.at_s)
    counts = ladder.counts
    written = counts.written_nbytes / nbytes
    return written, counts.dram_hits / counts.accesses, counts.ssd_hits / counts.accesses


Row = tuple[str, str, float | None, float, float, float]


def rows(name: str, requests: Sequence[TraceRequest], dram: float, ssd: float, *, nbytes: int) -> Iterator[Row]:
    """(trace, rule, budget, written, DRAM hits, SSD hits): blocks by the trace's different ones, hits by accesses."""
    blocks = len(np.unique(np.concatenate([request.ids for request in requests])))
    seconds = requests[-1].at_s - requests[0].at_s
    sizes, enough = (int(dram * blocks), int(ssd * blocks)), False
    for rule, share in itertools.product(RULES, BUDGETS):
        if share == BUDGETS[0]:
            enough = False
        if rule != "kvterrace" and (share is None or enough):
            continue  # it has no use for more
        written, *hits = replay(requests, sizes, rule, budget_of(share, blocks, seconds, nbytes), nbytes=nbytes)
        written /= blocks
        enough = share is not None and written < 0.8 * share
        yield name, rule, share, written, hits[0], hits[1]


def plot(files: Sequence[Path], target: Path) -> None:
    """One panel a trace: bytes written across, SSD hits up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = [row for path in files for row in csv.DictReader(path.open())]
    names = list(dict.fromkeys(row["trace"] for row in found))
    figure, panels = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for rule, mark in zip(RULES, ("s:", "^--", "o-"), strict=True):
            some = [row for row in found if row["trace"] == name and row["rule"] == rule]
            points = sorted((float(row["written"]), 100 * float(row["ssd_hits"])) for row in some)
            panel.plot(*zip(*points, strict=True), mark, label=rule, markersize=4)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("written, by the trace's different blocks")
        panel.set_ylabel("SSD hits, % of accesses")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--dram", type=float, default=0.02)
    parser.add_argument("--ssd", type=float, default=0.30)
    parser.add_argument("--coarsen", type=int, default=1, help="take blocks of this many of the trace's")
    parser.add_argument("--requests", type=int, default=None, help="no more than the first N")
    parser.add_argument("--ledger", action="store_true", help="with the production ledger around the choice")
    parser.add_argument("--csv", type=Path, default=None, help="write the figures here, too")
    parser.add_argument("--plot", type=Path, default=None, help="draw what such files hold; needs matplotlib")
    options = parser.parse_args()
    if options.plot is not None:
        plot(options.traces, options.plot)
        return
    print("| trace | rule | budget | written | DRAM hits | SSD hits |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    found: list[Row] = []
    for path in options.traces:
        requests = list(itertools.islice(read_trace(path, coarsen=options.coarsen), options.requests))
        nbytes = 1 << 20 if options.ledger else 1
        for row in rows(path.name.split(".")[0], requests, options.dram, options.ssd, nbytes=nbytes):
            found.append(row)
            name, rule, share, written, dram, ssd = row
            print(
                f"| {name} | {rule} | {'none' if share is None else share} | {written:.2f} | {dram:.1%} | {ssd:.1%} |"
            )
            sys.stdout.flush()
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("trace", "rule", "budget", "written", "dram_hits", "ssd_hits"))
            writer.writerows(found)


if __name__ == "__main__":
    main()
