"""Reclaim on a full drive whose segments hold tombstones, beside one that can neither be read nor removed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.harness import SMALL, Box, chain_of, kinds

from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail


@pytest.mark.xfail(
    strict=True,
    reason="Writer._may_go: without an open segment and without room for one, tombstones cannot be moved, so only a "
    "segment that kills nothing older may go; a STUCK segment stays older than all others, and if every other one "
    "holds a tombstone, nothing is reclaimed again: DRAM fills with what waits, and each put ends in Busy until a "
    "restart can read the file",
)
def test_a_full_drive_with_tombstones_everywhere_goes_on_beside_a_segment_that_cannot_be_read(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, busy_after_s=1.0, after_s=0.0)
    space = box.store._core.ledger.space
    assert space is not None
    for number in range(1, 200):  # a chain put, another given up, until each segment holds a tombstone and no more fits
        box.put_now(chain_of(SMALL, [number, 1]))
        box.store.invalidate(chain_of(SMALL, [number - 1, 1]), start=1)
        assert box.store.flush(10.0)
        sealed = space.in_state(SegmentState.SEALED)
        if len(sealed) >= 3 and all(one.tombstones for one in space.segments.values()):
            break
    oldest = f"{min(space.segments):08x}.seg"
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == oldest)
    assert box.reopen()
    space = box.store._core.ledger.space
    assert space is not None
    # as after a kill: nothing is open, and what is left of the cap is less than a segment
    assert [one.state for one in space.segments.values()].count(SegmentState.STUCK) == 1
    space.other_nbytes += max(0, space.cap_nbytes - space.file_nbytes - space.segment_nbytes + 4096)
    for number in range(1000, 1040):
        outcomes = kinds(box.put_now(chain_of(SMALL, [number, 1])))
    assert outcomes == ["Stored", "Stored"]
    assert box.store.flush(10.0)


@pytest.mark.xfail(
    strict=True,
    reason="SegmentFiles.remove unlinks, then syncs the folder; if that fails, Writer._remove marks the segment as "
    "STUCK, though its file is gone, and never looks again: a segment's room is lost until the store is opened again",
)
def test_a_folder_that_could_not_be_synced_once_costs_no_room_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=4, after_s=0.0)
    removed: list[Path] = []
    failed: list[Path] = []
    unlink, sync_folder = box.device.unlink, box.device.sync_folder

    def unlinking(path: Path) -> None:
        unlink(path)
        removed.append(path)

    def failing(folder: Path) -> None:
        if removed and not failed:  # the first time that a removal is to be made durable
            failed.append(folder)
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync_folder(folder)

    monkeypatch.setattr(box.device, "unlink", unlinking)
    monkeypatch.setattr(box.device, "sync_folder", failing)
    for number in range(40):
        box.put_now(chain_of(SMALL, [number, 1]))
        box.step(1.0)
    box.rest()
    assert failed and removed[0] not in box.device._medium.names
    for _ in range(120):
        box.step(1.0)
    space = box.store._core.ledger.space
    assert space is not None
    assert not space.in_state(SegmentState.STUCK)
    assert box.store.stats().ssd_file_nbytes == sum(one.allocated_nbytes for one in box.device._medium.names.values())
