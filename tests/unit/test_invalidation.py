"""What an invalidation reaches, and what its record says."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tests.harness import LARGE, SMALL, SMALL_NBYTES, Box, chain_of, kinds

from kvterrace.format import segment as seg
from kvterrace.format.lineage import highest_above, parent_rows
from kvterrace.format.record import RecordHeader, RecordKind, decode_header
from kvterrace.format.recovery import SegmentContents, SegmentState, live_entries
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail
from kvterrace.keys import Namespace, chain_keys

PAGE = 4096
TRUNK, ONE, TWO = chain_of(SMALL, [1]), chain_of(SMALL, [1, 2]), chain_of(SMALL, [1, 3, 4])


def crash(box: Box) -> None:
    """Killed, and opened again by another process."""
    box.kill()


def test_branches_that_damage_had_cut_off_stay_dead(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    for chain in (TRUNK, ONE, TWO):
        box.put_now(chain)
    assert box.store.flush(10.0)
    path = next(path for path in box.device.snapshot() if path.suffix == ".seg")
    box.device.poke(path, PAGE, bytes(PAGE))  # the trunk's header
    crash(box)
    assert [box.store.match(chain).blocks for chain in (TRUNK, ONE, TWO)] == [0, 0, 0]
    box.store.invalidate(TRUNK)
    box.put_now(TRUNK)
    assert box.store.flush(10.0)
    crash(box)
    assert [box.store.match(chain).blocks for chain in (TRUNK, ONE, TWO)] == [1, 1, 1]
    box.put_now(chain_of(SMALL, [1, 3]))
    assert box.store.flush(10.0)
    crash(box)
    assert [box.store.match(chain).blocks for chain in (ONE, TWO)] == [1, 2]  # [1, 3, 4] is still the old one
    assert box.reopen()
    assert [box.store.match(chain).blocks for chain in (ONE, TWO)] == [1, 2]


def test_without_an_invalidation_what_was_cut_off_comes_back(tmp_path: Path) -> None:
    box = Box(tmp_path / "store")
    for chain in (TRUNK, ONE, TWO):
        box.put_now(chain)
    assert box.store.flush(10.0)
    path = next(path for path in box.device.snapshot() if path.suffix == ".seg")
    box.device.poke(path, PAGE, bytes(PAGE))
    crash(box)
    box.put_now(TRUNK)
    assert box.store.flush(10.0)
    crash(box)
    assert kinds(box.get_now(ONE)) == ["Hit"] * 2 and kinds(box.get_now(TWO)) == ["Hit"] * 3


@pytest.mark.parametrize("more", [0, 1])
def test_what_could_not_be_read_when_it_was_invalidated_stays_dead(tmp_path: Path, more: int) -> None:
    """The segment that cannot be read has the highest put-sequence numbers. `more`: blocks in one before it."""
    box = Box(tmp_path / "store")
    for number in range(more):
        box.put_now(chain_of(SMALL, [90 + number]))
    assert box.store.flush(10.0)
    box.writer.seal_open()
    box.rest()
    for number in range(20):
        box.put_now(chain_of(LARGE, [number]))
    box.put_now(TWO)
    assert box.store.flush(10.0)
    newest = max(path.name for path in box.device.snapshot() if path.suffix == ".seg")
    box.faults.add(Fail(errno.EIO), IoKind.READ, when=lambda operation: operation.path.name == newest)
    assert box.reopen()
    assert box.store.match(TWO).blocks < 3
    box.store.invalidate(TWO)
    box.put_now(chain_of(LARGE, [50]))
    assert box.store.flush(10.0)
    box.faults.clear()
    assert box.reopen()
    assert [box.store.match(chain).blocks for chain in (TRUNK, TWO)] == [0, 0]
    assert kinds(box.get_now(chain_of(LARGE, [50]))) == ["Hit"]
    box.put_now(chain_of(SMALL, [1, 3]))
    assert box.reopen()
    assert box.store.match(TWO).blocks == 2  # the third is the one that could not be read


def test_live_entries_against_a_walk_up_every_chain() -> None:
    rng = np.random.default_rng(11)
    revived = 0
    for _ in range(60):
        count = 40
        parents = [int(rng.integers(-1, number)) if number else -1 for number in range(count)]
        depth = [0] * count
        for number, parent in enumerate(parents):
            depth[number] = depth[parent] + 1 if parent >= 0 else 0
        names = [bytes([number]) * 32 for number in range(1, count + 1)]
        puts = [
            (number, int(s))
            for number, s in zip(rng.integers(0, count, 80), rng.permutation(200)[:80] * 2, strict=True)
        ]
        entries = np.zeros(len(puts), seg.ENTRY_DTYPE)
        for row, (number, put_seq) in zip(entries, puts, strict=True):
            row["key"] = np.void(names[number])
            row["parent"] = np.void(names[parents[number]] if parents[number] >= 0 else bytes(32))
            row["depth"], row["put_seq"], row["kind"] = depth[number], put_seq, 1
        kills = [
            (int(number), int(s) * 2 + 1) for number, s in zip(*rng.integers(0, (count, 200), (6, 2)).T, strict=True)
        ]
        tombstones = np.zeros(len(kills), seg.TOMBSTONE_DTYPE)
        for row, (number, put_seq) in zip(tombstones, kills, strict=True):
            row["key"], row["put_seq"] = np.void(names[number]), put_seq
        header = seg.SegmentHeader(b"u" * 16, b"n" * 16, 1, 1, 1)
        one = SegmentContents(header, SegmentState.SEALED, entries, (b"d" * 32,), tombstones, PAGE, PAGE)

        newest: dict[int, int] = {}
        for number, put_seq in puts:
            newest[number] = max(put_seq, newest.get(number, -1))
        own = {n: s for n, s in newest.items() if not any(k == n and t > s for k, t in kills)}
        wanted = {}
        for number, put_seq in own.items():
            at, dead = number, False
            while at in own:  # as far up as the chain is whole
                dead |= any(killed == at and seq > put_seq for killed, seq in kills)
                at = parents[at]
            if not dead:
                wanted[names[number]] = put_seq
        revived += len(own) - len(wanted)
        found = live_entries([one]).entries
        assert {row["key"].tobytes(): int(row["put_seq"]) for row in found} == wanted
    assert revived > 20  # or the rule was never used


def test_the_highest_above_is_found_over_long_chains() -> None:
    parent = np.arange(-1, 999)
    values = np.zeros(1000, np.uint64)
    values[[3, 500]] = 7, 5
    assert highest_above(parent, values).tolist() == [0] * 3 + [7] * 997
    entries = np.zeros(3, seg.ENTRY_DTYPE)
    assert parent_rows(entries).tolist() == [-1, -1, -1]


def test_a_tombstone_says_when_and_of_which_epoch(tmp_path: Path) -> None:
    namespace = Namespace(SMALL.model, SMALL.layout, epoch=7)
    chain = chain_keys(namespace, range(4))
    box = Box(tmp_path / "store")
    box.put_now(chain)
    box.clock.advance(5.0)
    now_ns = int(box.clock.unix_s() * 1e9)
    box.store.invalidate(chain)
    assert box.store.flush(10.0)
    (data,) = (data for path, data in box.device.snapshot().items() if path.suffix == ".seg")
    at = data.rindex(b"KVTRECRD")
    found = decode_header(np.frombuffer(data, np.uint8)[at : at + PAGE])
    assert isinstance(found, RecordHeader) and found.kind is RecordKind.TOMBSTONE
    assert found.epoch == 7
    assert now_ns <= found.created_unix_ns < now_ns + 10**10
    assert found.record_nbytes == SMALL_NBYTES


def test_a_put_that_waits_is_none_of_what_is_invalidated_behind_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=4, segments=6)
    held = chain_of(SMALL, [9] * 4)
    assert kinds(box.put_now(held)) == ["Stored"] * 4
    pin = box.store.pin(held)
    chain = chain_of(SMALL, [0] * 6)
    transfer = box.put(chain, 0, 1, deadline_s=50.0)
    box.store.invalidate(chain, start=3)
    box.step()
    assert kinds(transfer.outcomes) == ["Pending"]
    pin.release()
    box.wait(transfer)
    assert kinds(transfer.outcomes) == ["Stored"]
    box.check()
