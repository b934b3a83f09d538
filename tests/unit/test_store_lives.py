"""What a process has left of the stores that it had (C23), and of a read that hangs over the end of one (C24)."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, bytes_of, chain_of, checked, opened, stored, until

from kvterrace.types import Expired

#: Of a store below: what it takes of DRAM. One that stays behind shows at once.
DRAM_NBYTES = 256 << 10


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left(kind: str) -> int:
    gc.collect()
    return sum(1 for _ in Path(f"/proc/self/{kind}").iterdir())


@pytest.mark.parametrize(("ssd", "lives"), [(False, 2000), (True, 200)])
def test_memory_returns_to_its_start_over_thousands_of_stores(tmp_path: Path, ssd: bool, lives: int) -> None:
    """After a tenth of them, all others together may take 16 MiB more: less than half of the arenas of the fewest."""

    def life(number: int) -> None:
        path = tmp_path / "kv" if ssd else None
        with opened(path, dram_bytes=DRAM_NBYTES, ssd_bytes=MiB, write_behind_s=60.0) as store:
            stored(store, chain_of(number % 50, 3))
            checked(store, chain_of(number % 7, 3))

    for number in range(lives // 10):
        life(number)
    fds, threads, start_nbytes = left("fd"), left("task"), resident_nbytes()
    for number in range(lives // 10, lives):
        life(number)
    until(lambda: (left("fd"), left("task")) <= (fds, threads))
    assert resident_nbytes() <= start_nbytes + 16 * MiB


@pytest.mark.parametrize("layers", [None, range(1)])
def test_a_read_that_hangs_over_the_close_touches_nothing_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: range | None
) -> None:
    """Its slot stays mapped until it has ended, and goes back then; the caller's memory is as it was."""
    chain = chain_of(0, 4)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
    store = opened(tmp_path / "kv")
    arena = store._core.arena
    assert arena._bytes is not None
    alive = weakref.ref(arena._bytes)
    go_on, begun = threading.Event(), threading.Event()
    landed: list[bytes] = []
    preadv = os.preadv

    def hanging(fd: int, buffers: list[Any], offset: int) -> int:
        begun.set()
        go_on.wait()
        moved = preadv(fd, buffers, offset)
        landed.extend(bytes(buffer) for buffer in buffers)
        return moved

    nbytes = LAYOUT.block_nbytes * 4 // (2 if layers else 1)
    memory = bytearray(b"\xee" * (nbytes + 2 * 4096))  # guards before and behind
    monkeypatch.setattr(os, "preadv", hanging)
    try:
        transfer = store.get(chain, memoryview(memory)[4096:-4096], layers=layers)
        assert begun.wait(60.0)
        assert not store.close(0.3)
        assert transfer.outcomes == [Expired()] * 4
        threads = list(store._engine._threads)  # type: ignore[attr-defined]
        directory = store._drives[0][0]
        del store, arena
        gc.collect()
        assert alive() is not None
        memory[:] = b"\xdd" * len(memory)  # the caller has it back, and uses it
    finally:
        go_on.set()
    until(lambda: all(not one.is_alive() for one in threads))
    assert sum(map(len, landed)) > LAYOUT.block_nbytes // 2  # it did come, and wrote
    assert any(bytes_of(chain)[:512] in one for one in landed)
    assert memory == b"\xdd" * len(memory)
    directory.close()
    threads.clear()
    landed.clear()
    until(lambda: gc.collect() >= 0 and alive() is None)
    monkeypatch.undo()
    with opened(tmp_path / "kv") as again:
        all_hits(again, chain)
