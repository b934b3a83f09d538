"""The DRAM arena."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvterrace.errors import ConfigError, StoreClosedError
from kvterrace.tiers import memory as memory_module
from kvterrace.tiers.memory import Arena

PAGE = mmap.PAGESIZE


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_views_are_aligned_zeroed_writable_and_share_the_memory() -> None:
    arena = Arena(8 << 20)
    assert arena.nbytes == 8 << 20
    one, same = arena.view(PAGE, 2 * PAGE), arena.view(0, arena.nbytes)
    assert one.dtype == np.uint8
    assert one.ctypes.data % PAGE == 0
    assert not same.any()
    one[:] = 5
    assert (same[PAGE : 3 * PAGE] == 5).all()
    assert int(same.astype(np.int64).sum()) == 5 * 2 * PAGE
    arena.close()


@pytest.mark.parametrize("populate", [23, 0xDEAD])
def test_it_is_faulted_in_when_made(populate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", populate)  # 0xDEAD: as on a kernel that has none
    monkeypatch.setattr(memory_module, "_POPULATE_NBYTES", 16 << 20)
    before = resident_nbytes()
    arena = Arena(64 << 20)
    assert resident_nbytes() - before >= 60 << 20
    arena.close()


def test_memory_stays_while_a_view_lives_and_then_goes() -> None:
    arena = Arena(64 << 20)
    view = arena.view(PAGE, PAGE)
    view[:] = 3
    before = resident_nbytes()
    arena.close()
    arena.close()
    assert (view == 3).all()
    with pytest.raises(StoreClosedError):
        arena.view(0, PAGE)
    del view
    gc.collect()
    assert before - resident_nbytes() >= 60 << 20


@pytest.mark.parametrize(("offset", "nbytes"), [(1, PAGE), (-PAGE, PAGE), (0, 2 * PAGE), (PAGE, 1), (0, -1)])
def test_a_bad_range_is_a_bug(offset: int, nbytes: int) -> None:
    arena = Arena(PAGE)
    with pytest.raises(AssertionError):
        arena.view(offset, nbytes)
    arena.close()


@pytest.mark.parametrize("nbytes", [0, -PAGE, PAGE + 1])
def test_a_senseless_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        Arena(nbytes)


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="lower the DRAM size"):
        Arena(1 << 50)
    monkeypatch.setattr(os, "sysconf", lambda _: 1 << 60)  # so that the kernel has to say no
    with pytest.raises(ConfigError, match="lower the DRAM size"):
        Arena(1 << 50)
