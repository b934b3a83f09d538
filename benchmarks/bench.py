"""`make bench`: the store's own rows, each against what it can be held to on this machine.

    python -m benchmarks.bench [ROW ...] [--pairs 15] [--dir .] [--results bench-results.json] [--list]

Rows are measured one after the other, alone on this machine as far as other benchmarks go, and each is merged into the
results file when it has ended: so they can be measured again one by one. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rows_device, rows_drive, rows_memory
from benchmarks.common import facts
from benchmarks.pairs import MIN_PAIRS, Bench, Row, Skip, alone, load, measure, merge, say, table

#: Every row that needs no peer, in the order of docs/performance.md.
BENCHES: list[tuple[Row, Bench]] = [*rows_device.BENCHES, *rows_drive.BENCHES, *rows_memory.BENCHES]


def run(benches: Sequence[tuple[Row, Bench]], pairs: int, folder: Path, results: Path) -> tuple[list[str], list[str]]:
    """Measure `benches` in folders made under `folder`; returns the names of those that missed their goals, and a line
    for each that was skipped.
    """
    missed, skipped = [], []
    for row, bench in benches:
        say(f"{row.name}: {row.what}")
        with tempfile.TemporaryDirectory(prefix="kvterrace-bench-", dir=folder) as place:
            began_s = time.monotonic()
            try:
                with bench(Path(place)) as (ours, theirs):
                    result = measure(
                        row, ours, theirs, pairs, on_pair=lambda n: say(f"  pair {n} of {pairs}", again=True)
                    )
            except Skip as why:
                skipped.append(f"{row.name}: skipped: {why}")
                say(f"  skipped: {why}")
                continue
        merge(results, result, facts(folder))
        verdict = "met" if result.met else "MISSED"
        say(f"  pair {pairs} of {pairs}", again=True)
        say(
            f"\r  {result.ratio:.3f} ({result.low:.3f} .. {result.high:.3f}), goal {row.goal:.2f}: {verdict}; "
            f"ours {result.ours:.4g}, theirs {result.theirs:.4g} {row.unit}; {time.monotonic() - began_s:.0f} s"
        )
        if not result.met:
            missed.append(row.name)
    return missed, skipped


def main(benches: Sequence[tuple[Row, Bench]] = BENCHES) -> int:
    """The command. Returns its status: 1 if a row missed its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure (default: all)")
    parser.add_argument("--pairs", type=int, default=15, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the drive to be measured; left as it was")
    parser.add_argument("--results", type=Path, default=Path("bench-results.json"))
    parser.add_argument("--list", action="store_true", help="name the rows and what they compare, and measure nothing")
    options = parser.parse_args()
    names = [row.name for row, _ in benches]
    if options.list:
        for row, _ in benches:
            print(f"{row.name:16} {row.what}")
        return 0
    if unknown := [name for name in options.rows if name not in names]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(names)}")
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs {options.pairs}: at least {MIN_PAIRS}, else there is no 95 % interval")
    load(options.results)  # a file that is none is refused now, not after the first row
    wanted = [(row, bench) for row, bench in benches if not options.rows or row.name in options.rows]
    with alone():
        missed, skipped = run(wanted, options.pairs, options.dir, options.results)
    kept = load(options.results)["rows"]
    print(table({row.name: kept[row.name] for row, _ in wanted if row.name in kept}))
    for line in skipped:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
