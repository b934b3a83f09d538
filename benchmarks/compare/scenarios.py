"""The faults, the same for both sides: each is done to files, mounts or reads, never to a side's own code.

A side says how to open, fill, read and close a cache of 2 MiB blocks; a scenario breaks something below it and writes
down what a caller sees, as one line of JSON each. Every byte that a side hands out is compared with what was put.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MiB = 1 << 20
BLOCK_NBYTES = 2 * MiB
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16  # bfloat16: 2 MiB a block
PAGE = 4096

RIGHT, WRONG, MISS = "hit, right", "hit, WRONG", "miss"
_DATA = (".seg", ".pt", ".data", ".tmp")


class Side(Protocol):
    """A cache in a folder. `ids` are a run of one document: 1000 x document + number of the block in it."""

    name: str
    folder: Path

    def __init__(self, kind: str, folder: Path, *, memory_nbytes: int, disk_nbytes: int) -> None: ...

    def put(self, ids: Sequence[int]) -> list[str]:
        """Store blocks; for each "taken", or what a caller is told instead."""

    def settle(self, limit_s: float) -> None:
        """Wait until all is on the drive, or nothing more comes, and let memory go: the next read is the drive's."""

    def get(self, ids: Sequence[int], deadline_s: float | None = None) -> list[np.ndarray | str]:
        """Read blocks in one request; for each its bytes, or what a caller is told instead."""

    def place(self, number: int) -> tuple[Path, int]:
        """File of a block, and where in it the block's middle lies."""

    def notes(self) -> dict[str, Any]:
        """What the side itself says about its state."""

    def close(self) -> None: ...


def content(number: int) -> np.ndarray:
    """What the block `number` holds."""
    return np.frombuffer(np.random.default_rng(number).bytes(BLOCK_NBYTES), np.uint8)


def run_of(document: int, blocks: int) -> list[int]:
    return [1000 * document + index for index in range(blocks)]


def judge(number: int, got: np.ndarray | str) -> str:
    if isinstance(got, str):
        return got
    return RIGHT if np.array_equal(got, content(number)) else WRONG


def whose(got: np.ndarray | str, number: int, others: Sequence[int]) -> dict[str, int]:
    """Of a wrong hit, how many of its 4 KiB pages are wrong, and how many of those belong to another block."""
    if isinstance(got, str):
        return {}
    pages, want = got.reshape(-1, PAGE), content(number).reshape(-1, PAGE)
    wrong = (pages != want).any(axis=1)
    foreign = np.zeros_like(wrong)
    for other in others:
        if other != number:
            foreign |= wrong & (pages == content(other).reshape(-1, PAGE)).all(axis=1)
    return {"wrong_pages": int(wrong.sum()), "pages_of_another_block": int(foreign.sum())}


def within(limit_s: float, work: Callable[[], Any]) -> tuple[str, Any]:
    """("done", value), ("error", text) or ("hang", None) after `limit_s`; a hanging thread is left behind."""
    box: list[tuple[str, Any]] = []

    def run() -> None:
        try:
            box.append(("done", work()))
        except BaseException as error:  # noqa: BLE001 - this is what a caller sees
            box.append(("error", f"{type(error).__name__}: {str(error)[:160]}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return box[0] if box else ("hang", None)


def read(side: Side, ids: Sequence[int], limit_s: float = 20.0) -> tuple[list[str], list[np.ndarray | str]]:
    how, value = within(limit_s, lambda: side.get(ids))
    if how != "done":
        value = ["hang" if how == "hang" else f"exception {value}"] * len(ids)
    return [judge(number, got) for number, got in zip(ids, value, strict=True)], value


def write(side: Side, ids: Sequence[int], limit_s: float = 20.0) -> list[str]:
    how, value = within(limit_s, lambda: side.put(ids))
    return value if how == "done" else ["hang" if how == "hang" else f"exception {value}"] * len(ids)


def tally(words: Sequence[str]) -> dict[str, int]:
    return dict(collections.Counter(words))


def taken_nbytes(folder: Path) -> int:
    """What all files below `folder` take of the drive."""
    return sum(each.lstat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


def mib(nbytes: float) -> float:
    return round(nbytes / MiB, 1)


# -- the faults --------------------------------------------------------------------------------------------------------


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(data)


def _flip(path: Path, at: int) -> None:
    with path.open("rb") as file:
        file.seek(at)
        byte = file.read(1)[0]
    _overwrite(path, at, bytes([byte ^ 8]))


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "truncated in the block": lambda path, at: os.truncate(path, at),
    "truncated to nothing": lambda path, _: os.truncate(path, 0),
    "one bit flipped": _flip,
    "4 KiB zeroed": lambda path, at: _overwrite(path, at, bytes(PAGE)),
    "4 KiB overwritten": lambda path, at: _overwrite(path, at, np.random.default_rng(2**40).bytes(PAGE)),
    "file deleted": lambda path, _: path.unlink(),
}


class Bench:
    """Makes sides of one kind in fresh folders, and writes down what was seen."""

    def __init__(self, make: type[Side], kind: str, base: Path) -> None:
        self.make, self.kind, self.base = make, kind, base

    def fresh(self, name: str) -> Path:
        folder = self.base / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def open(self, folder: Path, *, memory: int = 128 * MiB, disk: int = 512 * MiB) -> Side:
        return self.make(self.kind, folder, memory_nbytes=memory, disk_nbytes=disk)

    def say(self, scenario: str, **what: Any) -> None:
        print(json.dumps({"side": self.kind, "scenario": scenario, **what}), flush=True)


def damage(bench: Bench) -> None:
    """A file of the cache is damaged, below a running process or between two; then the document is read at once."""
    ids = run_of(0, 8)
    for fault, do in DAMAGE.items():
        for when in ("running", "restarted"):
            folder = bench.fresh("damage")
            side = bench.open(folder)
            write(side, ids)
            side.settle(20.0)
            path, middle = side.place(3)
            if when == "restarted":
                side.close()
            do(path, middle)
            if when == "restarted":
                side = bench.open(folder)
            words, values = read(side, ids)
            alone, _ = read(side, ids[3:4])
            again = write(side, ids)
            side.settle(5.0)
            restored, _ = read(side, ids)
            bench.say(
                "damage",
                fault=fault,
                when=when,
                block=words[3],
                **(whose(values[3], 3, ids) if words[3] == WRONG else {}),
                others=tally(words[:3] + words[4:]),
                second_read=alone[0],
                put_again=tally(again),
                read_after_put_again=tally(restored),
            )
            within(10.0, side.close)


def restart(bench: Bench) -> None:
    """A small cap, and process after process: each puts 80 MiB of its own and ends; what lies on the drive then?"""
    folder, cap = bench.fresh("restart"), 128 * MiB
    for how in ("close", "kill"):
        shutil.rmtree(folder, ignore_errors=True)
        for turn in range(5):
            command = [sys.executable, sys.argv[0], bench.kind, "_generation", "--dir", str(bench.base)]
            done = subprocess.run(
                [*command, "--arguments", json.dumps([str(folder), cap, turn, how])],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120, check=False,
            )  # fmt: skip
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            seen = lines[-1] if lines else {"exit_status": done.returncode}
            bench.say("restart", ended_by=how, turn=turn, cap_mib=mib(cap), drive_mib=mib(taken_nbytes(folder)), **seen)
    shutil.rmtree(folder, ignore_errors=True)


def _generation(bench: Bench, folder: str, cap: int, turn: int, how: str) -> None:
    side = bench.open(Path(folder), memory=128 * MiB, disk=cap)
    found: dict[str, int] | None = None
    if turn:
        words = [word for document in range(5) for word in read(side, run_of(turn * 10 - 10 + document, 8))[0]]
        found = tally(words)
    for document in range(5):
        write(side, run_of(turn * 10 + document, 8))
    side.settle(6.0)
    print(json.dumps({"of_40_blocks_of_the_turn_before": found, **side.notes()}), flush=True)
    if how == "kill":
        os.kill(os.getpid(), 9)
    within(30.0, side.close)


@contextlib.contextmanager
def _tmpfs(folder: Path, nbytes: int) -> Iterator[Callable[[int], None]]:
    folder.mkdir(parents=True, exist_ok=True)

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    mount(f"size={nbytes}")
    try:
        yield lambda more: mount(f"remount,size={more}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full(bench: Bench) -> None:
    """A drive of 96 MiB under a cap of 256 MiB: 128 MiB are put. Then the drive grows."""
    drive = bench.fresh("full")
    documents = [run_of(document, 8) for document in range(8)]
    ids = [number for document in documents for number in document]
    with _tmpfs(drive, 96 * MiB) as resize:
        side = bench.open(drive / "kv", memory=48 * MiB, disk=256 * MiB)
        start_s = time.monotonic()
        told: list[str] = []
        for document in documents:
            told += write(side, document, 15.0)
            if "hang" in told:
                told += ["not tried"] * (len(ids) - len(told))
                break
            time.sleep(1.5)  # the drive is to be short of room, not the memory
        put_s = time.monotonic() - start_s
        how, _ = within(15.0, lambda: side.settle(8.0))
        before = side.notes()
        words: list[str] = []
        for document in documents:
            words += read(side, document, 10.0)[0]
        files = [each.lstat().st_size for each in (drive / "kv").rglob("*") if each.suffix in _DATA]
        bench.say(
            "full",
            told=tally(told),
            put_s=round(put_s, 1),
            settled=how,
            read=tally(words),
            taken_and_gone=sum(one == "taken" and two != RIGHT for one, two in zip(told, words, strict=True)),
            drive_mib=mib(taken_nbytes(drive)),
            files=len(files),
            files_shorter_than_a_block=sum(nbytes < BLOCK_NBYTES for nbytes in files),
            before_reading=before,
            after_reading=side.notes(),
        )
        resize(512 * MiB)
        time.sleep(8.0)
        late = run_of(50, 8)
        told = write(side, late, 15.0)
        how, _ = within(15.0, lambda: side.settle(8.0))
        lost = [number for number, word in zip(ids, words, strict=True) if word != RIGHT][:4]
        again = write(side, lost, 15.0)
        within(15.0, lambda: side.settle(8.0))
        bench.say(
            "full, then room again",
            told=tally(told),
            settled=how,
            read=tally(read(side, late)[0]),
            lost_put_again=tally(again),
            lost_read=tally(read(side, lost)[0]),
        )
        how, _ = within(20.0, side.close)
        if how == "done":
            side = bench.open(drive / "kv", memory=48 * MiB, disk=256 * MiB)
            words = [word for document in documents for word in read(side, document, 10.0)[0]]
            bench.say("full, then restarted", read=tally(words), late=tally(read(side, late)[0]))
        else:
            bench.say("full, then restarted", close=how)


def burst(bench: Bench) -> None:
    """32 documents of 16 blocks, 1 GiB in all, as fast as they are taken, into 256 MiB of memory; a drive with room."""
    documents = [run_of(document, 16) for document in range(32)]
    side = bench.open(bench.fresh("burst"), memory=256 * MiB, disk=4096 * MiB)
    told: list[str] = []
    spent_s = longest_s = 0.0
    for document in documents:
        for number in document:
            content_of(number)  # made before the clock runs
        start_s = time.monotonic()
        told += write(side, document, 60.0)
        took_s = time.monotonic() - start_s
        content_of.cache_clear()
        spent_s, longest_s = spent_s + took_s, max(longest_s, took_s)
    side.settle(60.0)
    words: list[str] = []
    for document in documents:
        for number in document:  # one by one: a gap must not hide what is behind it
            words += read(side, [number])[0]
    bench.say(
        "burst",
        blocks=len(told),
        told=tally(told),
        put_s=round(spent_s, 2),
        longest_put_of_16_s=round(longest_s, 2),
        read=tally(words),
        taken_and_gone=sum(one == "taken" and two != RIGHT for one, two in zip(told, words, strict=True)),
        drive_mib=mib(taken_nbytes(side.folder)),
    )
    within(30.0, side.close)
    shutil.rmtree(side.folder, ignore_errors=True)


@functools.lru_cache(64)
def content_of(number: int) -> np.ndarray:
    """`content`, kept for a moment."""
    return content(number)


def two(bench: Bench) -> None:
    """A second process opens the folder that the first has open, and puts documents of its own."""
    folder, cap = bench.fresh("two"), 128 * MiB
    mine = [run_of(document, 10) for document in range(3)]
    side = bench.open(folder, disk=cap)
    for document in mine:
        write(side, document)
    side.settle(20.0)
    before = [word for document in mine for word in read(side, document)[0]]
    command = [sys.executable, sys.argv[0], bench.kind, "_second", "--dir", str(bench.base)]
    done = subprocess.run(
        [*command, "--arguments", json.dumps([str(folder), cap])],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    within(20.0, lambda: side.settle(5.0))
    after = [word for document in mine for word in read(side, document)[0]]
    bench.say(
        "two",
        first_before=tally(before),
        second=lines[-1] if lines else {"exit_status": done.returncode},
        first_after=tally(after),
        cap_mib=mib(cap),
        drive_mib=mib(taken_nbytes(folder)),
    )
    within(10.0, side.close)


def _second(bench: Bench, folder: str, cap: int) -> None:
    how, side = within(30.0, lambda: bench.open(Path(folder), disk=cap))
    if how != "done":
        print(json.dumps({"open": side or how}), flush=True)
        return
    theirs = [word for document in range(3) for word in read(side, run_of(document, 10))[0]]
    for document in range(4):
        write(side, run_of(100 + document, 10))
    side.settle(6.0)
    ours = [word for document in range(4) for word in read(side, run_of(100 + document, 10))[0]]
    print(json.dumps({"open": "ok", "reads_of_the_firsts": tally(theirs), "own": tally(ours)}), flush=True)
    within(10.0, side.close)


def short_of_memory(bench: Bench) -> None:
    """A request for 16 blocks (32 MiB) with 20 MiB of memory behind it: which blocks does the caller get?"""
    folder, ids = bench.fresh("short"), run_of(0, 16)
    side = bench.open(folder, memory=20 * MiB)
    for start in range(0, 16, 4):
        write(side, ids[start : start + 4])
        within(20.0, lambda: side.settle(10.0))
    words, _ = read(side, ids, 15.0)
    after, _ = read(side, ids[:2], 10.0)
    bench.say("short of memory", read=tally(words), next_request=tally(after))
    within(10.0, side.close)


def hang(bench: Bench) -> None:
    """The drive stops answering reads for 6 s while a document is read (needs hang_reads.so preloaded)."""
    switch = Path(os.environ["HANG_WHILE"])
    switch.unlink(missing_ok=True)
    ids, other = run_of(0, 4), run_of(1, 4)
    side = bench.open(bench.fresh("hang"))
    write(side, ids)
    write(side, other)
    side.settle(20.0)
    switch.touch()
    start_s = time.monotonic()
    back: dict[str, float] = {}

    def ask() -> list[np.ndarray | str]:
        got = side.get(ids, deadline_s=1.0)
        back["after_s"] = round(time.monotonic() - start_s, 2)
        return got

    how, value = within(3.0, ask)
    seen = tally([judge(a, b) for a, b in zip(ids, value, strict=True)]) if how == "done" else {value or how: 4}
    put_s = time.monotonic()
    told = write(side, run_of(2, 2), 2.0)
    put_s = time.monotonic() - put_s
    time.sleep(max(0.0, start_s + 6.0 - time.monotonic()))
    switch.unlink()
    time.sleep(1.0)
    bench.say(
        "hang",
        deadline_s=1.0,
        caller_back_after_s=back.get("after_s"),
        seen=seen if how != "hang" else {"still waiting after 3 s": 4},
        put_meanwhile=tally(told),
        put_meanwhile_s=round(put_s, 2),
        read_when_it_is_back=tally(read(side, ids)[0]),
        other_document_then=tally(read(side, other)[0]),
    )
    within(10.0, side.close)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "damage": damage, "restart": restart, "full": full, "burst": burst, "two": two, "short": short_of_memory,
    "hang": hang,
}  # fmt: skip


def main(make: type[Side], kinds: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("scenario")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--arguments", default="[]")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(make, given.kind, given.dir.resolve() / given.kind)
    inner = {"_generation": _generation, "_second": _second}
    if given.scenario in inner:
        inner[given.scenario](bench, *json.loads(given.arguments))
    else:
        SCENARIOS[given.scenario](bench)
    sys.stdout.flush()
    os._exit(0)  # threads that hang must not hold the end up
