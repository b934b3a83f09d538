"""What every side of the speed comparison has in common: its memory, its clocks, and the commands it answers.

A side is a child process. It makes its memory once, faulted in, then answers one command on each line of stdin with one
line of JSON on stdout:

    store     a fresh cache; timed: the caller's buffer -> the cache -> durable on the drive
    restore   timed: what the last store wrote, drive -> the caller's buffer, with nothing of it in memory
    dram_put  a fresh cache; timed: the caller's buffer -> the cache's memory
    dram_get  timed: the cache's memory -> the caller's buffer
    quit

Before the clock runs: opening, dropping of the page cache, waiting for writeback. After it was stopped: every byte that
came back is compared with what was put; a store is read back for that. What differs ends the process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

BLOCK_NBYTES = 2 << 20
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16  # bfloat16: 2 MiB a block
GIB = 1 << 30

Bytes = np.ndarray


class SpeedSide(Protocol):
    """A cache of `blocks` blocks under `folder`. `memory` is shaped (blocks, BLOCK_NBYTES)."""

    #: What was driven, for the record: version and settings.
    facts: dict[str, Any]
    #: Processes that serve the cache besides this one.
    helpers: list[int]

    def fresh(self) -> None:
        """Forget everything; the next `store` and `dram_put` find an empty cache that is ready."""

    def store(self, memory: Bytes) -> None:
        """Put all blocks; back when they are durable on the drive."""

    def cool(self) -> None:
        """Let go of what is in the cache's own memory, and keep what is on the drive."""

    def restore(self, memory: Bytes) -> None:
        """Fill all of `memory` from the drive."""

    def dram_put(self, memory: Bytes) -> None:
        """Put all blocks; back when the caller may change its memory."""

    def dram_get(self, memory: Bytes) -> None:
        """Fill all of `memory` from the cache's own memory."""

    def close(self) -> None: ...


def prefaulted(blocks: int) -> Bytes:
    """(blocks, BLOCK_NBYTES) on a huge page's boundary, every page written."""
    raw = np.empty(blocks * BLOCK_NBYTES + (2 << 20), np.uint8)
    start = -raw.ctypes.data % (2 << 20)
    memory = raw[start : start + blocks * BLOCK_NBYTES].reshape(blocks, BLOCK_NBYTES)
    memory[:] = 0
    return memory


def sync_drive(folder: Path) -> None:
    """syncfs: everything that was written on this file system is durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    finally:
        os.close(fd)


def drop_page_cache(folder: Path) -> None:
    """Needs root. For all sides, also those that read past it: the state of the machine is the same."""
    sync_drive(folder)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def cpu_s(helpers: list[int]) -> float:
    """CPU seconds, user and system, of all threads of this process and of `helpers`."""
    # The CPU clock of another process, as pthread_getcpuclockid(3) makes it: ~pid << 3, and 2 for the scheduler's.
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in helpers)


class Serving:
    """One side at work."""

    def __init__(self, side: SpeedSide, folder: Path, blocks: int) -> None:
        self._side, self._folder = side, folder
        self._source, self._target = prefaulted(blocks), prefaulted(blocks)
        words = self._source.view(np.uint64)
        words[:] = np.random.default_rng().integers(0, 2**64, words.shape, np.uint64)

    def answer(self, command: str) -> dict[str, Any]:
        side = self._side
        if command not in {"store", "restore", "dram_put", "dram_get"}:
            raise SystemExit(f"no such command: {command!r}")
        if command in {"store", "dram_put"}:
            self._source.view(np.uint64)[:] += np.uint64(0x9E3779B97F4A7C15)  # no earlier round's bytes can pass
            side.fresh()
            timed = side.store if command == "store" else side.dram_put
            told = self._timed(timed, self._source)
            if command == "store":
                side.cool()
                self._target[:] = 0
                side.restore(self._target)
            else:
                side.dram_get(self._target)
        else:
            self._target[:] = 0
            if command == "restore":
                side.cool()
            told = self._timed(side.restore if command == "restore" else side.dram_get, self._target)
        for number, (want, got) in enumerate(zip(self._source, self._target, strict=True)):
            if not np.array_equal(want, got):
                raise SystemExit(f"{command}: block {number} differs from what was put: no result")
        return told | {"nbytes": self._source.nbytes, "verified": self._target.nbytes}

    def _timed(self, work: Callable[[Bytes], None], memory: Bytes) -> dict[str, Any]:
        drop_page_cache(self._folder)
        began_cpu_s, began_s = cpu_s(self._side.helpers), time.perf_counter()
        work(memory)
        wall_s = time.perf_counter() - began_s
        return {"wall_s": wall_s, "cpu_s": cpu_s(self._side.helpers) - began_cpu_s}


def serve(make: Callable[[str, Path, int], SpeedSide], kinds: list[str]) -> None:
    """`SIDE.py KIND --dir DIR --blocks N`: commands until "quit" or the end of stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    given = parser.parse_args()
    answers = _answers()
    folder = given.dir.resolve() / given.kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    status = 1
    try:
        side = make(given.kind, folder, given.blocks)
        serving = Serving(side, folder, given.blocks)
        print(json.dumps({"facts": side.facts}), file=answers, flush=True)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            print(json.dumps(serving.answer(line.strip())), file=answers, flush=True)
        side.close()
        status = 0
    except BaseException:  # noqa: BLE001 - said, then the process ends
        traceback.print_exc()
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(status)  # a peer's threads must not hold the end up


def _answers() -> TextIO:
    """The old stdout; what the peers print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
