"""`purge_store` over several drives: all of them or none; what hangs on a block goes, on whichever drive it lies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import segments, snapshot
from tests.crash.purge_kit import ACME, BETA, World, chain, padded, rich_world
from tests.crash.purge_steps import purge_and_die, target_of, watched
from tests.unit.store_images import records

from kvterrace import ConfigError, Store, StoreLockedError, StoreUnusableError
from kvterrace.cli import main
from kvterrace.engine.dirty import WritePolicy
from kvterrace.health.quarantine import BadBlock, decode, encode
from kvterrace.keys import KeyChain
from kvterrace.maintenance.drive import Drive
from kvterrace.maintenance.pending import write_pending
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.selection import ByNamespace, BySequence, ByTenant, Target
from kvterrace.observe.folder import PENDING_NAME, StoreFolder
from kvterrace.observe.verification import verify_store
from kvterrace.tiers.directory import PartitionLock

DRIVES = ("x", "y", "z")


@pytest.fixture(autouse=True)
def one_block_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a chain lies on every drive."""
    real = Store.__init__

    def small(self: Store, **options: Any) -> None:
        real(self, **(options | {"writes": WritePolicy(after_s=options["writes"].after_s, batch_nbytes=8192)}))

    monkeypatch.setattr(Store, "__init__", small)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return rich_world(tmp_path / "kv", DRIVES)


@pytest.fixture
def small(tmp_path: Path) -> World:
    """A few blocks on each of three drives, one partition."""
    world = World(tmp_path / "kv", drives=DRIVES)
    with world.open() as store:
        world.put(store, "main", chain(ACME, 1, 2, 3, 4), "a")
        world.put(store, "main", chain(BETA, 5, 6, 7), "b")
        for step in range(8, 14):
            world.put(store, "main", chain(ACME, 1, 2, step), "c")  # hang on a
    return world


def places_of(world: World, partition: str = "main") -> dict[bytes, set[Path]]:
    """On which drives each block's records are, by hand."""
    found: dict[bytes, set[Path]] = {}
    for root in world.folders():
        for path in segments(root, partition):
            for one in records(path):
                found.setdefault(one.key, set()).add(root)
    return found


def sure_of(world: World, keys: KeyChain) -> set[Path]:
    """The drives that a chain lies on."""
    places = places_of(world)
    return set().union(*(places[key] for key in keys))


@pytest.mark.parametrize("what", ["namespace", "tenant", "a", "c", "e", "h"])
def test_what_was_meant_is_gone_from_all_drives(world: World, what: str) -> None:
    targets: dict[str, Target] = {"namespace": ByNamespace(ACME.digest.hex()), "tenant": ByTenant("beta")}
    gone = {"namespace": world.of_namespace(ACME), "tenant": world.of_namespace(BETA)}.get(what) or world.of_label(what)
    target = targets.get(what, BySequence(padded(what)))
    world.present(gone)
    assert len(sure_of(world, chain(ACME, 1, 2, 3, 9, 9, 9))) == 3
    links = world.root.with_name("links")
    for path in [path for path in world.root.rglob("*") if path.is_file()]:
        (links / path.relative_to(world.root)).parent.mkdir(parents=True, exist_ok=True)
        (links / path.relative_to(world.root)).hardlink_to(path)
    planned = purge_store(world.folders(), target, dry_run=True)
    report = purge_store(list(reversed(world.folders())), target)  # in any order
    assert report.complete and planned.complete
    meant = [one for one in world.records if one[1] in gone]
    assert sum(one.records for one in report.partitions) == len(meant)
    assert sum(one.records for one in planned.partitions) == len(meant)
    assert sum(one.live_records for one in report.partitions) == sum(len(some & gone) for some in world.live.values())
    assert [one.name for one in report.partitions] == ["main", "other"]
    world.absent(gone)
    world.absent(gone, root=links)
    for root in world.folders():
        assert verify_store(root).faults == []
    assert sum(one.segments for one in purge_store(world.folders(), target).partitions) == 0
    world.served(gone)


def test_what_hangs_on_a_block_of_another_drive_goes(small: World) -> None:
    gone = small.of_label("a")
    places = places_of(small)
    under = places[chain(ACME, 1, 2).key(1)]
    apart = [step for step in range(8, 14) if not places[chain(ACME, 1, 2, step).key(2)] & under]
    assert apart, "none lies elsewhere than what it hangs on"
    report = purge_store(small.folders(), BySequence(padded("a")))
    assert (report.partitions[0].records, report.partitions[0].descendant_records) == (4 + 6, 6)
    small.absent(gone)
    small.served(gone)


@pytest.mark.parametrize("given", [(0,), (2,), (0, 1), (1, 2)])
def test_a_part_of_the_drives_is_refused_and_what_is_missing_named(small: World, given: tuple[int, ...]) -> None:
    before = snapshot(small.root)
    missing = [index for index in range(3) if index not in given]
    by_index = {json.loads((root / "store.json").read_text())["drives"]["index"]: root for root in small.folders()}
    word = f"drive {missing[0]} is" if len(missing) == 1 else f"drives {missing[0]}, {missing[1]} are"
    for dry_run in (False, True):
        with pytest.raises(StoreUnusableError, match=rf"over 3 drives, and {word} missing"):
            purge_store([by_index[index] for index in given], ByTenant("acme"), dry_run=dry_run)
    assert snapshot(small.root) == before


def test_folders_that_do_not_go_together(small: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    with other.open() as store:
        other.put(store, "main", chain(ACME, 1), "a")
    before = snapshot(tmp_path)
    with pytest.raises(StoreUnusableError, match="a store of its own"):
        purge_store([*small.folders(), other.root], ByTenant("acme"))
    with pytest.raises(ConfigError, match="give each drive once"):
        purge_store([*small.folders(), small.folders()[0]], ByTenant("acme"))
    with pytest.raises(ConfigError, match="give the folder"):
        purge_store([], ByTenant("acme"))
    assert snapshot(tmp_path) == before
    shutil.copytree(small.folders()[1], tmp_path / "copy")
    with pytest.raises(StoreUnusableError, match="is a copy of"):
        purge_store([*small.folders(), tmp_path / "copy"], ByTenant("acme"))


def test_a_drive_that_was_away_is_refused(small: World) -> None:
    away = small.folders()[1]
    held = small.root / "held"
    away.rename(held)
    small.drives = ("x", "z")
    with small.open():
        pass
    before = snapshot(small.root)
    with pytest.raises(StoreUnusableError, match="held was away"):
        purge_store([*small.folders(), held], ByTenant("acme"))
    assert snapshot(small.root) == before
    assert purge_store(small.folders(), ByTenant("acme")).complete


def test_a_store_in_use_is_refused_on_all_drives(small: World) -> None:
    with small.open(), pytest.raises(StoreLockedError, match=rf"process {os.getpid()}: close the store there"):
        purge_store(small.folders(), ByTenant("acme"))
    assert purge_store(small.folders(), ByTenant("acme")).complete


def test_while_a_purge_runs_every_drive_is_locked(small: World) -> None:
    refused: list[Path] = []

    def looking(_what: str, _done: int, _total: int) -> None:
        for root in small.folders():
            with pytest.raises(StoreLockedError):
                PartitionLock(root / "partitions" / "main")
            refused.append(root)

    assert purge_store(small.folders(), ByTenant("beta"), dry_run=True, on_progress=looking).complete
    assert set(refused) == set(small.folders())


def test_unsealed_segments_of_all_drives_are_durable_before_anything_goes(small: World) -> None:
    """What is dead on one drive may be so by a record on another."""
    unsealed = [path for path in small.root.rglob("*.seg") if b"KVTFOOTR" not in path.read_bytes()]
    assert {path.parents[2].name for path in unsealed} == set(DRIVES)
    synced: set[Path] = set()
    opened: dict[int, Path] = {}
    renamed: list[Path] = []

    def after(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            opened[result] = Path(arguments[0])
        elif name in ("fdatasync", "fsync"):
            synced.add(opened[arguments[0]])
        elif name == "rename" and (path := Path(arguments[0])).suffix == ".seg":
            if not renamed:
                assert set(unsealed) <= synced
            renamed.append(path)

    with watched(lambda *_: None, after):
        assert purge_store(small.folders(), ByTenant("beta")).complete
    assert renamed


def test_the_log_of_one_drive_names_a_block_of_another(small: World) -> None:
    """A block that has failed on a drive is put on the next; the first one's log keeps its name."""
    keys = chain(BETA, 5, 6, 7)
    places = places_of(small)
    root = next(root for root in small.folders() if root not in places[keys.key(0)])
    store_uuid = uuid.UUID(hex=json.loads((root / "store.json").read_text())["uuid"]).bytes
    log = root / "partitions" / "main" / "quarantine.00000001.log"
    log.write_bytes(encode([BadBlock(keys.key(0), 1), BadBlock(chain(ACME, 1).key(0), 1)], store_uuid).tobytes())
    assert purge_store(small.folders(), ByTenant("beta"), dry_run=True).partitions[0].quarantine_entries == 1
    assert len(decode(log.read_bytes(), store_uuid).entries) == 2
    report = purge_store(small.folders(), ByTenant("beta"))
    assert report.partitions[0].quarantine_entries == 1
    assert decode(log.read_bytes(), store_uuid).entries == (BadBlock(chain(ACME, 1).key(0), 1),)
    small.absent(small.of_namespace(BETA))


def test_what_is_left_to_do_is_written_down_on_every_drive_or_on_none(
    small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(small.root)
    real = Drive.rename
    made: list[Path] = []

    def rename(self: Drive, path: Path, to: Path) -> None:
        if to.name == PENDING_NAME:
            if len(made) == 2:
                raise OSError(errno.EIO, "Input/output error", str(path))
            made.append(to)
        real(self, path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Drive, "rename", rename)
        with pytest.raises(StoreUnusableError, match="nothing was changed"):
            purge_store(small.folders(), BySequence(padded("a")))
    assert len(made) == 2
    after = snapshot(small.root)
    assert set(after) == set(before)


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_what_any_drive_says_is_left_to_do_is_done(small: World, drive: int) -> None:
    gone = {(BETA.digest, chain(BETA, 5, 6, 7).key(2))}
    with Drive() as writer:
        write_pending(small.folders()[drive], writer, [digest + key for digest, key in gone])
    assert purge_store(small.folders(), BySequence(padded("nobody's"))).complete
    assert not list(small.root.rglob(PENDING_NAME + "*"))
    small.absent(gone)
    small.served(gone)


@pytest.mark.parametrize("what", ["tenant:beta", "sequence:a"])
def test_killed_at_any_step(small: World, what: str) -> None:
    gone = small.of_namespace(BETA) if what.startswith("tenant") else small.of_label("a")
    assert len(small.below(gone)) == len(gone)
    for step in range(1, 1000, 7):
        root = small.root.with_name(f"step{step}")
        shutil.copytree(small.root, root)
        status = purge_and_die(small.folders(root), what, step, "torn")
        assert status in (-9, 0)
        seen = small.root.with_name("seen")
        shutil.copytree(root, seen)
        small.served(gone, root=seen, maybe=status != 0)
        shutil.rmtree(seen)
        assert purge_store(small.folders(root), target_of(what)).complete
        small.absent(gone, root=root)
        small.served(gone, root=root)
        for folder in small.folders(root):
            assert StoreFolder(folder).unfinished_purges() == StoreFolder(folder).strangers() == []
        shutil.rmtree(root)
        if status == 0:
            assert step > 25
            return
    raise AssertionError("it never ends")


def test_the_command_takes_all_folders(small: World, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(root) for root in small.folders()]
    capsys.readouterr()
    assert main(["purge", folders[0], "--tenant", "beta"]) == 2
    err = capsys.readouterr().err
    assert "are missing" in err and err.count("\n") == 1
    assert main(["purge", *folders, "--tenant", "beta", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paths"] == folders
    assert (found["complete"], found["partitions"][0]["records"]) == (True, 3)
    assert found["descriptions_removed"] == [BETA.digest.hex()]
    assert not list(small.root.rglob(f"{BETA.digest.hex()}.json"))
    small.served(small.of_namespace(BETA))
