"""`purge_store`: what was meant is gone from the drive, everything else is served as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.crash.kit import seal, segments
from tests.crash.purge_kit import ACME, BETA, World, chain, padded, rich_world
from tests.unit.store_images import flip, records

from kvterrace import KVLayout, Namespace
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.report import PurgeReport
from kvterrace.maintenance.selection import ByNamespace, BySequence, ByTenant, Target
from kvterrace.observe.verification import verify_store


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    return rich_world(tmp_path_factory.mktemp("world") / "kv")


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    """A copy of the rich store."""
    root = tmp_path / "kv"
    shutil.copytree(built.root, root)
    return World(root, built.records, built.live, built.chains, built.contents)


def purged(world: World, target: Target, partition: str | None = None) -> PurgeReport:
    report = purge_store(world.root, target, partition=partition)
    assert report.failures == []
    found = verify_store(world.root)
    assert found.faults == []
    return report


def linked(world: World) -> Path:
    """A second name for every file of the store: what is in them when the first is gone."""
    links = world.root.with_name("links")
    for path in [path for path in world.root.rglob("*") if path.is_file()]:
        place = links / path.relative_to(world.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(path)
    return links


TARGETS: dict[str, Target] = {
    "namespace": ByNamespace(ACME.digest.hex()),
    "prefix": ByNamespace(BETA.digest.hex()[:6]),
    "tenant": ByTenant("beta"),
    **{f"sequence {label}": BySequence(padded(label)) for label in ("a", "b", "c", "d", "e", "f1", "g", "h")},
}


def meant(world: World, what: str) -> set[tuple[bytes, bytes]]:
    if what.startswith("sequence "):
        return world.of_label(what.removeprefix("sequence "))
    return world.of_namespace(ACME if what == "namespace" else BETA)


@pytest.mark.parametrize("what", TARGETS)
def test_what_was_meant_is_gone_and_the_rest_is_served(world: World, what: str) -> None:
    gone = meant(world, what)
    world.present(gone)
    before = len(segments(world.root)) + len(segments(world.root, "other"))
    links = linked(world)
    report = purged(world, TARGETS[what])
    assert report.complete
    records = [one for one in world.records if one[1] in gone]
    assert sum(one.records for one in report.partitions) == len(records)
    live = sum(len(world.live[partition] & gone) for partition in world.live)
    assert sum(one.live_records for one in report.partitions) == live
    assert sum(one.record_nbytes for one in report.partitions) == 8192 * len(records)
    world.absent(gone)
    world.absent(gone, root=links)  # overwritten, not just unlinked
    world.served(gone)
    assert len(segments(world.root)) + len(segments(world.root, "other")) <= before


def test_before_a_purge_everything_is_served(world: World) -> None:
    world.served(set())


@pytest.mark.parametrize("what", ["tenant", "sequence a"])
def test_a_second_purge_finds_nothing(world: World, what: str) -> None:
    purged(world, TARGETS[what])
    before = {path: path.read_bytes() for path in world.root.rglob("*.seg")}
    report = purged(world, TARGETS[what])
    assert [one.records + one.segments for one in report.partitions] == [0, 0]
    assert {path: path.read_bytes() for path in world.root.rglob("*.seg")} == before


def test_counts_of_a_sequence_tell_copies_from_what_hangs_on_it(world: World) -> None:
    report = purged(world, BySequence(padded("a")))
    main, other = report.partitions
    # ACME 1 2 3 4 5 and BETA 1 2 3 4 5 bear the label. On ACME's 3 hang b's 9 9 9 (two of them invalidated) and h's 6.
    assert (main.records, main.live_records) == (10 + 3 + 1, 10 + 1 + 1)
    assert (main.copy_records, main.descendant_records) == (0, 3 + 1)
    # ACME 1 2 3 again under the label g, and 9 1 behind.
    assert (other.records, other.live_records, other.copy_records, other.descendant_records) == (5, 5, 3, 2)


def test_descriptions_go_with_their_last_record(world: World) -> None:
    path = world.root / "namespaces" / f"{BETA.digest.hex()}.json"
    links = linked(world)
    report = purge_store(world.root, ByTenant("beta"), partition="other")
    assert report.complete and path.is_file()
    assert report.descriptions == []
    report = purge_store(world.root, ByTenant("beta"))
    assert report.descriptions == [BETA.digest]
    assert not path.exists()
    assert (world.root / "namespaces" / f"{ACME.digest.hex()}.json").is_file()
    for root in (world.root, links):
        assert b"beta" not in b"".join(each.read_bytes() for each in root.rglob("*") if each.is_file())


def test_one_partition_only(world: World) -> None:
    gone = world.of_namespace(BETA)
    report = purged(world, ByTenant("beta"), partition="other")
    assert [one.name for one in report.partitions] == ["other"]
    world.live = {"main": world.live["main"], "other": world.live["other"] - gone}
    world.served(set())


def test_a_dry_run_changes_nothing_and_counts_the_same(world: World) -> None:
    before = {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file() and path.name != "lock"}
    report = purge_store(world.root, BySequence(padded("a")), dry_run=True)
    after = {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before
    done = purged(world, BySequence(padded("a")))
    for planned, made in zip(report.partitions, done.partitions, strict=True):
        assert (planned.records, planned.live_records) == (made.records, made.live_records)
        assert (planned.copy_records, planned.descendant_records) == (made.copy_records, made.descendant_records)
        assert (planned.segments, planned.record_nbytes) == (made.segments, made.record_nbytes)


def test_an_invalidated_block_does_not_come_back_though_its_tombstones_segment_went(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    kept = chain(ACME, 1, 2, 3)
    with world.open() as store:
        world.put(store, "main", kept, "kept")
        seal(store)
    with world.open() as store:  # the tombstone lies in a later segment than what it kills
        world.invalidate(store, "main", kept, 1)
        world.put(store, "main", chain(BETA, 1, 2), "gone")
    assert len(segments(world.root)) == 2
    report = purged(world, ByTenant("beta"))
    assert report.partitions[0].segments == 1
    assert segments(world.root)[0].name == "00000001.seg"  # untouched: only the tombstone holds it down
    world.served(world.of_namespace(BETA))
    world.absent(world.of_namespace(BETA))
    report = purged(world, BySequence(padded("kept")))
    assert report.partitions[0].tombstone_keys == 2
    world.absent(world.of_namespace(ACME) | world.of_namespace(BETA))
    assert segments(world.root) == []


@pytest.mark.parametrize("piece_nbytes", [4096, 8192, 12288, 4 << 20])
def test_records_of_any_size_are_carried_over(
    tmp_path: Path, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than what is written at once, and smaller; with padding, and without."""
    monkeypatch.setattr("kvterrace.maintenance.output._PIECE_NBYTES", piece_nbytes)
    odd = Namespace("odd", KVLayout(layers=3, kv_heads=3, head_dim=24, dtype="float16", block_tokens=16))  # 13,824 B
    even = Namespace("even", KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16))  # 16,384 B
    world = World(tmp_path / "kv")
    with world.open() as store:
        for number, namespace in enumerate((odd, ACME, even, BETA, odd, even, ACME)):
            world.put(store, "main", chain(namespace, number, 1, 2), "kept")
            world.put(store, "main", chain(namespace, number, 3), "gone")
    gone = {name for _, name, _, label in world.records if label == padded("gone")}
    # The first block of each chain is shared, and bears the label that it was put under first.
    assert len(gone) == 7
    world.present(gone)
    report = purged(world, BySequence(padded("gone")))
    assert report.partitions[0].copied_records == 21
    assert report.partitions[0].damaged_records == 0
    world.absent(gone)
    world.served(gone)


@pytest.mark.parametrize("piece_nbytes", [4096, 4 << 20])
def test_damage_anywhere_in_a_record_is_found_while_it_is_copied(
    tmp_path: Path, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.maintenance.output._PIECE_NBYTES", piece_nbytes)
    odd = Namespace("odd", KVLayout(layers=3, kv_heads=3, head_dim=24, dtype="float16", block_tokens=16))
    world = World(tmp_path / "kv")
    with world.open() as store:
        for number in range(4):
            world.put(store, "main", chain(odd, number), "kept")
        world.put(store, "main", chain(ACME, 1), "gone")
    (path,) = segments(world.root)
    places = [one.offset for one in records(path)]
    flip(path, places[0] + 4096)  # first byte of its payload
    flip(path, places[1] + 4096 + 9000)  # in the middle
    flip(path, places[2] + 4096 + 13823)  # the last one
    flip(path, places[3] + 4096 + 13824)  # padding, which nobody reads
    report = purged(world, BySequence(padded("gone")))
    assert report.damaged == [f"main/{path.name}@{place}" for place in places[:3]]
    world.live["main"] -= {(odd.digest, chain(odd, number).key(0)) for number in range(3)}
    world.served(world.of_label("gone"))
    (path,) = segments(world.root)
    (record,) = records(path)
    end = record.offset + 4096 + 13824
    assert not any(path.read_bytes()[end : record.offset + record.nbytes])  # padding is zeros again
