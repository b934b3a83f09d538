"""What bounds the invalidations that a drive owes, and what a restart finds when the bound was passed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.engine import emptying
from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail

MOST = 8


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "MOST_OWED", MOST)


def fill(box: Box, start: int, stop: int) -> None:
    for number in range(start, stop):
        box.put_now(chain_of(SMALL, [number, 1]))
        assert box.store.flush(10.0)


def give_up(box: Box, numbers: range) -> None:
    for number in numbers:
        box.store.invalidate(chain_of(SMALL, [number, 1]))


def found(box: Box, stop: int) -> list[int]:
    """How many blocks of each chain are there."""
    return [box.store.match(chain_of(SMALL, [number, 1])).blocks for number in range(stop)]


def pass_time(box: Box, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        box.step(0.5)


def test_a_drive_that_takes_no_writes_is_emptied_when_it_owes_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(tmp_path, segments=12, dram_blocks=60, after_s=0.0)
    fill(box, 0, 12)
    box.store._core.ledger.evict_idle()
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE)
    box.faults.add(Fail(errno.EROFS), IoKind.SYNC)
    give_up(box, range(MOST // 2))  # twice as many keys
    pass_time(box, 100.0)
    assert found(box, 12) == [0] * 4 + [2] * 8, "at the limit all is remembered"
    assert not caplog.records or "owes more" not in caplog.text
    give_up(box, range(4, 6))
    assert box.store._core.ledger.spaces[0].segments
    pass_time(box, 100.0)
    assert not box.store._core.ledger.spaces[0].segments
    assert len(box.writer._tombstones) == 0, "what the drive owes had no bound"
    assert found(box, 12) == [0] * 12
    assert caplog.text.count("owes more") == 1
    box.check()
    assert box.store.flush(None), "nothing on the drive is left that could come back"
    box.faults.clear()
    pass_time(box, 100.0)
    box.kill()
    assert found(box, 12) == [0] * 12
    fill(box, 0, 4)
    box.kill()
    assert found(box, 4) == [2] * 4


def test_what_dram_holds_outlives_the_emptying_and_is_written_again(tmp_path: Path) -> None:
    box = Box(tmp_path, segments=12, dram_blocks=60, after_s=0.0)
    fill(box, 0, 12)
    box.faults.add(Fail(errno.ENOSPC), IoKind.WRITE)
    give_up(box, range(6))
    pass_time(box, 100.0)
    assert found(box, 12) == [0] * 6 + [2] * 6
    box.faults.clear()
    pass_time(box, 100.0)
    assert box.store.flush(10.0)
    box.kill()
    assert found(box, 12) == [0] * 6 + [2] * 6
    assert kinds(box.get_now(chain_of(SMALL, [11, 1]))) == ["Hit", "Hit"]


def test_of_a_drive_that_can_be_neither_written_nor_emptied_no_flush_says_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path, segments=12, dram_blocks=60, after_s=0.0)
    fill(box, 0, 12)
    give_up(box, range(1))
    assert box.store.flush(10.0)
    unlink, refuses = box.device.unlink, [True]
    tried: list[str] = []

    def unlinking(path: Path) -> None:
        tried.append(path.name)
        if refuses:
            raise PermissionError(errno.EROFS, "Read-only file system", str(path))
        unlink(path)

    monkeypatch.setattr(box.device, "unlink", unlinking)
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE)
    give_up(box, range(1, 7))
    pass_time(box, 100.0)
    oldest = min(tried)
    assert set(tried) == {oldest}, "a later segment may hold the tombstone of what is in an earlier one"
    assert len(box.writer._tombstones) == 0
    assert not box.store.flush(None)
    box.faults.clear()
    pass_time(box, 30.0)
    assert not box.store.flush(None), "writes go on, and what was given up is still on the drive"
    refuses.clear()
    pass_time(box, 30.0)
    assert box.store.flush(10.0)
    monkeypatch.undo()
    box.kill()
    assert found(box, 7) == [0] * 7


def test_a_tombstone_that_is_durable_outlives_what_it_kills_while_the_drive_is_emptied(tmp_path: Path) -> None:
    """Killed after each removal: nothing that was invalidated and flushed is ever back."""
    box = Box(tmp_path, segments=12, dram_blocks=60, after_s=0.0)
    fill(box, 0, 12)
    give_up(box, range(1))
    assert box.store.flush(10.0)  # its tombstone is in the newest segment, its blocks in the oldest
    box.faults.add(Fail(errno.EROFS), IoKind.WRITE)
    give_up(box, range(1, 7))
    space, seen = box.store._core.ledger.spaces[0], set()
    for _ in range(400):
        box.step(0.25)
        if len(space.segments) not in seen:
            seen.add(len(space.segments))
            again = Box.__new__(Box)
            again.__dict__.update(box.__dict__)
            again.devices = [box.device.crash_image(lambda _: True)]
            directory, _ = box.store._drives[0]
            directory.close()
            again.store = again._open()
            assert again.store.match(chain_of(SMALL, [0, 1])).blocks == 0
            again.store._drives[0][0].close()
    assert seen == set(range(max(seen) + 1)) and max(seen) >= 3


def test_many_invalidations_at_once_are_no_debt_of_a_drive_that_writes_them(tmp_path: Path) -> None:
    box = Box(tmp_path, segments=12, dram_blocks=60, after_s=0.0)
    fill(box, 0, 12)
    give_up(box, range(10))
    pass_time(box, 200.0)
    assert box.store.flush(10.0)
    assert found(box, 12) == [0] * 10 + [2] * 2


def test_a_segment_that_could_not_be_read_is_removed_when_tombstones_kept_for_it_take_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(tmp_path, segments=12, dram_blocks=40, after_s=0.0)
    fill(box, 0, 8)
    oldest = f"{min(box.store._core.ledger.spaces[0].segments):08x}.seg"
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == oldest)
    assert box.reopen()
    space = box.store._core.ledger.spaces[0]
    assert [one.number for one in space.in_state(SegmentState.STUCK)] == [min(space.segments)]
    share = box.cap_nbytes // 8
    for number in range(100, 100 + share // SMALL_NBYTES - 1):  # each a record of two pages, and a row for each key
        give_up(box, range(number, number + 1))
    assert box.store.flush(10.0)
    pass_time(box, 30.0)
    assert oldest in [path.name for path in box.device.snapshot()]
    give_up(box, range(200, 202))
    assert box.store.flush(10.0)
    pass_time(box, 30.0)
    assert oldest not in [path.name for path in box.device.snapshot()]
    assert caplog.text.count("is removed") == 1
    assert not space.in_state(SegmentState.STUCK)
    box.check()


def test_tombstones_that_reclaim_moves_are_not_forgotten_with_the_debt(tmp_path: Path) -> None:
    """Their segment stays if reclaim is called off, and they with it."""
    box = Box(tmp_path, segments=12, dram_blocks=40, after_s=0.0)
    fill(box, 0, 2)
    give_up(box, range(1))
    assert box.store.flush(10.0)
    tombstones = box.writer._tombstones
    (segment,) = box.store._core.ledger.spaces[0].segments.values()
    tombstones.move(segment)
    tombstones.add(SMALL.digest, [b"k" * 32], 1000)
    moved = len(segment.tombstones)
    assert moved == 2 and len(tombstones) == 3
    assert tombstones.drop() == min(put_seq for _, _, put_seq in segment.tombstones)
    assert len(tombstones) == 2 and tombstones.moved_wait
    pass_time(box, 5.0)
    assert tombstones.moved
