"""A purge that ends at any step: by kill -9, half-way through a write, by a power cut. Nothing that stays is lost,
nothing comes back, and purging again completes it.

KVTERRACE_PURGE_STRIDE=1 tries every step in every way; by default each step is tried in one way, others in some.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.crash.purge_kit import ACME, BETA, World, chain, rich_world
from tests.crash.purge_steps import Shadow, purge_and_die, target_of, watched

from kvterrace.maintenance.purge import purge_store
from kvterrace.observe.folder import StoreFolder

#: Every how many steps one is tried, where not all are.
_STRIDE = int(os.environ.get("KVTERRACE_PURGE_STRIDE", "5"))


def small_world(root: Path) -> World:
    """What there is of everything, in few segments: a kill at every step stays affordable."""
    world = World(root.with_name(root.name + "-live"))
    with world.open() as store:
        world.put(store, "main", chain(ACME, 1, 2, 3), "a")
        world.put(store, "main", chain(BETA, 1, 2), "a")
        world.put(store, "main", chain(ACME, 7, 7), "c")
        world.put(store, "main", chain(ACME, 1, 2, 9), "b")
    with world.open() as store, world.open("other") as other:
        world.invalidate(store, "main", chain(ACME, 7, 7), 1)
        world.put(store, "main", chain(BETA, 5, 6), "d")
        world.put(store, "main", chain(ACME, 1, 2, 8, 8), "e")  # hangs on a, under another label, elsewhere
        world.put(other, "other", chain(ACME, 1, 2, 4), "g")
        world.put(other, "other", chain(BETA, 50), "h")
        world.crash(root)
    shutil.rmtree(root.with_name(root.name + "-live"))
    return world


def _files(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def gone_of(world: World, what: str) -> set[tuple[bytes, bytes]]:
    return world.of_namespace(BETA) if what.startswith("tenant") else world.of_label(what.partition(":")[2])


@pytest.mark.parametrize("how", ["whole", "torn"])
@pytest.mark.parametrize("what", ["tenant:beta", "sequence:a"])
def test_killed_at_every_step(tmp_path: Path, what: str, how: str) -> None:
    world = small_world(tmp_path / "kv")
    gone = gone_of(world, what)
    base = world.root
    for step in range(1, 1000, 1 if how == "whole" else _STRIDE):
        root = tmp_path / f"step{step}"
        shutil.copytree(base, root)
        status = purge_and_die(root, what, step, how)
        assert status in (-9, 0)
        # As it is: a store opened now has everything that stays. It seals and removes what it likes.
        seen = tmp_path / "seen"
        shutil.copytree(root, seen)
        world.served(gone, root=seen, maybe=status != 0)
        shutil.rmtree(seen)
        report = purge_store(root, target_of(what))
        assert report.complete, report
        world.absent(gone, root=root)
        world.served(gone, root=root)
        assert StoreFolder(root).unfinished_purges() == StoreFolder(root).strangers() == []
        shutil.rmtree(root)
        if status == 0:
            assert step > 25  # there were that many changes
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("what", ["tenant:beta", "sequence:a"])
def test_a_store_used_between_a_kill_and_the_next_purge(tmp_path: Path, what: str) -> None:
    """What a store does with the remains - seals, numbers on - keeps neither purge from its end."""
    world = small_world(tmp_path / "kv")
    gone = gone_of(world, what)
    base = world.root
    for step in range(2, 1000, _STRIDE):
        root = tmp_path / f"step{step}"
        shutil.copytree(base, root)
        status = purge_and_die(root, what, step, "whole")
        world.served(gone, root=root, maybe=status != 0)
        mine = World(root, list(world.records), {name: set(some) for name, some in world.live.items()})
        mine.chains = {name: list(some) for name, some in world.chains.items()}
        mine.contents = dict(world.contents)
        with mine.open() as store:
            mine.put(store, "main", chain(ACME, 70, 71), "late")
        report = purge_store(root, target_of(what))
        assert report.complete, report
        mine.absent(gone)
        mine.served(gone)
        shutil.rmtree(root)
        if status == 0:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("which", ["neither", "names", "contents"])
@pytest.mark.parametrize("what", ["tenant:beta", "sequence:a"])
def test_the_power_goes_at_any_step(tmp_path: Path, what: str, which: str) -> None:
    world = small_world(tmp_path / "kv")
    gone = gone_of(world, what)
    shadow = Shadow(world.root)
    images: list[Path] = []

    def after(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        shadow.after(name, arguments, result)
        if name in ("fdatasync", "fsync", "rename", "unlink"):
            images.append(tmp_path / f"image{len(images)}")
            shadow.image(which, images[-1])

    with watched(lambda *_: None, after):
        assert purge_store(world.root, target_of(what)).complete
    shadow.image("now", tmp_path / "now")
    assert _files(tmp_path / "now") == _files(world.root), "the shadow has missed something"
    assert len(images) > 20
    for image in images[:: max(1, _STRIDE // 2)]:
        seen = tmp_path / "seen"
        shutil.copytree(image, seen)
        world.served(gone, root=seen, maybe=True)
        shutil.rmtree(seen)
        assert purge_store(image, target_of(what)).complete
        world.absent(gone, root=image)
        world.served(gone, root=image)


def test_unsealed_segments_are_durable_before_anything_goes(tmp_path: Path) -> None:
    """They may hold copies that an earlier purge made and did not live to sync."""
    world = small_world(tmp_path / "kv")
    unsealed = {path for path in world.root.rglob("*.seg") if b"KVTFOOTR" not in path.read_bytes()}
    assert len(unsealed) == 2
    synced: set[Path] = set()
    opened: dict[int, Path] = {}

    def after(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            opened[result] = Path(arguments[0])
        elif name in ("fdatasync", "fsync"):
            synced.add(opened[arguments[0]])
        elif name == "rename" and (path := Path(arguments[0])).suffix == ".seg":
            others = {one for one in unsealed if one.parent == path.parent}
            assert others <= synced

    with watched(lambda *_: None, after):
        assert purge_store(world.root, target_of("tenant:beta")).complete


def test_killed_in_the_rich_world(tmp_path: Path) -> None:
    world = rich_world(tmp_path / "kv")
    gone = world.of_label("a")
    base = world.root
    for step in range(7, 1000, 6 * _STRIDE):
        root = tmp_path / f"step{step}"
        shutil.copytree(base, root)
        status = purge_and_die(root, "sequence:a", step, "torn")
        world.served(gone, root=root, maybe=status != 0)
        assert purge_store(root, target_of("sequence:a")).complete
        world.absent(gone, root=root)
        world.served(gone, root=root)
        shutil.rmtree(root)
        if status == 0:
            return
