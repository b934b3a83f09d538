"""Two ways of doing the same work, measured in pairs: the statistics, and the file that keeps the results.

The two are called in turn, in shuffled order, so that a machine that slows down slows both. What counts is the ratio
within each pair, never one figure: its median, and an interval for that median which assumes nothing about how the
ratios are distributed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "MIN_PAIRS",
    "SCHEMA",
    "Bench",
    "Result",
    "Row",
    "Side",
    "Skip",
    "alone",
    "load",
    "measure",
    "median_interval",
    "merge",
    "say",
    "table",
]

#: Name and version of the results file.
SCHEMA = "kvterrace.bench/1"
#: Fewer pairs have no 95 % interval: even from the smallest to the largest of five it is 93.75 %.
MIN_PAIRS = 6

#: Does the work once and returns a figure, larger than 0: seconds, CPU seconds, or a rate.
Side = Callable[[], float]
#: Prepares a row in a folder of its own, and yields its two sides: ours, and what it is compared with. Raises `Skip`.
Bench = Callable[[Path], AbstractContextManager[tuple[Side, Side]]]


class Skip(Exception):  # noqa: N818 - no error: the row cannot be measured here
    """Why a row cannot be measured on this machine, and what would help."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared, and what it should come to.

    Attributes:
        name: stable, for `BENCH_ARGS` and for programs.
        goal: of the ratio ours / theirs.
        better: whether the ratio should be at least (`higher`) or at most (`lower`) the goal.
        what: one line for people, with the sizes.
        unit: of both sides' figures.
        decides: what is held against the goal: the `median`, or the `bound` of its interval that is nearer to failing.
    """

    name: str
    goal: float
    better: Literal["higher", "lower"] = "higher"
    what: str = ""
    unit: str = ""
    decides: Literal["median", "bound"] = "median"


@dataclass(frozen=True, slots=True)
class Result:
    """A row, measured.

    Attributes:
        ratio: median over the pairs of ours / theirs.
        low, high: its interval, of at least 95 %.
        spread: distance between the quartiles of the ratios.
        rounds: pairs measured.
        ours, theirs: medians of the two sides' figures, in `unit`. Their quotient is not `ratio`.
        pairs: all figures, ours and theirs, in the order they were measured.
    """

    name: str
    what: str
    unit: str
    goal: float
    better: str
    decides: str
    ratio: float
    low: float
    high: float
    met: bool
    spread: float
    rounds: int
    ours: float
    theirs: float
    pairs: tuple[tuple[float, float], ...]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the median of what `values` were drawn from, with a probability of at least 95 %.

    From the k-th smallest to the k-th largest, with the largest k that allows it: each value lies below the median with
    probability 1/2, so how many do is binomial. Raises ValueError for fewer than `MIN_PAIRS` values.
    """
    count = len(values)
    if count < MIN_PAIRS:
        raise ValueError(f"{count} values have no 95 % interval; give at least {MIN_PAIRS}")
    rank, tail = 0, 0.0
    while (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def result_of(row: Row, pairs: Sequence[tuple[float, float]]) -> Result:
    """The result of figures that were measured already."""
    ratios = [ours / theirs for ours, theirs in pairs]
    low, high = median_interval(ratios)
    ratio = statistics.median(ratios)
    quarters = statistics.quantiles(ratios, n=4, method="inclusive")
    if row.better == "higher":
        met = (low if row.decides == "bound" else ratio) >= row.goal
    else:
        met = (high if row.decides == "bound" else ratio) <= row.goal
    return Result(
        name=row.name,
        what=row.what,
        unit=row.unit,
        goal=row.goal,
        better=row.better,
        decides=row.decides,
        ratio=ratio,
        low=low,
        high=high,
        met=met,
        spread=quarters[2] - quarters[0],
        rounds=len(pairs),
        ours=statistics.median(ours for ours, _ in pairs),
        theirs=statistics.median(theirs for _, theirs in pairs),
        pairs=tuple(pairs),
    )


def measure(row: Row, a: Side, b: Side, pairs: int = 15, *, on_pair: Callable[[int], object] | None = None) -> Result:
    """Call `a` (ours) and `b` (theirs) `pairs` times each, in turn, each time in an order drawn from a fixed seed. One
    pair before those does not count: it warms up what both sides use. `on_pair` hears how many are done.
    """
    if pairs < MIN_PAIRS:
        raise ValueError(f"{pairs} pairs have no 95 % interval; give at least {MIN_PAIRS}")
    order = random.Random(row.name)
    figures: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        if order.random() < 0.5:
            ours = a()
            theirs = b()
        else:
            theirs = b()
            ours = a()
        if not (0 < ours < math.inf and 0 < theirs < math.inf):
            raise ValueError(f"{row.name}: figures {ours} and {theirs}; a side returns seconds or a rate, above 0")
        if number:
            figures.append((ours, theirs))
        if on_pair is not None:
            on_pair(number)
    return result_of(row, figures)


# -- keeping -----------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """The results file; an empty one if it is not there. Raises ValueError if it is something else."""
    if not path.exists():
        return {"schema": SCHEMA, "rows": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no results file of {SCHEMA}: name another, or move it away")
    return found


def merge(path: Path, result: Result, facts: Mapping[str, object]) -> None:
    """Put `result` into the results file, in the place of an older one of that row. `facts`: where and when it was
    measured; kept with each row, since rows are measured one by one.
    """
    kept = load(path)
    kept["rows"][result.name] = {**asdict(result), **facts}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(kept, indent=1) + "\n")
    fresh.replace(path)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| row | ours | theirs | ratio | 95 % interval | spread | goal | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, one in rows.items():
        sign = "at least" if one["better"] == "higher" else "at most"
        bound = " (bound)" if one["decides"] == "bound" else ""
        lines.append(
            f"| {name} | {one['ours']:.4g} {one['unit']} | {one['theirs']:.4g} {one['unit']} | {one['ratio']:.3f} "
            f"| {one['low']:.3f} .. {one['high']:.3f} | {one['spread']:.3f} | {sign} {one['goal']:.2f}{bound} "
            f"| {'met' if one['met'] else 'MISSED'} |"
        )
    return "\n".join(lines)


# -- running -----------------------------------------------------------------------------------------------------------


def say(text: str, *, again: bool = False) -> None:
    """Tell the user what goes on, on stderr; `again`: in the place of the last line, where that is a terminal."""
    if again and not sys.stderr.isatty():
        return
    print(f"\r\033[K{text}" if again else text, end="" if again else "\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other benchmark of this machine runs meanwhile. Waits for as long as one does."""
    path = Path(tempfile.gettempdir(), "kvterrace-bench.lock")
    with path.open("a") as lock:
        began_s = time.monotonic()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another benchmark runs; waiting for {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
            say(f"it has ended, after {time.monotonic() - began_s:.0f} s")
        yield
