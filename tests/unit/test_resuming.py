"""Segments that close leaves open, and what the next open makes of them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import RECORD_NBYTES, all_hits, checked, hits, opened, segments, stored
from tests.crash.kit import chain_of as conversation
from tests.harness import SEGMENT_NBYTES, SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.engine.space import SegmentState
from kvterrace.format.recovery import SegmentContents, scan_segment
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail
from kvterrace.keys import KeyChain

PAGE = 4096


def one(number: int) -> KeyChain:
    return chain_of(SMALL, [number])


def files(box: Box) -> dict[str, bytes]:
    """The segments on the drive, by name."""
    return {path.name: data for path, data in box.device.snapshot().items() if path.suffix == ".seg"}


def scanned(data: bytes) -> SegmentContents:
    found = scan_segment(lambda at, nbytes: np.frombuffer(data[at : at + nbytes], np.uint8), len(data))
    assert isinstance(found, SegmentContents)
    return found


def killed(box: Box, *, segment_nbytes: int = SEGMENT_NBYTES) -> None:
    """The process dies, and another opens the same drive."""
    box.segment_nbytes = segment_nbytes
    box.kill()


def put_durably(box: Box, chain: KeyChain) -> None:
    assert set(kinds(box.put_now(chain))) <= {"Stored", "Present"}
    assert box.store.flush(10.0)


def test_two_hundred_runs_of_one_block_each_leave_fifty_files(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", segments=80)
    for number in range(200):
        assert kinds(box.put_now(one(number))) == ["Stored"]
        box.patience = 5000  # each open looks at every segment
        assert box.reopen()
    # half of 64 KiB is passed by a header page and four records of two pages; a footer page and a trailer close it
    left = files(box)
    assert len(left) == 50
    assert {len(data) for data in left.values()} == {PAGE + 4 * SMALL_NBYTES + 2 * PAGE}
    for number in range(200):
        assert kinds(box.get_now(one(number))) == ["Hit"]
    box.check()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_little_is_in_a_segment_is_appended_to(tmp_path: Path, end: str) -> None:
    box = Box(tmp_path / "store")
    for number in range(3):
        put_durably(box, one(number))
        if end == "close":
            assert box.reopen()
        else:
            killed(box)
        ((name, data),) = files(box).items()
        assert name == "00000001.seg" and len(data) == SEGMENT_NBYTES  # as long as when it was made, for the cap
        found = scanned(data)  # format 1 has always read this
        assert found.state is ScanState.SCANNED
        assert [row["key"].tobytes() for row in found.entries] == [one(at).key(0) for at in range(number + 1)]
        assert found.entries["offset"].tolist() == [PAGE + at * SMALL_NBYTES for at in range(number + 1)]
        box.check()
        for at in range(number + 1):
            assert kinds(box.get_now(one(at))) == ["Hit"]


def test_an_empty_segment_is_not_kept_by_close_and_is_used_after_a_kill(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    (name,) = files(box)
    path = next(path for path in box.device.snapshot() if path.name == name)
    box.device.poke(path, PAGE, bytes(SEGMENT_NBYTES - PAGE))
    killed(box)
    put_durably(box, one(1))
    assert list(files(box)) == ["00000001.seg"]
    box.device.poke(path, PAGE, bytes(SEGMENT_NBYTES - PAGE))
    killed(box)
    assert box.reopen()
    assert not files(box)


def test_invalidations_in_a_segment_that_goes_on_still_count(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    box.store.invalidate(one(0))
    assert box.store.flush(10.0)
    for number in range(1, 3):
        assert box.reopen()
        assert box.store.match(one(0)).blocks == 0
        assert kinds(box.put_now(one(number))) == ["Stored"]
    assert box.reopen()  # a tombstone and three blocks: sealed
    (data,) = files(box).values()
    found = scanned(data)
    assert found.state is ScanState.SEALED
    assert [row["key"].tobytes() for row in found.tombstones] == [one(0).key(0)]
    assert box.store.match(one(0)).blocks == 0
    assert box.store.match(one(2)).blocks == 1


def test_the_footer_still_fits_after_many_invalidations_and_a_restart(tmp_path: Path) -> None:
    """Each key of a tombstone takes 40 B of the footer; a restart must not forget that room."""
    box = Box(tmp_path / "store", dram_blocks=40, segments=40)
    put_durably(box, one(0))
    box.store.invalidate(chain_of(SMALL, list(range(1000, 1200))))  # 8,000 B of rows
    box.store.invalidate(one(0))
    assert box.store.flush(10.0)
    killed(box)
    for number in range(1, 9):
        put_durably(box, one(number))
    assert box.reopen()
    box.check()
    assert all(len(data) <= SEGMENT_NBYTES for data in files(box).values())
    assert scanned(files(box)["00000001.seg"]).state is ScanState.SEALED


def test_a_put_sequence_number_is_never_below_one_that_lies_torn_in_the_file(tmp_path: Path) -> None:
    """The header of a lost record is there, its payload is not. If that comes back after the block was invalidated, it
    must be the older of the two.
    """
    chain = chain_of(SMALL, [1, 2])
    box = Box(tmp_path / "store")
    put_durably(box, chain[:1])
    for number in range(3):
        put_durably(box, one(100 + number))
    put_durably(box, chain)
    (name,) = files(box)
    path = next(path for path in box.device.snapshot() if path.name == name)
    before = box.device.snapshot()[path]
    at = PAGE + 4 * SMALL_NBYTES
    assert before[at + 88 : at + 120] == chain.key(1)
    box.device.poke(path, PAGE + SMALL_NBYTES, bytes(3 * SMALL_NBYTES))
    box.device.poke(path, at + PAGE, bytes(PAGE))
    killed(box)
    assert box.store.match(chain).blocks == 1
    box.store.invalidate(chain, start=1)
    assert box.store.flush(10.0)
    after = box.device.snapshot()[path]
    assert after[PAGE + SMALL_NBYTES :][:8] == b"KVTRECRD"  # appended behind what was believed
    box.device.poke(path, at + PAGE, before[at + PAGE : at + 2 * PAGE])
    assert [row["key"].tobytes() for row in scanned(box.device.snapshot()[path]).entries][-1] == chain.key(1)
    killed(box)
    assert box.store.match(chain).blocks == 1


def test_what_was_found_is_synced_before_anything_is_written_behind_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    box.faults.add(Fail(errno.EIO), IoKind.SYNC, nth=1)
    killed(box)
    before = files(box)["00000001.seg"]
    assert kinds(box.put_now(one(1))) == ["Stored"]
    box.step(10.0)
    assert box.store.flush(10.0)
    assert len(box.faults.fired) == 1
    space = box.store._core.ledger.space
    assert space is not None and space.segments[1].state is SegmentState.SEALED
    assert sorted(files(box)) == ["00000001.seg", "00000002.seg"]
    after = files(box)["00000001.seg"]
    assert len(scanned(after).entries) == 1 and after[: PAGE + SMALL_NBYTES] == before[: PAGE + SMALL_NBYTES]
    assert box.reopen()
    assert kinds(box.get_now(one(0))) == kinds(box.get_now(one(1))) == ["Hit"]


@pytest.mark.parametrize(
    ("segment_nbytes", "goes_on"), [(SEGMENT_NBYTES, True), (2 * SEGMENT_NBYTES, True), (SEGMENT_NBYTES // 2, False)]
)
def test_a_store_with_larger_segments_goes_on_in_a_smaller_one(
    tmp_path: Path, segment_nbytes: int, *, goes_on: bool
) -> None:
    box = Box(tmp_path / "store", segments=8)
    put_durably(box, one(0))
    killed(box, segment_nbytes=segment_nbytes)
    for number in range(1, 9):
        put_durably(box, one(number))
    box.check()
    first = scanned(files(box)["00000001.seg"])
    assert len(first.entries) == (6 if goes_on else 1)  # six records and a footer fill 64 KiB
    assert first.state is ScanState.SEALED
    for number in range(9):
        assert kinds(box.get_now(one(number))) == ["Hit"]


def test_a_segment_that_could_not_be_read_to_its_end_is_not_written_to(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    put_durably(box, one(1))
    box.faults.add(Fail(errno.EIO), IoKind.READ, nth=3)  # header page, trailer page, then the records
    killed(box)
    box.faults.clear()
    before = files(box)["00000001.seg"]
    put_durably(box, one(2))
    assert files(box)["00000001.seg"] == before
    assert "00000002.seg" in files(box)


@pytest.mark.parametrize("harm", ["longer", "shorter", "newer"])
def test_only_the_newest_segment_and_only_as_it_was_made_goes_on(tmp_path: Path, harm: str) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    path = next(path for path in box.device.snapshot() if path.suffix == ".seg")
    if harm == "newer":  # of another store: nothing is known of it
        other = Box(tmp_path / "other")
        put_durably(other, one(9))
        (data,) = files(other).values()
        file = box.device.create(path.with_name("00000007.seg"), len(data))
        box.device.close_file(file)
        box.device.poke(path.with_name("00000007.seg"), 0, data)
    else:
        file = box.device.reopen(path)
        box.device.truncate(file, SEGMENT_NBYTES + (PAGE if harm == "longer" else -PAGE))
        box.device.close_file(file)
    killed(box)
    put_durably(box, one(1))
    assert kinds(box.get_now(one(0))) == ["Hit"]
    assert scanned(files(box)["00000001.seg"]).state is ScanState.SEALED
    assert max(files(box)) == ("00000008.seg" if harm == "newer" else "00000002.seg")


def test_a_half_made_file_does_not_stop_the_one_before_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    put_durably(box, one(0))
    path = next(path for path in box.device.snapshot() if path.suffix == ".seg")
    box.device.close_file(box.device.create(path.with_name("00000002.seg"), SEGMENT_NBYTES))
    killed(box)
    put_durably(box, one(1))
    entries: Any = scanned(files(box)["00000001.seg"]).entries
    assert len(entries) == 2
    box.check()


def test_a_segment_with_a_bad_place_behind_its_last_record_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path) as store:
        stored(store, conversation(1, 4))
        assert store.flush(10.0)
        store._core.ledger.evict_idle()
        with segments(path)[0].open("r+b") as file:
            file.seek(PAGE + 3 * RECORD_NBYTES + PAGE)  # the payload of the last record
            file.write(bytes(16))
        assert hits(checked(store, conversation(1, 4))) == [True, True, True, False]
    with opened(path) as store:
        assert store.match(conversation(1, 4)).blocks == 3
        stored(store, conversation(2, 4))
        assert store.flush(10.0)
    with opened(path) as store:
        all_hits(store, conversation(2, 4))
