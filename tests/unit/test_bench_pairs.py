"""The statistics of `make bench`, against figures worked out by hand and in published tables."""

from __future__ import annotations

import fcntl
import itertools
import json
import tempfile
import threading
from pathlib import Path

import pytest
from benchmarks import pairs
from benchmarks.pairs import MIN_PAIRS, SCHEMA, Row, measure, median_interval, result_of

#: n -> k: the widest-known table of the sign test (two sides, 5 %) lists k - 1 as its critical value.
SIGN_TEST_5 = {6: 0, 7: 0, 8: 0, 9: 1, 10: 1, 11: 1, 12: 2, 15: 3, 16: 3, 17: 4, 20: 5, 25: 7, 30: 9}


@pytest.mark.parametrize(("count", "critical"), SIGN_TEST_5.items())
def test_the_interval_is_the_sign_tests(count: int, critical: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    assert median_interval(values[::-1]) == (critical + 1, count - critical)


def test_the_interval_covers_95_percent_and_the_next_narrower_would_not() -> None:
    # by enumeration of all 2^9 ways in which nine values can lie about their median
    ways = [sum(way) for way in itertools.product((0, 1), repeat=9)]
    low, high = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    covered = sum(low <= below <= high - 1 for below in ways) / len(ways)
    narrower = sum(low + 1 <= below <= high - 2 for below in ways) / len(ways)
    assert covered >= 0.95 > narrower


def test_too_few_pairs_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        median_interval([1.0] * (MIN_PAIRS - 1))
    with pytest.raises(ValueError, match="at least 6"):
        measure(Row("few", 1.0), lambda: 1.0, lambda: 1.0, pairs=5)


def test_a_result_is_of_ratios_within_pairs() -> None:
    # ratios 0.5, 1, 1.5, 2, 2.5, 3: median 1.75, interval all six, quartiles 1.125 and 2.375 (linear between ranks)
    figures = [(1.0, 2.0), (5.0, 5.0), (3.0, 2.0), (20.0, 10.0), (5.0, 2.0), (3.0, 1.0)]
    result = result_of(Row("r", 1.0, unit="s"), figures)
    assert (result.ratio, result.low, result.high, result.spread) == (1.75, 0.5, 3.0, 1.25)
    assert (result.ours, result.theirs, result.rounds) == (4.0, 2.0, 6)  # 4 / 2 is not the ratio
    assert result.pairs == tuple(figures)


@pytest.mark.parametrize(
    ("goal", "better", "decides", "met"),
    [
        (1.75, "higher", "median", True),
        (1.76, "higher", "median", False),
        (1.74, "lower", "median", False),
        (1.75, "lower", "median", True),
        (0.5, "higher", "bound", True),
        (0.51, "higher", "bound", False),
        (3.0, "lower", "bound", True),
        (2.99, "lower", "bound", False),
    ],
)
def test_what_meets_a_goal(goal: float, better: str, decides: str, met: bool) -> None:
    row = Row("r", goal, better, decides=decides)  # type: ignore[arg-type]
    assert result_of(row, [(ratio, 1.0) for ratio in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]).met is met


def test_sides_are_called_in_pairs_and_the_first_pair_does_not_count() -> None:
    calls: list[str] = []
    told: list[int] = []

    def ours() -> float:
        calls.append("a")
        return float(calls.count("a"))

    def theirs() -> float:
        calls.append("b")
        return 1.0

    result = measure(Row("r", 1.0), ours, theirs, pairs=20, on_pair=told.append)
    assert [one for one, _ in result.pairs] == [float(n) for n in range(2, 22)]
    assert told == list(range(21))
    each = ["".join(calls[at : at + 2]) for at in range(0, len(calls), 2)]
    assert len(each) == 21 and set(each) == {"ab", "ba"}  # both orders come


def test_the_order_is_the_same_each_time() -> None:
    def order() -> list[str]:
        calls: list[str] = []

        def side(name: str) -> float:
            calls.append(name)
            return 1.0

        measure(Row("r", 1.0), lambda: side("a"), lambda: side("b"))
        return calls

    assert order() == order()


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_a_figure_that_is_none_is_refused(figure: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        measure(Row("r", 1.0), lambda: figure, lambda: 1.0)


def test_results_are_merged_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for name, ours in (("one", 1.0), ("two", 2.0), ("one", 3.0)):
        pairs.merge(path, result_of(Row(name, 1.0), [(ours, 1.0)] * 6), {"commit": f"of {ours}"})
    kept = json.loads(path.read_text())
    assert kept["schema"] == SCHEMA
    assert {name: (row["ratio"], row["commit"]) for name, row in kept["rows"].items()} == {
        "one": (3.0, "of 3.0"),
        "two": (2.0, "of 2.0"),
    }
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    shown = pairs.table(kept["rows"])
    assert "| one | 3 " in shown and "| two | 2 " in shown


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"schema": "another"}')
    with pytest.raises(ValueError, match="no results file"):
        pairs.merge(path, result_of(Row("r", 1.0), [(1.0, 1.0)] * 6), {})
    assert path.read_text() == '{"schema": "another"}'


def test_two_benchmarks_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inside = threading.Event()

    def second() -> None:
        with pairs.alone():
            inside.set()

    other = threading.Thread(target=second)
    with pairs.alone():
        other.start()
        with (tmp_path / "kvterrace-bench.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not inside.is_set()
    other.join(30.0)
    assert inside.is_set()
