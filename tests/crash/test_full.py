"""A drive that is full, read-only, or keeps a file."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import (
    MiB,
    all_hits,
    chain_of,
    checked,
    hits,
    opened,
    segments,
    snapshot,
    stored,
    taken_nbytes,
    until,
)

from kvterrace import NotAStoreError, StoreUnusableError
from kvterrace.io.files import FileCalls

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts for one test; skipped where this process may not mount."""
    mounted: list[Path] = []

    def make(name: str, *options: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"may not mount here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.health.breaker.FIRST_OPEN_S", 0.1)
    monkeypatch.setattr("kvterrace.health.breaker.MAX_OPEN_S", 0.2)


def _fill(path: Path) -> None:
    """Take all the room that the drive of `path` has."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What warnings say of a drive's state; there are no others."""
    told = []
    for one in caplog.records:
        if one.levelno >= logging.WARNING:
            what = [word for word in ("-> open: the drive is full", "-> closed") if word in one.message]
            assert len(what) == 1, one.message
            told += what
    return told


@pytest.mark.usefixtures("short_pause")
def test_a_drive_filled_by_others(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    drive = mount("drive", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    caplog.set_level(logging.INFO, "kvterrace")
    kept = chain_of(0, 20)
    with opened(drive / "kv", ssd_bytes=32 * MiB) as store:
        stored(store, kept)
        assert store.flush()
        for episode in range(1, 3):
            filler = drive / "filler"
            _fill(filler)
            late = [chain_of(1000 * episode + number, 20) for number in range(100)]  # more than DRAM and segment hold
            for chain in late:
                stored(store, chain)
            assert not store.flush()
            until(lambda seen=episode: store.stats().ssd_write_failures > 3 * seen)  # type: ignore[misc]
            until(lambda: not store.stats().ssd_writable)
            all_hits(store, kept)
            for chain in late:
                checked(store, chain)
            assert _told(caplog) == ["-> open: the drive is full", "-> closed"] * (episode - 1) + [
                "-> open: the drive is full"
            ]
            filler.unlink()
            until(lambda: store.stats().ssd_writable)
            stored(store, chain_of(1000 * episode + 500, 20))
            until(store.flush)
            all_hits(store, chain_of(1000 * episode + 500, 20))
            assert _told(caplog) == ["-> open: the drive is full", "-> closed"] * episode
    with opened(drive / "kv", ssd_bytes=32 * MiB) as store:
        all_hits(store, kept)
        all_hits(store, chain_of(2500, 20))
        for number in range(100):
            checked(store, chain_of(2000 + number, 20))
        assert store.stats().get_corrupt_blocks == store.stats().get_failed_blocks == 0
    assert not any(one.levelno >= logging.ERROR for one in caplog.records)


@pytest.mark.usefixtures("short_pause")
def test_blocks_that_were_not_written_are_not_in_the_index(mount: Mount) -> None:
    drive = mount("drive", "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    with opened(drive / "kv", ssd_bytes=64 * MiB) as store:  # a segment of 4 MiB does not fit at all
        stored(store, chain_of(0, 20))
        assert not store.flush()
        all_hits(store, chain_of(0, 20))
        assert not store.close()
    assert segments(drive / "kv") == []
    with opened(drive / "kv", ssd_bytes=8 * MiB) as store:
        assert store.match(chain_of(0, 20)).blocks == 0
        stored(store, chain_of(0, 20))
        assert store.flush()


def test_a_read_only_drive(mount: Mount) -> None:
    drive = mount("drive", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    with opened(drive / "kv", ssd_bytes=2 * MiB) as store:
        stored(store, chain_of(0, 4))
    subprocess.run(["mount", "-o", "remount,ro", str(drive)], check=True)
    before = snapshot(drive)
    for path in (drive / "kv", drive / "new"):
        with pytest.raises(StoreUnusableError, match="Read-only") as caught:
            opened(path)
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, NotAStoreError)
    assert snapshot(drive) == before


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that cannot be removed."""
    names: list[str] = []
    unlink = FileCalls.unlink

    def refusing(self: FileCalls[Any], path: Path) -> None:
        if path.name in names:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(self, path)

    monkeypatch.setattr(FileCalls, "unlink", refusing)
    return names


def test_eviction_goes_on_around_a_file_that_cannot_be_removed(
    tmp_path: Path, stuck: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    stuck += ["00000001.seg", "00000002.seg"]
    with opened(path, ssd_bytes=2 * MiB, write_behind_s=0.0) as store:
        for number in range(200):
            stored(store, chain_of(number, 4))
            assert taken_nbytes(path) <= 2 * MiB
        assert store.flush(30.0)
        assert store.stats().reclaimed_segments > 10
        all_hits(store, chain_of(199, 4))
    assert [one.name for one in segments(path)][:2] == stuck
    told = [one.message for one in caplog.records if "cannot be removed" in one.message]
    assert len(told) == 2
    with opened(path, ssd_bytes=2 * MiB) as store:  # what is in them is as good as ever
        assert any(hits(checked(store, chain_of(0, 4))))
        for number in range(200, 300):
            stored(store, chain_of(number, 4))
        assert store.flush(30.0)
        assert taken_nbytes(path) <= 2 * MiB
    stuck.clear()
    with opened(path, ssd_bytes=2 * MiB) as store:
        for number in range(300, 400):
            stored(store, chain_of(number, 4))
        assert store.flush(30.0)
    assert "00000001.seg" not in [one.name for one in segments(path)]


@pytest.mark.usefixtures("short_pause")
def test_a_drive_smaller_than_the_capacity_is_used_up_and_goes_on(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    """C11: a drive of 24 MiB for a store that may take 64: it evicts its own, and grows when there is room."""
    drive = mount("drive", "-t", "tmpfs", "-o", "size=24m", "tmpfs")
    caplog.set_level(logging.INFO, "kvterrace")
    with opened(drive / "kv", ssd_bytes=64 * MiB) as store:  # segments of about 4 MiB: five fit
        for number in range(300):  # 48 MB
            stored(store, chain_of(number, 20))
        assert store.flush(30.0)
        assert store.stats().reclaimed_segments >= 5
        assert store.stats().dropped_blocks >= 100 * 20  # what was reclaimed: more than half of 6,000 blocks
        for number in range(280, 300):
            all_hits(store, chain_of(number, 20))
        full = [one.message for one in caplog.records if "the drive is full" in one.message]
        assert len(full) == 1 and "goes on within" in full[0]
        subprocess.run(["mount", "-o", "remount,size=100m", str(drive)], check=True)
        with store._driver.lock:
            writers = store._mover.writers
            assert writers is not None
            writers.each[0]._maker._fullness._next_look_s = 0.0  # five seconds later
        for number in range(1000, 1300):
            stored(store, chain_of(number, 20))
        assert store.flush(30.0)
        assert taken_nbytes(drive / "kv") > 40 * MiB
    told = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert ["goes on within" in told[0], "has room again" in told[1], len(told)] == [True, True, 2]


@pytest.mark.usefixtures("short_pause")
def test_others_who_take_what_the_store_makes_room_for_do_not_get_all(mount: Mount) -> None:
    drive = mount("drive", "-t", "tmpfs", "-o", "size=48m", "tmpfs")
    with opened(drive / "kv", ssd_bytes=64 * MiB) as store:
        for number in range(250):  # ten segments of 4 MiB
            stored(store, chain_of(number, 20))
        assert store.flush(30.0)
        before = len(segments(drive / "kv"))
        assert before >= 9
        with (drive / "filler").open("wb", buffering=0) as filler:
            for number in range(1000, 1400):
                with contextlib.suppress(OSError):
                    while filler.write(b"x" * 65536):  # all that there is, again and again
                        pass
                stored(store, chain_of(number, 20))
        assert not store.flush()
        assert len(segments(drive / "kv")) >= before // 2
