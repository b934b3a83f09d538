"""What making room costs: segments that could not be read at open, blocks that DRAM alone holds in the end."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from tests.harness import SMALL, Box, chain_of, kinds

from kvterrace.engine.space import SegmentState
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail


def worked(box: Box, rng: random.Random, paths: list[list[int]], blocks: int) -> None:
    """So many blocks are put, of chains that branch, and every fourth time a late chain is invalidated."""
    for _ in range(blocks):
        box.patience = 100_000
        base = rng.choice(paths)[:-1] if paths and rng.random() < 0.6 else []
        paths.append([*base, 1000 + len(paths)])
        box.put_now(chain_of(SMALL, paths[-1]))
        if rng.random() < 0.25:
            box.store.invalidate(chain_of(SMALL, rng.choice(paths[-40:])))
        box.step(rng.random())
        box.rest()


def names(box: Box) -> list[str]:
    return sorted(path.name for path in box.device.snapshot() if path.suffix == ".seg")


@pytest.mark.parametrize("seed", range(6))
def test_most_of_the_room_could_not_be_read_and_the_rest_is_invalidations(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    box = Box(tmp_path / "store", segments=16, dram_blocks=24)
    paths: list[list[int]] = []
    worked(box, rng, paths, 200)
    assert box.store.flush(100.0)
    lost = set(rng.sample(names(box), 12))
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name in lost)
    box.patience = 100_000
    box.kill()
    box.faults.clear()
    (space,) = box.store._core.ledger.spaces
    assert len(space.in_state(SegmentState.STUCK)) == 12
    worked(box, rng, paths, 60)
    box.patience = 100_000
    assert box.store.flush(200.0)
    last = chain_of(SMALL, [7, 8])
    box.put_now(last)
    assert box.store.flush(200.0)
    box.check()
    box.kill()
    assert kinds(box.get_now(last)) == ["Hit", "Hit"]


@pytest.mark.parametrize("room", ["there is", "is wanted"])
def test_one_that_cannot_be_read_stays_while_there_is_room(tmp_path: Path, room: str) -> None:
    """Next time it may be readable. Where others would have to go instead, it goes, though they could."""
    box = Box(tmp_path / "store", segments=16)
    kept = chain_of(SMALL, range(6))
    box.put_now(kept)
    assert box.store.flush(100.0)
    box.writer.seal_open()
    box.rest()
    (name,) = names(box)
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == name)
    box.kill()
    box.faults.clear()
    for number in range(60 if room == "there is" else 150):
        box.patience = 100_000
        box.put_now(chain_of(SMALL, [100 + number]))
        box.step(1.0)
    assert box.store.flush(100.0)
    assert (name in names(box)) is (room == "there is")
    box.kill()
    assert kinds(box.get_now(kept)) == ["Hit" if room == "there is" else "Miss"] * 6


@pytest.mark.parametrize("road", ["to remember too much", "no room"])
def test_of_those_that_could_not_be_read_the_older_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    """The younger holds the tombstone of what is in the older, whose file cannot be removed for now."""
    box = Box(tmp_path / "store", segments=16 if road == "to remember too much" else 6, dram_blocks=80)
    dead = chain_of(SMALL, [1])
    box.put_now(dead)
    assert box.store.flush(100.0)
    box.writer.seal_open()
    box.rest()
    for number in range(2, 5):
        box.put_now(chain_of(SMALL, [number]))
    box.store.invalidate(dead)
    assert box.store.flush(100.0)
    box.writer.seal_open()
    box.rest()
    older, younger = names(box)
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name in (older, younger))
    box.kill()
    box.faults.clear()
    unlink, tried = box.device.unlink, []

    def unlinking(path: Path) -> None:
        if path.name == older:
            tried.append(path)
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path)

    monkeypatch.setattr(box.device, "unlink", unlinking)
    pins = []
    for number in range(100):
        box.patience = 100_000
        if road == "no room":
            box.store.put(chain_of(SMALL, [200 + number]), bytearray(SMALL.layout.block_nbytes))
            box.step(1.0)
            pins.append(box.store.pin(chain_of(SMALL, [200 + number])))
        else:
            box.store.invalidate(chain_of(SMALL, [90_000 + number]))
            box.step(1.0)
    assert tried, "nothing was given up"
    assert {older, younger} <= set(names(box))
    monkeypatch.undo()
    for pin in pins:
        pin.release()
    box.patience = 100_000
    box.kill()
    assert box.store.match(dead).blocks == 0 and kinds(box.get_now(dead)) == ["Miss"]
    assert box.store._mover.fault is None


def test_a_segment_of_another_store_is_never_removed(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", segments=6, dram_blocks=80)
    other = Box(tmp_path / "other", segments=6)
    other.put_now(chain_of(SMALL, [1]))
    assert other.store.flush(100.0)
    (theirs,) = (path for path in other.device.snapshot() if path.suffix == ".seg")
    assert other.store.close(100.0)
    files = box.store._core.volumes[0].files
    strange = files.folder / "00000009.seg"
    box.device._medium.names[strange] = other.device._medium.names[theirs]
    box.kill()
    (space,) = box.store._core.ledger.spaces
    assert [one.number for one in space.in_state(SegmentState.STUCK)] == [9]
    for number in range(100):  # until there is no room
        box.patience = 100_000
        box.store.put(chain_of(SMALL, [200 + number]), bytearray(SMALL.layout.block_nbytes))
        box.step(1.0)
        box.store.pin(chain_of(SMALL, [200 + number]))
    assert box.store.stats().dirty_nbytes
    assert strange in box.device.snapshot()


def test_tombstones_in_flight_when_reclaim_moves_them_once_more_need_not_be_written_again(tmp_path: Path) -> None:
    """Called off and begun anew, reclaim found them at the head of the line for ever: it did not end, nor give up."""
    box = Box(tmp_path / "store", segments=6)
    chains = [chain_of(SMALL, [number]) for number in range(4)]
    for chain in chains:
        box.put_now(chain)
        box.store.invalidate(chain)
    assert box.store.flush(100.0)
    writer = box.writer
    writer.seal_open()
    box.rest()
    (segment,) = (one for one in box.store._core.ledger.spaces[0].segments.values() if one.tombstones)
    box.put_now(chain_of(SMALL, [9]))  # a segment to write to
    assert box.store.flush(100.0)
    tombstones = writer._tombstones
    tombstones.move(segment)
    tombstones.write()
    assert tombstones.writes == 1 and not tombstones.moved
    tombstones.move_no_more()
    tombstones.move(segment)
    box.step(1.0)
    box.rest()
    assert tombstones.moved and not tombstones.wait
    others = (one for one in box.store._core.ledger.spaces[0].segments.values() if one is not segment)
    assert {tombstone for one in others for tombstone in one.tombstones} == set(segment.tombstones)
    assert len(segment.tombstones) == 4


def test_what_dram_alone_holds_counts_as_dropped_when_the_store_is_closed(tmp_path: Path) -> None:
    """Reclaim gives a copy up and leaves the block in DRAM, not to be written again: it goes with the process."""
    box = Box(tmp_path / "store")
    chain = chain_of(SMALL, [1, 2, 3])
    box.put_now(chain)
    assert box.store.flush(100.0)
    ledger = box.store._core.ledger
    ledger.spend(int(ledger.find(chain, 3)[2]))
    old = box.store
    assert old.stats().dropped_blocks == 0
    assert box.reopen()
    assert old.stats().dropped_blocks == 1
