"""More files than descriptors: what is open to the store need not be open to the process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvterrace.io.descriptors import Descriptors, PosixFile

_STORE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
import numpy as np
from kvterrace import Hit, KVLayout, Namespace, chain_keys, open_store
layout = KVLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_tokens=64)
namespace = Namespace("m", layout)
chain = chain_keys(namespace, range(64 * 45))
data = np.random.default_rng(1).integers(0, 256, (45, layout.block_nbytes), np.uint8)
for at in range(45):  # each of these leaves a segment of one record
    with open_store(sys.argv[1], dram_bytes="4MiB", ssd_bytes="64MiB", sigterm_flush=False) as store:
        stored = store.wait(store.put(chain, data[at : at + 1], start=at, stop=at + 1))
        assert "Stored" in repr(stored), stored
        assert store.flush()
        store._mover.writers.each[0].seal_open()
with open_store(sys.argv[1], dram_bytes="4MiB", ssd_bytes="64MiB", sigterm_flush=False) as store:
    out = np.zeros_like(data)
    assert all(isinstance(one, Hit) for one in store.wait(store.get(chain, out)))
    assert (out == data).all()
    print(store.stats().ssd_segments)
"""


def _file(folder: Path, number: int, descriptors: Descriptors) -> PosixFile:
    path = folder / str(number)
    path.write_bytes(bytes([number]) * 4096)
    return PosixFile(path, os.O_RDONLY, descriptors)


def _is(fd: int, path: Path) -> bool:
    return os.fstat(fd).st_ino == path.stat().st_ino


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_only_so_many_descriptors_are_kept(tmp_path: Path) -> None:
    descriptors = Descriptors(most=8)
    before = _open_descriptors()
    files = [_file(tmp_path, number, descriptors) for number in range(40)]
    assert _open_descriptors() - before == 8
    for _ in range(3):
        for number, file in enumerate(files):
            with file.using() as fd:
                assert _is(fd, tmp_path / str(number))
    assert _open_descriptors() - before == 8
    for file in files:
        file.close()
    assert _open_descriptors() == before
    assert len(descriptors) == 0


def test_a_descriptor_in_use_is_never_taken_away(tmp_path: Path) -> None:
    descriptors = Descriptors(most=8)
    files = [_file(tmp_path, number, descriptors) for number in range(20)]
    with files[0].using() as fd:
        for file in files[1:]:
            with file.using():
                pass
        assert _is(fd, tmp_path / "0")
    for file in files:
        file.close()


def test_a_closed_file_refuses_use_with_and_without_a_descriptor(tmp_path: Path) -> None:
    descriptors = Descriptors(most=8)
    files = [_file(tmp_path, number, descriptors) for number in range(9)]
    assert files[0].park()
    for file in files:
        file.close()
        with pytest.raises(OSError, match="file was closed"), file.using():
            pass


def test_threads_share_files_that_come_and_go(tmp_path: Path) -> None:
    descriptors = Descriptors(most=8)
    files = [_file(tmp_path, number, descriptors) for number in range(30)]

    def read(turn: int) -> bool:
        number = turn * 7 % 30
        with files[number].using() as fd:
            return _is(fd, tmp_path / str(number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(3000)))
    for file in files:
        file.close()


class _Busy(PosixFile):
    """Is used again the moment it has lost its descriptor, once."""

    __slots__ = ("again",)

    def park(self) -> bool:
        parked = super().park()
        if parked and getattr(self, "again", False):
            self.again = False
            with self.using():
                pass
        return parked


def test_a_file_that_is_used_right_after_it_lost_its_descriptor_still_counts(tmp_path: Path) -> None:
    descriptors = Descriptors(most=8)
    before = _open_descriptors()
    (tmp_path / "busy").write_bytes(bytes(4096))
    busy = _Busy(tmp_path / "busy", os.O_RDONLY, descriptors)
    busy.again = True
    files = [busy, *(_file(tmp_path, number, descriptors) for number in range(8))]
    assert not busy.again
    assert _open_descriptors() - before == len(descriptors)
    for file in files:
        with file.using():
            pass
    assert _open_descriptors() - before == len(descriptors) == 8
    for file in files:
        file.close()
    assert len(descriptors) == 0


def test_a_store_of_more_segments_than_the_process_may_open_files(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _STORE, str(tmp_path / "kv")], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 45
