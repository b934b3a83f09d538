"""`make bench-compare`: kvterrace beside LMCache and Mooncake, on one drive, in pairs.

    python -m benchmarks.compare.speed [ROW ...] [--pairs 15] [--dir .] [--peers-python PATH] [--results FILE]
    python -m benchmarks.compare.speed --trial       every mode of each peer, a few rounds each
    python -m benchmarks.compare.speed --information memory and plain files; no goals

Each side is a child process (`speed_side.py` says what it does for a figure, and that every byte is compared). Rows are
merged into the results file one by one. See README.md and docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.common import facts
from benchmarks.pairs import MIN_PAIRS, Result, Row, alone, load, measure, merge, say, table

HERE = Path(__file__).resolve().parent
BLOCK_NBYTES, GIB = 2 << 20, 1 << 30

#: The modes of each peer that the trial found best, by what is measured; docs/performance.md has the trial.
LMCACHE_CPU = "lmcache-fs-native-direct-t8"
LMCACHE_WALL = "lmcache-disk-direct-t8"
MOONCAKE_CPU = "mooncake-uring"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row, and how its figures come about. `won`: instead of the median, the share of pairs that ours must win."""

    row: Row
    command: str
    theirs: str
    blocks: int
    won: float | None = None


def _cpu(name: str, command: str, theirs: str, what: str) -> Comparison:
    row = Row(name, 0.5, "lower", f"CPU seconds for each GiB {what}, beside {theirs}; 256 blocks of 2 MiB", "CPU s/GiB")
    return Comparison(row, command, theirs, 256)


COMPARISONS = [
    _cpu("restore-cpu-lmcache", "restore", LMCACHE_CPU, "restored, cold"),
    _cpu("restore-cpu-mooncake", "restore", MOONCAKE_CPU, "restored, cold"),
    _cpu("store-cpu-lmcache", "store", LMCACHE_CPU, "stored, durable"),
    _cpu("store-cpu-mooncake", "store", MOONCAKE_CPU, "stored, durable"),
    Comparison(
        Row("cold-read-lmcache", 1.0, "lower", f"512 blocks of 2 MiB, cold, beside {LMCACHE_WALL}: four in five", "s"),
        "restore", LMCACHE_WALL, 512, won=0.8,
    ),
]  # fmt: skip

TRIED = [
    *(f"lmcache-disk{direct}{threads}" for direct in ("", "-direct") for threads in ("-t2", "", "-t8")),
    *(f"lmcache-fs-native{direct}{threads}" for direct in ("", "-direct") for threads in ("-t2", "", "-t8")),
    "lmcache-fs",
    "lmcache-fs-direct",
    "mooncake",
    "mooncake-uring",
    "kvterrace",
]

INFORMATION = [
    ("kvterrace-dram", ("dram_put", "dram_get")),
    ("lmcache-dram", ("dram_put", "dram_get")),
    ("lmcache-l1", ("dram_put", "dram_get")),
    ("mooncake-dram", ("dram_put", "dram_get")),
    ("plain", ("store", "restore")),
]


class Child:
    """A side's process."""

    def __init__(self, kind: str, blocks: int, folder: Path, peers_python: Path) -> None:
        script = HERE / f"speed_{kind.split('-')[0]}.py"
        ours = kind.startswith(("kvterrace", "plain"))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the process owns it
        self._process = subprocess.Popen(
            [sys.executable if ours else peers_python, script, kind, "--dir", folder, "--blocks", str(blocks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._kind = kind
        self.facts: dict[str, Any] = self._answer()["facts"]
        self.ask("dram_put" if kind.endswith(("-dram", "-l1")) else "store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._send("quit")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self._kind} ended without an answer; its last words:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        """One round of `command`. Raises SystemExit if the side gave another block than it was given, or ended."""
        self._send(command)
        answer = self._answer()
        assert answer["verified"] == answer["nbytes"]
        return answer

    def figure(self, command: str, unit: str) -> float:
        """One round, in `unit`."""
        answer = self.ask(command)
        return float(answer["cpu_s"] / (answer["nbytes"] / GIB) if unit == "CPU s/GiB" else answer["wall_s"])


@dataclass(frozen=True, slots=True)
class Options:
    pairs: int
    folder: Path
    peers_python: Path
    results: Path

    @contextlib.contextmanager
    def child(self, kind: str, blocks: int) -> Iterator[Child]:
        with (
            tempfile.TemporaryDirectory(prefix="kvterrace-compare-", dir=self.folder) as place,
            Child(kind, blocks, Path(place), self.peers_python) as child,
        ):
            yield child


def compare(one: Comparison, options: Options) -> Result:
    """Measure a row, and keep it."""
    row = one.row
    say(f"{row.name}: {row.what}")
    began_s = time.monotonic()
    with alone(), options.child("kvterrace", one.blocks) as ours, options.child(one.theirs, one.blocks) as theirs:
        result = measure(
            row,
            lambda: ours.figure(one.command, row.unit),
            lambda: theirs.figure(one.command, row.unit),
            options.pairs,
            on_pair=lambda number: say(f"  pair {number} of {options.pairs}", again=True),
        )
        sides = {"sides": {"ours": ours.facts, "theirs": theirs.facts}}
    won = sum(a < b for a, b in result.pairs) / len(result.pairs)
    if one.won is not None:
        result = dataclasses.replace(result, met=won >= one.won)
    merge(options.results, result, facts(options.folder) | sides | {"won": won, "won_goal": one.won})
    say(
        f"\r  {result.ratio:.3f} ({result.low:.3f} .. {result.high:.3f}), won {won:.0%}, "
        f"{'met' if result.met else 'MISSED'}; ours {result.ours:.4g}, theirs {result.theirs:.4g} {row.unit}; "
        f"{time.monotonic() - began_s:.0f} s"
    )
    return result


def trial(options: Options, kinds: list[str], rounds: int = 3, blocks: int = 256) -> None:
    """Every mode, `rounds` rounds each after one that does not count; medians."""
    print("| mode | stored: CPU s/GiB | s | restored: CPU s/GiB | s |\n| --- | ---: | ---: | ---: | ---: |")
    for kind in kinds:
        with alone(), options.child(kind, blocks) as child:
            cells = []
            for command in ("store", "restore"):
                told = [child.ask(command) for _ in range(rounds)]
                gib = told[0]["nbytes"] / GIB
                cells.append(f"{statistics.median(one['cpu_s'] for one in told) / gib:.3f}")
                cells.append(f"{statistics.median(one['wall_s'] for one in told) / gib:.2f}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def information(options: Options, rounds: int = 5, blocks: int = 256) -> None:
    """Memory of each, and a plain file: medians of `rounds` rounds."""
    print("| side | | GB/s | CPU s/GiB |\n| --- | --- | ---: | ---: |")
    for kind, commands in INFORMATION:
        with alone(), options.child(kind, blocks) as child:
            for command in commands:
                told = [child.ask(command) for _ in range(rounds)]
                nbytes = told[0]["nbytes"]
                speed = nbytes / 1e9 / statistics.median(one["wall_s"] for one in told)
                cpu = statistics.median(one["cpu_s"] for one in told) / (nbytes / GIB)
                print(f"| {kind} | {command.replace('_', ' ')} | {speed:.2f} | {cpu:.3f} |", flush=True)


def main() -> int:
    """The command. Returns its status: 1 if a row missed its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure (default: all)")
    parser.add_argument("--pairs", type=int, default=15, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the drive to be measured; left as it was")
    parser.add_argument("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    parser.add_argument("--results", type=Path, default=Path("bench-results.json"))
    parser.add_argument("--trial", nargs="*", metavar="KIND", help="try modes (default: all), and measure no row")
    parser.add_argument("--information", action="store_true", help="what has no goal, and measure no row")
    given = parser.parse_args()
    names = [one.row.name for one in COMPARISONS]
    if unknown := [name for name in given.rows if name not in names]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(names)}")
    if given.pairs < MIN_PAIRS:
        parser.error(f"--pairs {given.pairs}: at least {MIN_PAIRS}, else there is no 95 % interval")
    if not given.peers_python.exists():
        parser.error(f"--peers-python {given.peers_python}: not there; `make bench-compare` makes it")
    if not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        parser.error("the page cache is dropped before each round, which needs root")
    # Not resolved: a virtual environment's python is a link, and finds its packages by its own place.
    options = Options(given.pairs, given.dir.resolve(), given.peers_python.absolute(), given.results)
    if given.trial is not None:
        trial(options, given.trial or TRIED)
        return 0
    if given.information:
        information(options)
        return 0
    load(options.results)  # a file that is none is refused now, not after the first row
    wanted = [one for one in COMPARISONS if not given.rows or one.row.name in given.rows]
    results = [compare(one, options) for one in wanted]
    kept = load(options.results)["rows"]
    print(table({one.row.name: kept[one.row.name] for one in wanted}))
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
