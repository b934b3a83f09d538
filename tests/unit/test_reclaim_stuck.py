"""Reclaim on a full drive whose segments hold tombstones, beside one that can neither be read nor removed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.harness import SEGMENT_NBYTES, SMALL, Box, chain_of, kinds

from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail


@pytest.mark.parametrize("segments", [4, 6, 12])
@pytest.mark.parametrize("short_nbytes", [0, 4096, 3 * 4096])
def test_a_full_drive_with_tombstones_everywhere_goes_on_beside_a_segment_that_cannot_be_read(
    tmp_path: Path, segments: int, short_nbytes: int
) -> None:
    """What the unreadable segment holds is not known, so that no tombstone may be dropped: nothing can be reclaimed
    unless they are written elsewhere. Nothing is open, and reclaim's own room is a segment, or less: `short_nbytes`.
    """
    box = Box(tmp_path / "store", dram_blocks=12, segments=segments, busy_after_s=1.0, after_s=0.0)
    box.patience = 1_000_000
    space = box.store._core.ledger.space
    assert space is not None
    for number in range(1, 400):  # chains put, every third given up, until each segment holds a tombstone
        box.put_now(chain_of(SMALL, [number, 1]))
        if number % 3 == 0:
            box.store.invalidate(chain_of(SMALL, [number - 1, 1]), start=1)
        assert box.store.flush(10.0)
        sealed = space.in_state(SegmentState.SEALED)
        if (
            number > 10 * segments
            and len(sealed) >= segments - 2
            and all(one.tombstones for one in space.segments.values())
        ):
            break
    writer = box.writer
    writer.seal_open()
    box.rest()
    oldest = f"{min(space.segments):08x}.seg"
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == oldest)
    assert box.reopen()
    space = box.store._core.ledger.space
    assert space is not None and space.open is None and not space.in_state(SegmentState.RESUMING)
    assert [one.number for one in space.in_state(SegmentState.STUCK)] == [min(space.segments)]
    assert all(one.tombstones for one in space.in_state(SegmentState.SEALED))
    box.made_up_nbytes = space.cap_nbytes - space.file_nbytes - SEGMENT_NBYTES + short_nbytes
    space.other_nbytes += box.made_up_nbytes
    for number in range(1000, 1060):
        assert kinds(box.put_now(chain_of(SMALL, [number, 1]))) == ["Stored", "Stored"]
        assert box.store.flush(10.0)
        assert space.file_nbytes <= space.cap_nbytes
    box.rest()
    assert box.store.stats().reclaimed_segments > 20
    box.check()


def attempts_at_removal(box: Box, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """When which call was made to remove a file, from now on; the first time that a removal is to be made durable it
    fails.
    """
    calls: list[tuple[float, str]] = []
    unlink, sync_folder = box.device.unlink, box.device.sync_folder

    def unlinking(path: Path) -> None:
        calls.append((box.clock.monotonic_s(), path.name))
        unlink(path)

    def syncing(folder: Path) -> None:
        after_unlink = bool(calls) and calls[-1][1].endswith(".seg")
        calls.append((box.clock.monotonic_s(), "sync"))
        if after_unlink and len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync_folder(folder)

    monkeypatch.setattr(box.device, "unlink", unlinking)
    monkeypatch.setattr(box.device, "sync_folder", syncing)
    return calls


def test_a_folder_that_could_not_be_synced_once_costs_no_room_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is gone, but could come back: it counts, as what tombstones must outlive, until a folder was synced."""
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, after_s=0.0)
    for number in range(40):
        box.put_now(chain_of(SMALL, [number, 1]))
        if box.store.stats().ssd_segments == 3:
            break
    assert box.store.flush(10.0)
    calls = attempts_at_removal(box, monkeypatch)
    space = box.store._core.ledger.space
    assert space is not None
    for number in range(40, 80):
        if calls:
            break
        box.put_now(chain_of(SMALL, [number, 1]))
        assert box.store.flush(10.0)
    box.rest()
    (failed_s, name), (_, what) = calls[:2]
    assert what == "sync" and name not in [path.name for path in box.device.snapshot()]
    (stuck,) = space.in_state(SegmentState.STUCK)
    assert f"{stuck.number:08x}.seg" == name
    for _ in range(100):
        box.step(0.1)
        if not space.in_state(SegmentState.STUCK):
            break
        box.check()
    again = [at for at, (_, what) in enumerate(calls) if what == name]
    assert len(again) == 2 and calls[again[1] + 1][1] == "sync"  # not given back before that
    assert 5.0 <= calls[again[1]][0] - failed_s <= 5.5
    assert not space.in_state(SegmentState.STUCK)
    assert box.store.stats().ssd_file_nbytes == sum(one.allocated_nbytes for one in box.device._medium.names.values())
    assert sum("cannot be removed" in one.message for one in caplog.records) == 1
    box.check()


def test_a_file_that_somebody_else_removed_is_gone_once_the_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, after_s=0.0)
    writer = box.writer
    space = box.store._core.ledger.space
    assert space is not None
    box.put_now(chain_of(SMALL, [1, 2]))
    assert box.store.flush(10.0)
    writer.seal_open()
    box.rest()
    (segment,) = space.segments.values()
    box.device.unlink(writer._files.path(segment.number))
    synced: list[list[int]] = []
    sync_folder = box.device.sync_folder

    def syncing(folder: Path) -> None:
        synced.append(list(space.segments))
        sync_folder(folder)

    monkeypatch.setattr(box.device, "sync_folder", syncing)
    ledger = box.store._core.ledger
    for block in segment.live_ids(ledger.table)[::-1].tolist():
        ledger.forget(block)
    writer._maker.remove(segment)
    box.rest()
    assert synced == [[segment.number]] and not space.segments


def test_files_that_cannot_be_removed_are_tried_again_a_few_at_a_time_and_not_what_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=12, after_s=0.0)
    for number in range(22):
        box.put_now(chain_of(SMALL, [number, 1]))
    assert box.store.flush(10.0)
    space = box.store._core.ledger.space
    assert space is not None
    unreadable = f"{min(space.segments):08x}.seg"
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == unreadable)
    assert box.reopen()
    space = box.store._core.ledger.space
    assert space is not None and len(space.in_state(SegmentState.STUCK)) == 1
    tried: list[tuple[float, str]] = []
    unlink, refuses = box.device.unlink, [True]

    def unlinking(path: Path) -> None:
        tried.append((box.clock.monotonic_s(), path.name))
        if refuses:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path)

    monkeypatch.setattr(box.device, "unlink", unlinking)
    writer = box.writer
    given_up = [one for one in space.in_state(SegmentState.SEALED) if one is not space.open][:6]
    assert len(given_up) == 6
    for segment in given_up:
        for block in segment.live_ids(box.store._core.ledger.table)[::-1].tolist():
            box.store._core.ledger.forget(block)
        writer._maker.remove(segment)
    box.rest()
    assert len(tried) == 6 and len(space.in_state(SegmentState.STUCK)) == 7
    for _ in range(110):
        box.step(0.1)
    times = [at for at, _ in tried[6:]]
    assert len(times) == 8 and times[3] - times[0] < 0.5 and 4.5 <= times[4] - times[3] <= 5.5
    assert {name for _, name in tried[6:]} == {f"{one.number:08x}.seg" for one in given_up}
    refuses.clear()
    for _ in range(110):
        box.step(0.1)
    assert [f"{one.number:08x}.seg" for one in space.in_state(SegmentState.STUCK)] == [unreadable]
    assert not any(one.number in space.segments for one in given_up)
    assert unreadable in [path.name for path in box.device.snapshot()]
