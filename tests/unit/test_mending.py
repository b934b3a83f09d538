"""Which tombstones a drive lacks: a tombstone kills what hangs on its key, on all drives."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, chain_of

from kvterrace.engine.mending import RECORD_ROW, Tombstone, killers
from kvterrace.io.base import IoKind
from kvterrace.io.fake import FakeDevice
from kvterrace.io.faults import Fail

PAGE = 4096
TRUNK, BRANCH = chain_of(SMALL, (1,)), chain_of(SMALL, (1, 2))


def segment_of(device: FakeDevice) -> Path:
    (path,) = (path for path in device.snapshot() if path.suffix == ".seg")
    return path


def chain_over_two_drives(root: Path) -> tuple[Box, int, int]:
    """A trunk on one drive, its branch on the other; the drives' numbers."""
    box = Box(root, drives=2, segments=8, dram_blocks=30, after_s=0.0, batch_nbytes=SMALL_NBYTES)
    box.put_now(BRANCH)
    assert box.store.flush(10.0)
    table, ids = box.store._core.ledger.table, box.store._core.ledger.find(BRANCH)
    trunk, branch = (table.segment[ids] >> 24).tolist()
    assert {trunk, branch} == {0, 1}
    return box, trunk, branch


def test_a_tombstone_is_mended_where_only_what_hangs_on_its_key_lies(tmp_path: Path) -> None:
    """The trunk's drive learns of the invalidation and damage hides the branch from the index; the branch's drive does
    not. Once the trunk's drive has no use for its tombstone any more, the branch must not come back.
    """
    box, trunk, branch = chain_over_two_drives(tmp_path)
    box.devices[trunk].poke(segment_of(box.devices[trunk]), PAGE, bytes(PAGE))  # its header
    box.kill()
    assert box.store.match(BRANCH).blocks == 0
    before = box.devices[branch].snapshot()[segment_of(box.devices[branch])]
    box.store.invalidate(TRUNK)
    assert box.store.flush(10.0)
    box.devices[branch].poke(segment_of(box.devices[branch]), 0, before)  # a crash before any flush had returned
    box.kill()
    assert box.store.flush(10.0), "what a restart has to mend was not written"
    # the trunk's drive comes back empty, as after all its segments were reclaimed: it keeps no tombstone
    box.devices[trunk].unlink(segment_of(box.devices[trunk]))
    box.kill()
    box.put_now(TRUNK)
    assert box.store.flush(10.0)
    box.kill()
    assert box.store.match(BRANCH).blocks == 1, "given up, and back with what it hangs on"


def test_a_drive_that_cannot_be_read_is_told_of_every_tombstone(tmp_path: Path) -> None:
    box, trunk, branch = chain_over_two_drives(tmp_path)
    before = box.devices[branch].snapshot()[segment_of(box.devices[branch])]
    box.store.invalidate(TRUNK)
    assert box.store.flush(10.0)
    name = segment_of(box.devices[branch]).name
    box.devices[branch].poke(segment_of(box.devices[branch]), 0, before)
    box.plans[branch].add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == name)
    box.kill()
    assert box.store.flush(10.0)
    box.plans[branch].clear()
    box.devices[trunk].unlink(segment_of(box.devices[trunk]))
    box.kill()
    box.put_now(TRUNK)
    assert box.store.flush(10.0)
    box.kill()
    assert box.store.match(BRANCH).blocks == 1


def test_a_drive_whose_records_no_tombstone_kills_is_told_of_none(tmp_path: Path) -> None:
    """Or a tombstone would go from drive to drive for ever, wherever something older is still in use."""
    box = Box(tmp_path, drives=2, segments=8, dram_blocks=30, after_s=0.0, batch_nbytes=SMALL_NBYTES)
    for number in range(4):
        box.put_now(chain_of(SMALL, (number, 5)))
    assert box.store.flush(10.0)
    box.store.invalidate(chain_of(SMALL, (9, 9)))  # nowhere, but in a namespace that is
    assert box.store.flush(10.0)
    before = {path: data for path, data in box.devices[1].snapshot().items() if path.suffix == ".seg"}
    (path,) = before
    at = before[path].rindex(b"KVTRECRD")
    box.devices[1].poke(path, at, bytes(PAGE))  # the tombstone
    box.kill()
    writers = box.store._mover.writers
    assert writers is not None
    assert [one.pending for one in writers.each] == [False, False]


@pytest.mark.parametrize("seed", range(40))
def test_killers_against_a_walk_up_every_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 30
    parents = [int(rng.integers(-1, number)) if number else -1 for number in range(count)]
    depth = [0] * count
    for number, parent in enumerate(parents):
        depth[number] = depth[parent] + 1 if parent >= 0 else 0
    names = [bytes([number + 1]) * 32 for number in range(count)]
    namespace = [0] * count  # as that of what a block hangs on
    for number, parent in enumerate(parents):
        namespace[number] = namespace[parent] if parent >= 0 else int(rng.integers(2))
    digests = [b"a" * 32, b"b" * 32]
    there = [number for number in rng.integers(0, count, 30).tolist() if rng.random() < 0.8]
    rows = np.zeros(len(there), RECORD_ROW)
    for row, number in zip(rows, there, strict=True):
        row["key"] = np.void(names[number])
        row["parent"] = np.void(names[parents[number]] if parents[number] >= 0 else bytes(32))
        row["depth"], row["namespace"], row["put_seq"] = depth[number], namespace[number], rng.integers(1, 100)
    here = rng.random(len(rows)) < 0.3
    tombstones: set[Tombstone] = set()
    for number, put_seq in zip(*rng.integers(0, (count, 100), (8, 2)).T.tolist(), strict=True):
        tombstones.add((digests[namespace[number]], names[number], put_seq))

    wanted = set()
    for digest, key, put_seq in tombstones:
        for number, row, mine in zip(there, rows, here, strict=True):
            if not mine or int(row["put_seq"]) >= put_seq:
                continue
            at = number
            while names[at] != key and parents[at] >= 0 and at in there:
                at = parents[at]
            broken = at not in there and depth[at] > 0 and digests[namespace[at]] == digest
            if names[at] == key or broken:
                wanted.add((digest, key, put_seq))
    assert killers(tombstones, rows, here, {digest: at for at, digest in enumerate(digests)}) == wanted
