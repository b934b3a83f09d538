"""kill -9 at any moment: what a flush has covered is there, nothing is wrong, and the partition is free again.

KVTERRACE_KILL_ROUNDS sets how often; more for a night.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.crash.kit import MiB, all_hits, chain_of, checked, child, ended, opened, stored, taken_nbytes

from kvterrace import Hit

_ROUNDS = int(os.environ.get("KVTERRACE_KILL_ROUNDS", "25"))
#: Room for all that so many rounds put, so that nothing is missing because it made room for others.
_ROOM = 256 * MiB * -(-_ROUNDS // 25)


def _said(out: str, word: str) -> list[int]:
    """The numbers behind `word` in whole lines."""
    lines = [line.split() for line in out[: out.rfind("\n") + 1].splitlines()]
    return [int(line[1]) for line in lines if line[0] == word]


def _folders(tmp_path: Path, drives: int) -> list[Path]:
    return [tmp_path / f"kv{number}" for number in range(drives)]


def _argument(folders: list[Path]) -> str:
    return os.pathsep.join(map(str, folders))


@pytest.mark.parametrize("drives", [1, 2])
def test_killed_while_it_puts_and_flushes(tmp_path: Path, drives: int) -> None:
    rng = random.Random(1)
    folders = _folders(tmp_path, drives)
    first = 0
    durable: set[int] = set()
    rounds = _ROUNDS // drives
    for turn in range(rounds):
        process = child("loop", _argument(folders), _ROOM, first)
        assert process.stdout is not None and process.stdout.readline() == "open\n", ended(process)
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        code, out, err = ended(process)
        assert code == -9, err
        flushed = _said(out, "flushed")
        tried = max(_said(out, "put"), default=first - 1) + 1
        durable.update(range(first, max(flushed, default=first - 1) + 1))
        with opened(folders, ssd_bytes=_ROOM) as store:
            for number in range(first if turn < rounds - 1 else 0, tried + 1):
                chain = chain_of(number, 1 + number % 7)
                outcomes = checked(store, chain)
                if number in durable:
                    assert all(isinstance(one, Hit) for one in outcomes), f"{number} was flushed: {outcomes}"
                elif all(isinstance(one, Hit) for one in outcomes):
                    durable.add(number)
            assert store.stats().get_corrupt_blocks == 0
        first = tried


@pytest.mark.parametrize("drives", [1, 2])
def test_killed_while_it_reclaims(tmp_path: Path, drives: int) -> None:
    rng = random.Random(2)
    folders = _folders(tmp_path, drives)
    cap, first = 2 * MiB, 0
    for _ in range(max(4, _ROUNDS // 3 // drives)):
        process = child("loop", _argument(folders), cap, first)
        assert process.stdout is not None and process.stdout.readline() == "open\n", ended(process)
        time.sleep(rng.uniform(0.1, 0.5))
        process.kill()
        code, out, err = ended(process)
        assert code == -9, err
        assert all(taken_nbytes(folder) <= cap // drives for folder in folders)
        last = max(_said(out, "put"), default=first)
        with opened(folders, ssd_bytes=cap) as store:
            for number in range(max(0, last - 200), last + 2):
                checked(store, chain_of(number, 1 + number % 7))
            assert store.stats().get_corrupt_blocks == store.stats().get_failed_blocks == 0
            fresh = chain_of(10**9 + first, 5)
            stored(store, fresh)
            assert store.flush()
            all_hits(store, fresh)
            assert all(taken_nbytes(folder) <= cap // drives for folder in folders)
        first = last + 1
    with opened(folders, ssd_bytes=cap) as store:
        assert store.stats().ssd_live_nbytes > cap // 4


@pytest.mark.parametrize("drives", [1, 2])
def test_killed_while_it_invalidates(tmp_path: Path, drives: int) -> None:
    rng = random.Random(4)
    folders = _folders(tmp_path, drives)
    cap, first = 2 * MiB * drives, 0
    gone: list[int] = []
    rounds = 0
    while rounds < max(5, _ROUNDS // 4) or len(gone) <= 20:  # a busy machine gets little done in a round
        rounds += 1
        process = child("invalidates", _argument(folders), cap, first)
        assert process.stdout is not None and process.stdout.readline() == "open\n", ended(process)
        time.sleep(rng.uniform(0.05, 0.4))
        process.kill()
        code, out, err = ended(process)
        assert code == -9, err
        gone += _said(out, "gone")
        for _ in range(2):  # what one start has found to be dead stays dead for the next
            with opened(folders, ssd_bytes=cap) as store:
                for number in gone:
                    assert store.match(chain_of(number, 6)).blocks <= 1, f"{number} is back"
                for number in gone[-20:]:
                    checked(store, chain_of(number, 6))
                assert store.stats().get_corrupt_blocks == 0
        first = max(_said(out, "put"), default=first) + 1


@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("moment", ["opening", "closing"])
def test_killed_while_it_opens_or_closes(tmp_path: Path, moment: str, drives: int) -> None:
    rng = random.Random(moment)
    folders = _folders(tmp_path, drives)
    with opened(folders) as store:
        stored(store, chain_of(0, 40))
    for turn in range(max(4, _ROUNDS // 3 // drives)):
        process = child("reopen", _argument(folders))
        assert process.stdout is not None
        for _ in range(1 + turn % 3):
            while (line := process.stdout.readline()).strip() != moment:
                assert line, ended(process)
        time.sleep(rng.uniform(0.0, 0.01))
        process.kill()
        ended(process)
        with opened(folders) as store:
            all_hits(store, chain_of(0, 40))
            assert store.stats().get_corrupt_blocks == 0


@pytest.mark.parametrize("drives", [1, 2])
def test_killed_while_it_makes_the_store(tmp_path: Path, drives: int) -> None:
    rng = random.Random(3)
    for turn in range(max(4, _ROUNDS // 3 // drives)):
        path = _folders(tmp_path / str(turn), drives)
        process = child("reopen", _argument(path))
        assert process.stdout is not None and process.stdout.readline() == "opening\n"
        time.sleep(rng.uniform(0.0, 0.004))
        process.kill()
        ended(process)
        with opened(path) as store:
            stored(store, chain_of(0, 4))
        with opened(path) as store:
            all_hits(store, chain_of(0, 4))


@pytest.mark.parametrize("left", [[], [".store.json.123"], ["lost+found"]])
def test_half_made_stores_are_made_anew(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "kv").mkdir()
    for name in left:
        if name.startswith("."):
            (tmp_path / "kv" / name).write_bytes(b'{"format')
        else:
            (tmp_path / "kv" / name).mkdir()
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 4))


def test_a_flush_covers_what_came_before_it_while_others_put(tmp_path: Path) -> None:
    code, out, err = ended(child("grow", tmp_path / "kv"))
    assert code == -9, err
    assert out.splitlines() == [f"flushed {number} True" for number in range(20)]
    with opened(tmp_path / "kv", ssd_bytes=256 * MiB) as store:
        for number in range(20):
            all_hits(store, chain_of(number, 2))
