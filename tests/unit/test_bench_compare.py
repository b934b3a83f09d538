"""What the speed comparison believes of a side: every byte, or no figure; and whose CPU time it counts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.compare import speed_side
from benchmarks.compare.speed_side import BLOCK_NBYTES, Serving, cpu_s


class Kept:
    """A side in memory: an array. `wrong` is done to what it gives back."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.facts: dict[str, object] = {}
        self.helpers: list[int] = []
        self.kept = self.older = np.zeros((2, BLOCK_NBYTES), np.uint8)

    def fresh(self) -> None:
        self.older = self.kept

    def store(self, memory: np.ndarray) -> None:
        self.kept = memory.copy()

    def cool(self) -> None:
        pass

    def restore(self, memory: np.ndarray) -> None:
        if self.wrong == "nothing":
            return
        memory[:] = self.older if self.wrong == "older" else self.kept
        if self.wrong == "last byte":
            memory[1, -1] ^= 1

    dram_put = store
    dram_get = restore

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _cache_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_side, "drop_page_cache", lambda folder: None)


@pytest.mark.parametrize("commands", [["store", "restore", "restore"], ["dram_put", "dram_get"]])
def test_a_right_side_is_believed(commands: list[str], tmp_path: Path) -> None:
    serving = Serving(Kept(), tmp_path, 2)
    for command in commands:
        answer = serving.answer(command)
        assert answer["nbytes"] == answer["verified"] == 2 * 2 * 1024 * 1024


@pytest.mark.parametrize("wrong", ["nothing", "older", "last byte"])
@pytest.mark.parametrize("command", ["store", "dram_put"])
def test_what_a_wrong_side_stored_is_no_result(wrong: str, command: str, tmp_path: Path) -> None:
    side = Kept()
    serving = Serving(side, tmp_path, 2)
    serving.answer(command)
    side.wrong = wrong
    with pytest.raises(SystemExit, match=r"block [01] differs"):
        serving.answer(command)


@pytest.mark.parametrize("wrong", ["nothing", "older", "last byte"])
@pytest.mark.parametrize("command", ["restore", "dram_get"])
def test_what_a_wrong_side_gave_back_is_no_result(wrong: str, command: str, tmp_path: Path) -> None:
    side = Kept()
    serving = Serving(side, tmp_path, 2)
    serving.answer("store")
    side.wrong = wrong
    with pytest.raises(SystemExit, match=r"block [01] differs"):
        serving.answer(command)


def test_cpu_time_is_that_of_the_helpers_too() -> None:
    says = "import sys, time\nfor _ in sys.stdin: sum(range(100_000)); print(time.process_time(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin is not None
        assert one.stdout is not None

        def its() -> float:
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write("\n")
            one.stdin.flush()
            return float(one.stdout.readline())

        began = its()
        mine = time.process_time()
        both = cpu_s([one.pid])
        mine_after = time.process_time()
        after = its()
        one.stdin.close()
    assert began + mine <= both <= after + mine_after
