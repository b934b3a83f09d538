"""A drive's quarantine in a store: what went wrong is not read, written or promised again, also after a restart."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.harness import LARGE, SEGMENT_NBYTES, SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.engine.bad_places import ONLY_DRIVE_STRIKES, BadPlaces
from kvterrace.engine.blocks import NOWHERE
from kvterrace.health.quarantine import log_nbytes_for
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail, FlipBit, Operation
from kvterrace.keys import KeyChain
from kvterrace.types import Hit, Present, Stored, Tier

FOUR = chain_of(SMALL, [1, 2, 3, 4])
OTHER = chain_of(SMALL, [9, 8, 7])
MEDIA = [FlipBit(4100, 1), Fail(errno.EIO), Fail(errno.ENODATA)]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "store", segments=20)


def bad_of(box: Box) -> BadPlaces:
    return box.store._core.volumes[0].bad


def place_of(box: Box, chain: KeyChain, index: int) -> tuple[int, int]:
    table = box.store._core.ledger.table
    block = int(box.store._core.ledger.find(chain)[index])
    return int(table.segment[block]), int(table.page[block]) * 4096


def logs(box: Box) -> dict[str, bytes]:
    return {path.name: data for path, data in box.device.snapshot().items() if path.name.startswith("quarantine")}


def fail_once(box: Box, chain: KeyChain, index: int) -> None:
    """One read of this block finds one bit of it wrong on the drive."""
    segment, offset = place_of(box, chain, index)
    path = next(one for one in box.device.snapshot() if one.name == f"{segment:08x}.seg")
    byte = box.device.snapshot()[path][offset + 4096]
    box.device.poke(path, offset + 4096, bytes([byte ^ 4]))
    box.store._core.ledger.evict_idle()
    assert kinds(box.get_now(chain, index, index + 1)) == ["Corrupt"]


@pytest.mark.parametrize("effect", MEDIA)
def test_a_bad_place_is_written_down_and_left_out_after_a_restart(box: Box, effect: FlipBit | Fail) -> None:
    box.put_now(FOUR)
    box.put_now(OTHER)
    box.cool()
    place = place_of(box, FOUR, 1)
    box.faults.add(effect, IoKind.READ, when=lambda op: (int(op.path.stem, 16), op.offset) == place)
    assert box.get_now(FOUR, 1, 2) != [Hit(Tier.SSD)]
    assert box.store.stats().ssd_quarantined == 2  # the place, the block
    box.faults.clear()
    assert box.reopen()
    assert len(logs(box)) == 1
    assert box.store.stats().ssd_quarantined == 2
    box.reads.clear()
    assert kinds(box.get_now(FOUR)) == ["Hit", "Miss", "Hit", "Hit"]
    assert box.get_now(OTHER) == [Hit(Tier.SSD)] * 3
    assert place not in [(int(name[:8], 16), offset) for name, offset, _ in box.reads]
    # what hung on it is found again, without being put
    assert box.put_now(FOUR) == [Present(Tier.DRAM), Stored(Tier.DRAM), Present(Tier.DRAM), Present(Tier.DRAM)]
    box.cool()
    assert place_of(box, FOUR, 1) != place
    assert box.reopen()
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4
    box.check()


def test_the_end_of_a_chain_in_a_bad_place_leaves_nothing_behind(box: Box) -> None:
    box.put_now(FOUR)
    box.cool()
    fail_once(box, FOUR, 3)
    box.reopen()
    assert box.store.match(FOUR).blocks == 3
    assert len(box.store._core.ledger.find(FOUR)) == 3
    box.check()


def test_another_copy_of_the_block_is_used_in_place_of_the_bad_one(box: Box) -> None:
    """After a restart, an older record of the same block counts if the newer one lies in a bad place."""
    box.put_now(FOUR)
    box.cool()
    ledger = box.store._core.ledger
    first = place_of(box, FOUR, 0)
    ledger.lost(int(ledger.find(FOUR)[0]), 0.0)  # forgotten, and stored again: two records of it
    assert box.put_now(FOUR)[0] == Stored(Tier.DRAM)
    box.cool()
    assert place_of(box, FOUR, 0) != first
    fail_once(box, FOUR, 0)
    box.reopen()
    assert place_of(box, FOUR, 0) == first
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4
    box.check()


def struck_out(box: Box, chain: KeyChain, index: int) -> None:
    for strike in range(ONLY_DRIVE_STRIKES):
        assert bad_of(box).may_store(chain.key(index)) is True, f"after {strike}"
        box.put_now(chain)
        box.cool()
        fail_once(box, chain, index)
    assert bad_of(box).may_store(chain.key(index)) is False


def test_a_block_that_failed_in_three_places_stays_in_dram(box: Box) -> None:
    struck_out(box, FOUR, 1)
    box.writes.clear()
    assert box.put_now(FOUR)[1] == Stored(Tier.DRAM)
    assert box.store.flush(1.0)  # nothing is owed
    assert box.writes == [] or all(nbytes < SMALL_NBYTES for _, _, nbytes in box.writes)
    assert place_of(box, FOUR, 1)[0] == NOWHERE
    assert box.store.stats().dirty_nbytes == 0
    assert box.get_now(FOUR, 1, 2) == [Hit(Tier.DRAM)]
    box.check()
    assert box.reopen()  # closing does not wait for it either
    assert bad_of(box).may_store(FOUR.key(1)) is False
    assert kinds(box.get_now(FOUR)) == ["Hit", "Miss", "Hit", "Hit"]
    box.check()


def test_its_slot_is_given_up_for_room_and_what_hangs_on_it_stays(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=10)
    struck_out(box, FOUR, 1)
    box.put_now(FOUR)
    for way in range(20, 30):
        assert kinds(box.put_now(chain_of(SMALL, [way] * 4))) == ["Stored"] * 4
    assert kinds(box.get_now(FOUR)) == ["Hit", "Miss", "Hit", "Hit"]
    assert box.store.stats().dropped_blocks == 1
    assert box.put_now(FOUR)[1] == Stored(Tier.DRAM)
    box.check()


def test_a_block_is_not_written_any_more_that_strikes_out_while_it_waits(box: Box) -> None:
    box.put_now(FOUR)
    ledger = box.store._core.ledger
    block = int(ledger.find(FOUR)[3])
    nbytes = ledger.dirty.nbytes
    ledger.bar(block)
    assert ledger.dirty.nbytes == nbytes - SMALL_NBYTES
    box.store._core.volumes[0].space.may_store = lambda key: key != FOUR.key(3)
    box.check()
    assert box.store.flush(1.0)
    assert place_of(box, FOUR, 3)[0] == NOWHERE and place_of(box, FOUR, 2)[0] != NOWHERE
    box.check()


def test_reclaim_carries_what_may_not_be_written_and_waits_for_nothing(tmp_path: Path) -> None:
    """A block that may not be written has an old sound copy, in a segment that is reclaimed."""
    box = Box(tmp_path / "store", dram_blocks=16, segments=5)
    root = chain_of(SMALL, [1])
    box.put_now(root)
    assert box.store.flush(1.0)
    box.store._core.volumes[0].space.may_store = lambda key: key != root.key(0)
    for turn in range(40):
        box.store.touch(root)
        assert "Busy" not in kinds(box.put_now(chain_of(SMALL, [1, 100 + turn, 200 + turn])))
    assert box.store.stats().reclaimed_segments > 3
    assert box.store.flush(1.0)
    box.check()


def test_a_reclaimed_segment_takes_its_bad_places_along(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=16, segments=5)
    box.put_now(FOUR)
    box.cool()
    nonce = box.store._core.volumes[0].files.nonce(place_of(box, FOUR, 1)[0])
    fail_once(box, FOUR, 1)
    assert len(bad_of(box).places(nonce)) == 1
    for turn in range(40):
        box.put_now(chain_of(SMALL, [100 + turn] * 4))
    assert bad_of(box).places(nonce) == ()
    assert bad_of(box)._quarantine.strikes(FOUR.key(1)) == 1  # the block is remembered
    box.check()


def test_where_a_write_failed_no_record_counts(box: Box) -> None:
    """A write that is reported as failed, and has arrived all the same: its place is bad, its blocks go elsewhere."""
    from kvterrace.io.faults import Torn

    box.faults.add(Torn(1, errno.EIO), IoKind.WRITE, when=lambda op: op.offset > 0 and op.path.suffix == ".seg", nth=1)
    box.put_now(FOUR)
    assert box.store.flush(10.0)
    assert len(box.faults.fired) == 1
    assert box.store.stats().ssd_quarantined == 1  # a place, and no block
    assert {place_of(box, FOUR, index)[0] for index in range(4)} == {2}
    box.reopen()
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4
    box.check()


def test_the_log_takes_its_room_from_the_capacity(tmp_path: Path) -> None:
    """The drive is as full as it may be: segments go for the log, the cap holds, and reclaim's own room stays."""
    box = Box(tmp_path / "store", dram_blocks=16, segments=5)
    for turn in range(20):
        box.put_now(chain_of(SMALL, [100 + turn] * 4))
    last = chain_of(SMALL, [119] * 4)
    box.cool()
    space = box.store._core.ledger.space
    assert space is not None and space.other_nbytes == 0
    box.cap_nbytes = space.cap_nbytes = space.file_nbytes + 4096  # a page short
    reclaimed = box.store.stats().reclaimed_segments
    then: list[int] = []

    def look(operation: Operation) -> bool:
        then.append(operation.nbytes + sum(file.allocated_nbytes for file in box.device._medium.names.values()))
        return False

    box.faults.add(Fail(errno.EIO), "create", when=look)
    fail_once(box, last, 3)
    for _ in range(100):
        box.step(0.05)
        box.check()
    assert box.store.stats().reclaimed_segments > reclaimed
    assert len(then) == 1 and then[0] <= box.cap_nbytes - SEGMENT_NBYTES
    log_nbytes = log_nbytes_for(5 * SEGMENT_NBYTES)
    assert space.other_nbytes == log_nbytes == 8192 and list(map(len, logs(box).values())) == [8192]
    assert box.reopen()
    assert box.store.stats().ssd_quarantined == 2
    space = box.store._core.ledger.space
    assert space is not None and space.other_nbytes == 8192
    box.check()


@pytest.mark.parametrize("kind", ["create", IoKind.WRITE, IoKind.SYNC])
def test_a_log_that_cannot_be_written_disturbs_nobody(box: Box, kind: str) -> None:
    box.faults.add(Fail(errno.EIO), kind, when=lambda op: op.path.suffix == ".log")  # type: ignore[arg-type]
    box.put_now(FOUR)
    box.cool()
    fail_once(box, FOUR, 2)
    for turn in range(12):
        assert kinds(box.put_now(chain_of(SMALL, [100 + turn] * 4))) == ["Stored"] * 4
        box.step(1.0)
        box.check()
    tries = len(box.faults.fired)
    assert 2 <= tries <= 4  # twelve seconds and more, one try in five
    assert box.store.stats().ssd_write_failures == 0 and box.store.stats().ssd_writable
    assert box.store.flush(1.0)
    assert kinds(box.get_now(FOUR)) == ["Hit", "Hit", "Miss", "Hit"]
    box.faults.clear()
    box.step(6.0)
    box.rest()
    assert box.reopen()
    assert box.store.stats().ssd_quarantined == 2
    box.check()


def test_two_geometries_and_a_place_on_their_border(box: Box) -> None:
    """A bad place costs the record that it touches, and neither neighbour."""
    large = chain_of(LARGE, [1, 2])
    box.put_now(FOUR)
    box.cool()
    box.put_now(large)
    box.cool()
    fail_once(box, large, 0)
    box.reopen()
    assert kinds(box.get_now(large)) == ["Miss", "Hit"]
    assert box.get_now(FOUR) == [Hit(Tier.SSD)] * 4
    box.check()


def test_the_size_of_a_log_by_capacity() -> None:
    assert [log_nbytes_for(cap) for cap in (1 << 20, 16 << 20, 1 << 40)] == [16 << 10, 256 << 10, 256 << 10]


def test_a_drive_on_which_too_much_goes_wrong_is_reported_once(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    box.put_now(FOUR)
    box.cool()
    (segment,) = box.store._core.ledger.space.segments.values()  # type: ignore[union-attr]
    entries = log_nbytes_for(20 * SEGMENT_NBYTES) // 64 // 2  # half a file of entries of 64 B; two for each failure
    for number in range(entries):
        told = [one for one in caplog.records if "replace it" in one.message]
        assert len(told) == (1 if 2 * number >= entries else 0), number
        bad_of(box).went_wrong(number.to_bytes(32, "little"), segment, b"n" * 16, number * 8192, 8192)
    assert len(bad_of(box)) == entries


def test_the_log_wants_no_room_that_the_drive_has_not(box: Box) -> None:
    """The capacity has room for the log, the drive has not: it waits, as a segment would."""
    (space,) = box.store._core.ledger.spaces
    box.put_now(FOUR)
    box.cool()
    space.limit_nbytes = space.file_nbytes + SEGMENT_NBYTES
    bad = bad_of(box)
    bad._quarantine.add_place(segment=1, nonce=bytes(16), offset=4096, nbytes=4096)
    assert [bad.wants_room, bad.busy] == [True, False]
    space.limit_nbytes = None
    assert [bad.wants_room, bad.busy] == [False, True]
