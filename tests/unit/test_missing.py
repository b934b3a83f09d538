"""Reads that came short, while the folder that says why cannot be read."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.harness import SMALL, Box, Get, chain_of, kinds

from kvterrace.io.base import FileInfo, IoKind
from kvterrace.io.faults import Short

ONE, TWO = chain_of(SMALL, [1]), chain_of(SMALL, [2])


def two_segments(box: Box) -> None:
    """A block in each, and in DRAM no more."""
    for chain in (ONE, TWO):
        box.put_now(chain)
        box.cool()
        box.writer.seal_open()
        box.step()
        box.rest()
    assert len(box.store._core.ledger.spaces[0].segments) == 2


def failing(box: Box, monkeypatch: pytest.MonkeyPatch, *nths: int) -> list[float]:
    """The folder cannot be listed the `nths` time; when it was tried, by the clock."""
    listing, asked = box.device.list, list[float]()

    def listed(folder: Path) -> Sequence[FileInfo]:
        asked.append(box.clock.monotonic_s())
        if len(asked) in nths:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return listing(folder)

    monkeypatch.setattr(box.device, "list", listed)
    return asked


@pytest.mark.parametrize("nth", [1, 2])
def test_a_folder_that_cannot_be_listed_puts_off_one_verdict_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    box = Box(tmp_path, segments=8, dram_blocks=24, after_s=0.0)
    two_segments(box)
    asked = failing(box, monkeypatch, nth)
    box.faults.add(Short(4096), IoKind.READ)
    reads = [Get(box.store, chain) for chain in (ONE, TWO)]
    for read in reads:
        box.wait(read.transfer)
        assert kinds(read.transfer.outcomes) != ["Hit"]
    box.rest()
    box.faults.clear()
    (volume,) = box.store._core.volumes
    assert len(asked) == 2 and len(volume.bad) == 2  # the one that is known: its place, and a strike
    for _ in range(60):
        box.step(0.1)
    assert len(asked) == 3 and 5.0 <= asked[2] - asked[nth - 1] <= 5.5
    assert len(volume.bad) == 4
    box.check()


def test_a_file_that_was_removed_is_found_out_once_the_folder_can_be_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path, segments=8, dram_blocks=24, after_s=0.0)
    two_segments(box)
    ledger = box.store._core.ledger
    first = min(ledger.spaces[0].segments)
    box.device.unlink(box.store._core.volumes[0].files.path(first))
    asked = failing(box, monkeypatch, 1, 2, 3)
    box.writer._missing.suspect(ledger.spaces[0].segments[first])
    for _ in range(140):
        box.step(0.1)
    assert box.store.match(ONE).blocks == 1, "nothing is known, and nothing was done"
    for _ in range(20):
        box.step(0.1)
    assert len(asked) == 4
    assert (box.store.match(ONE).blocks, box.store.match(TWO).blocks) == (0, 1)
    assert first not in ledger.spaces[0].segments
    box.check()
