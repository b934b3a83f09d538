"""`Store.take_departed`: what has left the ladder, against a set that is kept by looking."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.harness import SMALL, Box, chain_of, kinds

from kvterrace import StoreClosedError
from kvterrace.io.base import IoKind
from kvterrace.io.faults import FlipBit


def taken(box: Box) -> set[bytes]:
    keys = box.store.take_departed()
    found = {keys[at : at + 32] for at in range(0, len(keys), 32)}
    assert 32 * len(found) == len(keys), "told twice"
    return found


def test_blocks_that_move_to_the_drive_have_not_left(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12)
    assert taken(box) == set()
    for number in range(6):
        box.put_now(chain_of(SMALL, [number, number, number]))
        assert box.store.flush(10.0)
    assert box.store.stats().dram_used_nbytes <= box.dram_nbytes
    assert taken(box) == set()


def test_without_a_drive_what_makes_room_is_told_once() -> None:
    box = Box(None, dram_blocks=4)
    taken(box)
    first, second = chain_of(SMALL, [1, 2, 3]), chain_of(SMALL, [4, 5])
    box.put_now(first)
    box.put_now(second)
    assert taken(box) == {first.key(2)}  # the last of the chain that was used longest ago
    assert taken(box) == set()
    box.put_now(chain_of(SMALL, [1, 2, 3]))
    box.put_now(chain_of(SMALL, [1, 2, 3, 6]))
    held = [box.store.match(chain).blocks for chain in (chain_of(SMALL, [1, 2, 3, 6]), second)]
    assert held == [4, 0] and taken(box) == set(second)


def test_what_is_invalidated_and_what_hangs_on_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    chains = [chain_of(SMALL, [1, 2, 3]), chain_of(SMALL, [1, 2, 4])]
    for chain in chains:
        box.put_now(chain)
    taken(box)
    box.store.invalidate(chains[0], start=1)
    assert taken(box) == {chains[0].key(1), chains[0].key(2), chains[1].key(2)}


def test_a_copy_that_is_read_and_wrong(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4)
    chain = chain_of(SMALL, [1])
    box.put_now(chain)
    for number in range(2, 8):
        box.put_now(chain_of(SMALL, [number]))
        assert box.store.flush(10.0)
    taken(box)
    box.faults.add(FlipBit(4096), IoKind.READ)
    assert kinds(box.get_now(chain)) == ["Corrupt"]
    assert taken(box) == {chain.key(0)}


@pytest.mark.parametrize("seed", range(5))
def test_who_keeps_count_knows_what_is_there(tmp_path: Path, seed: int) -> None:
    """Added when stored or found present, taken out when departed: in the end, what `match` finds, and no more."""
    chance = random.Random(seed)
    box = Box(tmp_path / "store", dram_blocks=8, segments=4)
    taken(box)
    paths = [[chance.randrange(3) for _ in range(chance.randrange(1, 6))] for _ in range(40)]
    believed: set[bytes] = set()
    for path in paths * 4:
        chain = chain_of(SMALL, path)
        transfer = box.put_now(chain)
        gone = taken(box)
        believed -= gone
        there = box.store.match(chain).blocks
        believed |= {
            chain.key(at) for at, kind in enumerate(kinds(transfer)) if kind in ("Stored", "Present") and at < there
        }
        if chance.random() < 0.2:
            box.store.invalidate(chain, start=chance.randrange(len(chain)))
        if chance.random() < 0.3:
            box.store.flush(10.0)
    believed -= taken(box)
    found = {
        chain.key(at)
        for path in paths
        for chain in [chain_of(SMALL, path)]
        for at in range(box.store.match(chain).blocks)
    }
    assert found <= believed
    assert len(believed) == box.store.stats().blocks


def test_a_closed_store_refuses(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    box.store.close()
    with pytest.raises(StoreClosedError):
        box.store.take_departed()
