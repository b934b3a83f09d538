"""C10: the store's count of what a partition takes is that of the drive, to the byte.

It counts of each file what is larger, its length or what is allocated to it. What is only about to be made, or not yet
gone, counts too, so it is never less than what the drive holds (`Box.check` holds that, step by step);
at rest it is the same. Files that appear while the
store is open are counted when it is opened next.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.kit import MiB, chain_of, child, ended, opened, seal, segments, stored, until

from kvterrace import Store

CAP = 4 * MiB


def on_the_drive(path: Path) -> int:
    """By stat alone."""
    infos = [each.lstat() for each in (path / "partitions" / "main").iterdir()]
    return sum(max(info.st_size, info.st_blocks * 512) for info in infos)


def exact(store: Store, path: Path) -> None:
    """Come to rest, the count is the drive's."""

    def same() -> bool:
        with store._driver.lock:  # nothing is entered meanwhile, though threads may still make and remove files
            counted = store._core.snapshot().ssd_file_nbytes
        try:
            return counted == on_the_drive(path)
        except FileNotFoundError:  # removed since it was listed
            return False

    until(same, 20.0)
    assert store.stats().ssd_file_nbytes <= CAP


def test_the_count_is_the_drives_after_writes_seals_and_reclaim(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", ssd_bytes=CAP) as store:
        exact(store, tmp_path / "kv")
        for conversation in range(120):  # twice what fits
            stored(store, chain_of(conversation, 8))
            if not conversation % 40:
                assert store.flush(60.0)
                exact(store, tmp_path / "kv")
        seal(store)
        exact(store, tmp_path / "kv")
        assert store.stats().reclaimed_segments > 0
        assert store.stats().ssd_file_nbytes > CAP // 2


@pytest.mark.parametrize("how", ["close", "die"])
def test_the_count_is_the_drives_after_restarts_and_crashes(tmp_path: Path, how: str) -> None:
    for turn in range(3):
        code, _, err = ended(child("fill", tmp_path / "kv", CAP, turn, how))
        assert code == (0 if how == "close" else -9), err
        with opened(tmp_path / "kv", ssd_bytes=CAP) as store:
            exact(store, tmp_path / "kv")
            stored(store, chain_of(90_000 + turn, 8))
            assert store.flush(60.0)
            exact(store, tmp_path / "kv")


def test_files_that_are_not_the_stores_are_counted_as_they_lie(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", ssd_bytes=CAP) as store:
        stored(store, chain_of(0, 8))
        assert store.flush(60.0)
    folder = tmp_path / "kv" / "partitions" / "main"
    (folder / "core.1234").write_bytes(b"x" * 12345)
    (folder / "empty").write_bytes(b"")
    (folder / "000000ee.seg").write_bytes(b"")
    (folder / "ffffffff.seg").write_bytes(b"x" * 1000)
    with (folder / "sparse").open("wb") as file:  # longer than what is allocated to it
        file.truncate(500_000)
    with opened(tmp_path / "kv", ssd_bytes=CAP) as store:
        exact(store, tmp_path / "kv")
        assert store.stats().ssd_file_nbytes > 500_000 + 12345
        for conversation in range(60):
            stored(store, chain_of(conversation, 8))
        assert store.flush(60.0)
        exact(store, tmp_path / "kv")
    assert len(segments(tmp_path / "kv")) > 1
