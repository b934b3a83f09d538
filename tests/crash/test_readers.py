"""Processes that read a partition while its writer puts, reclaims, dies by kill -9 and comes back."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.crash.kit import MiB, chain_of, child, ended, until

from kvterrace import open_store

#: How many segments are made, and so reclaimed, while the readers read.
_SEGMENTS = int(os.environ.get("KVTERRACE_RECLAIMS", "200"))
_CAP = 2 * MiB


def _newest_segments(folders: list[Path]) -> int:
    """Segments ever made: they are numbered."""
    return sum(
        max((int(path.stem, 16) for path in (folder / "partitions" / "main").glob("*.seg")), default=0)
        for folder in folders
    )


def _said(reader: subprocess.Popen[str]) -> list[str]:
    assert reader.stdout is not None
    return reader.stdout.readline().split()


def _tell(reader: subprocess.Popen[str]) -> None:
    assert reader.stdin is not None
    reader.stdin.write("go on\n")
    reader.stdin.flush()


@pytest.mark.parametrize("drives", [1, 2])
def test_two_readers_beside_a_writer_that_dies_again_and_again(tmp_path: Path, drives: int) -> None:
    rng = random.Random(4)
    folders = [tmp_path / f"kv{number}" for number in range(drives)]
    paths, note = os.pathsep.join(map(str, folders)), tmp_path / "newest"
    writer = child("churn", paths, _CAP * drives, 1, note)
    until(note.exists)
    readers = [child("reads", paths, note, seed) for seed in range(2)]
    for reader in readers:
        assert _said(reader) == ["open"], ended(reader)
    made = 0
    while made < _SEGMENTS // drives:
        time.sleep(rng.uniform(1.0, 4.0))
        made = max(made, _newest_segments(folders))
        writer.kill()
        assert ended(writer)[0] == -9
        first = int.from_bytes(note.read_bytes(), "little") + 1
        writer = child("churn", paths, _CAP * drives, first, note)
        assert all(reader.poll() is None for reader in readers), [ended(reader) for reader in readers]
    writer.kill()
    ended(writer)
    with open_store(folders, read_only=True, dram_bytes=MiB) as fresh:
        there = fresh.match(chain_of(0, 4)).blocks
    # of several drives, one that is slow to write what another carries over is waited for no longer than a second
    assert there == 4 if drives == 1 else there >= 1
    time.sleep(2.5)  # two looks, and then some
    for reader in readers:
        _tell(reader)
        words = _said(reader)
        assert words[:1] == ["hits"], ended(reader)
        assert int(words[1]) > 1000 and int(words[3]) > 100, f"too little was read to say anything: {words}"
        # it may hold more: what it has in DRAM
        assert there <= int(words[5]) <= 4, "a reader that was there all the time has lost what one that is new finds"
    time.sleep(2.5)
    for reader in readers:
        _tell(reader)
        assert _said(reader) == ["deleted", "0"]
        assert _said(reader) == ["closed", "True"]
        assert ended(reader)[0] == 0
