"""What a purge must keep so that nothing comes back or is lost: tombstones, second records, segments to go on with."""

from __future__ import annotations

import json
import shutil
import struct
import uuid
from pathlib import Path

import pytest
from tests.crash.kit import LAYOUT, RECORD_NBYTES, seal, segments, stored
from tests.crash.purge_kit import ACME, BETA, World, chain, padded
from tests.unit.store_images import PAGE, flip, records

from kvterrace import Namespace, StoreUnusableError
from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import SegmentContents
from kvterrace.health.quarantine import BadPlace, encode
from kvterrace.maintenance.census import take_census
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.selection import BySequence, ByTenant
from kvterrace.observe.folder import StoreFolder
from kvterrace.observe.verification import verify_store

ONE, TWO = chain(ACME, 1), chain(ACME, 1, 2)
GONE = chain(BETA, 9)


def contents_of(root: Path) -> list[SegmentContents]:
    """What every segment holds."""
    folder = StoreFolder(root)
    found = [one.contents for one in take_census(folder, root / "partitions" / "main")]
    return [one for one in found if one is not None]


def cut_off(root: Path, deeper: int) -> World:
    """A block that an invalidation could not name, as the records above it were damaged: only what it hangs on is
    invalidated, and put again since. `deeper`: how many blocks those are.
    """
    path = (*range(1, 1 + deeper), 50)
    world = World(root)
    with world.open() as store:
        world.put(store, "main", chain(ACME, *path), "kept")
    (segment,) = segments(root)
    for one in records(segment)[:deeper]:  # no footer: a scan does not believe them
        flip(segment, one.offset + PAGE)
    with world.open() as store:
        world.put(store, "main", chain(ACME, 99), "last")  # with it the segment is gone on with
        seal(store)
    with world.open() as store:
        stored(store, chain(ACME, *path[:-1]), sequence=b"again")
        assert store.flush(60.0)
        store.invalidate(chain(ACME, *path[:-1]), start=0)
        assert store.flush(60.0)
        stored(store, chain(ACME, *path[:-1]), sequence=b"again")
        world.put(store, "main", GONE, "gone")
        seal(store)
    world.chains["main"] = [chain(ACME, *path), GONE]
    name = (ACME.digest, chain(ACME, *path).key(deeper))
    world.live["main"] -= {name}
    world.live["main"] |= {(ACME.digest, key) for key in chain(ACME, *path[:-1])}
    return world


@pytest.mark.parametrize("deeper", [1, 3])
def test_a_tombstone_stays_for_what_hangs_on_its_block(tmp_path: Path, deeper: int) -> None:
    world = cut_off(tmp_path / "kv", deeper)
    world.served(set())
    assert len(segments(world.root)) == 2
    report = purge_store(world.root, BySequence(padded("gone")))
    assert report.complete and report.partitions[0].segments == 1
    assert [len(one.tombstones) for one in contents_of(world.root)] == [0, 1]  # one of them is enough
    world.served(world.of_label("gone"))  # what it kills does not come back
    # Once that is gone, too, nothing needs the tombstone.
    report = purge_store(world.root, BySequence(padded("kept")))
    assert report.complete
    assert sum(len(one.tombstones) for one in contents_of(world.root)) == 0


@pytest.mark.parametrize("apart", [True, False])
def test_a_tombstone_stays_while_what_is_between_is_not_there(tmp_path: Path, apart: bool) -> None:
    """Whether it kills a block of which no prefix is known cannot be said until that was put again. `apart`: the block
    lies in another segment.
    """
    world = World(tmp_path / "kv")
    path = (1, 2, 3, 50)
    keys = chain(ACME, *path)
    with world.open() as store:
        world.put(store, "main", keys, "kept")
    (segment,) = segments(world.root)
    for one in records(segment)[:3]:
        flip(segment, one.offset + PAGE)
        flip(segment, one.offset + 40)  # nor its header: nobody knows what the last one hangs on
    if apart:
        with world.open() as store:
            world.put(store, "main", chain(ACME, 99), "last")  # with it the segment is gone on with
            seal(store)
    with world.open() as store:
        stored(store, chain(ACME, 1, 2), sequence=b"again")
        assert store.flush(60.0)
        store.invalidate(chain(ACME, 1, 2), start=0)
        world.put(store, "main", GONE, "gone")
        seal(store)
    assert len(segments(world.root)) == (2 if apart else 1)
    assert purge_store(world.root, BySequence(padded("gone"))).complete
    with world.open() as store:
        stored(store, chain(ACME, 1, 2, 3), sequence=b"again")
        assert store.flush(60.0)
    world.chains["main"] = [keys]
    world.live["main"] = {(ACME.digest, key) for key in chain(ACME, 1, 2, 3)}
    world.served(set())


def test_of_two_records_that_in_a_bad_place_is_the_last_choice(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", ONE, "kept")
        world.put(store, "main", GONE, "gone")
        seal(store)
    with world.open() as store:
        world.put(store, "main", chain(ACME, 7), "other")
        seal(store)
    first, _ = segments(world.root)
    away = tmp_path / "away"
    shutil.move(first, away)  # as if it could not be found: the block is put again
    with world.open() as store:
        stored(store, ONE, sequence=b"kept")
        seal(store)
    shutil.move(away, first)
    newest = segments(world.root)[-1]
    (again,) = (one for one in records(newest) if one.key == ONE.key(0))
    (nonce,) = (one.header.nonce for one in contents_of(world.root) if one.header.segment_id == int(newest.stem, 16))
    flip(newest, again.offset + PAGE)
    store_uuid = uuid.UUID(hex=json.loads((world.root / "store.json").read_text())["uuid"]).bytes
    log = world.root / "partitions" / "main" / "quarantine.00000001.log"
    bad = BadPlace(int(newest.stem, 16), nonce, again.offset, RECORD_NBYTES)
    log.write_bytes(encode([bad], store_uuid).tobytes())
    report = purge_store(world.root, BySequence(padded("gone")))
    assert report.complete and report.partitions[0].copied_records == 1
    world.served(world.of_label("gone"))


def unsealed(root: Path) -> list[str]:
    return [path.name for path in segments(root) if b"KVTFOOTR" not in path.read_bytes()]


@pytest.mark.parametrize("label", ["a", "b", "c"])
def test_an_unsealed_segment_is_rewritten_like_any_other(tmp_path: Path, label: str) -> None:
    """a lies in a sealed segment, b in an unsealed one, c in both."""
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", chain(ACME, 1, 2), "a")
        world.put(store, "main", chain(ACME, 3), "c")
        seal(store)
    with world.open() as store:
        world.put(store, "main", chain(BETA, 4, 5), "b")
        world.put(store, "main", chain(BETA, 6), "c")
        world.put(store, "main", chain(BETA, 7), "d")
    assert unsealed(world.root) == ["00000002.seg"]
    gone = world.of_label(label)
    report = purge_store(world.root, BySequence(padded(label)))
    assert report.partitions[0].segments == {"a": 1, "b": 1, "c": 2}[label]
    world.absent(gone)
    world.forget(gone)
    assert unsealed(world.root) == (["00000002.seg"] if label == "a" else [])
    with world.open() as store:  # goes on where it may
        world.put(store, "main", chain(ACME, 1, 2, 3), "late")
        world.invalidate(store, "main", chain(BETA, 4, 5), 1)
    for one in contents_of(world.root):
        found = [int(row["put_seq"]) for row in one.entries if row["kind"] == RecordKind.BLOCK]
        assert len(set(found)) == len(found)
    world.served(set())
    assert verify_store(world.root).faults == []
    assert purge_store(world.root, ByTenant("acme")).complete
    world.absent(world.of_namespace(ACME))
    world.served(world.of_namespace(ACME))


def tombstones_in(path: Path) -> list[tuple[bytes, int, int, int]]:
    """Of each tombstone record of a segment: namespace, epoch, put-sequence number and time, by docs/design.md."""
    data = path.read_bytes()
    found = []
    for one in records(path):
        if data[one.offset + 10] == RecordKind.TOMBSTONE:
            put_seq, namespace = struct.unpack_from("<Q32s", data, one.offset + 48)
            (epoch,) = struct.unpack_from("<I", data, one.offset + 156)
            (created_unix_ns,) = struct.unpack_from("<Q", data, one.offset + 192)
            found.append((namespace, epoch, put_seq, created_unix_ns))
    return found


def test_a_tombstone_that_is_written_anew_says_what_it_said(tmp_path: Path) -> None:
    """Its namespace, the epoch of that (a header of another epoch is none of the namespace's), number and time."""
    seventh = Namespace(model="model", layout=LAYOUT, tenant="acme", epoch=7)
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", chain(seventh, 1, 2), "kept")
        seal(store)
        world.put(store, "main", GONE, "gone")
        world.invalidate(store, "main", chain(seventh, 1, 2), 1)
        seal(store)
    (_, path) = segments(world.root)
    (before,) = tombstones_in(path)
    assert before[:2] == (seventh.digest, 7) and before[3] > 0
    assert purge_store(world.root, ByTenant("beta")).failures == []
    assert not path.exists(), "it was written anew"
    assert [one for segment in segments(world.root) for one in tombstones_in(segment)] == [before]
    assert verify_store(world.root).clean


def test_a_tombstone_of_a_namespace_without_blocks_keeps_its_epoch(tmp_path: Path) -> None:
    """All that is left of it is the tombstone, when that is carried over."""
    seventh = Namespace(model="model", layout=LAYOUT, tenant="acme", epoch=7)
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", chain(seventh, 1), "")
        world.invalidate(store, "main", chain(seventh, 1), 0)
        seal(store)
    (path,) = segments(world.root)
    (before,) = tombstones_in(path)
    with world.open() as store:
        assert store._mover.writers is not None
        (writer,) = store._mover.writers.each
        with store._driver.lock:
            (segment,) = store._core.ledger.spaces[0].segments.values()
            writer._tombstones.again(segment)
            store._mover.pump()
        world.put(store, "main", chain(BETA, 1), "")
        seal(store)
    found = [one for one in segments(world.root) if one != path]
    assert [one[:3] for each in found for one in tombstones_in(each)] == [before[:3]]


def test_a_folder_in_the_place_of_a_purges_list_is_named(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", ONE, "")
    (world.root / "purge.pending").mkdir()
    with pytest.raises(StoreUnusableError, match=r"purge\.pending is damaged"):
        purge_store(world.root, ByTenant("acme"))
    world.served(set())
