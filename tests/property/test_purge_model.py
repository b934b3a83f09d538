"""Any store, any target: what had to go is nowhere, and everything else is served (`World` is the model)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.crash.kit import segments
from tests.crash.purge_kit import ACME, BETA, Name, World, chain, padded
from tests.unit.store_images import PAGE, flip

from kvterrace import Namespace
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.selection import ByNamespace, BySequence, ByTenant, Target
from kvterrace.observe.verification import verify_store

LABELS = ("", "a", "b", "c")
#: Short paths over few steps: most of them share a beginning.
paths = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)
spaces = st.sampled_from((ACME, BETA))
puts = st.tuples(st.just("put"), spaces, paths, st.sampled_from(LABELS))
drops = st.tuples(st.just("invalidate"), spaces, paths, st.integers(0, 4))
#: What one opening of one partition does.
openings = st.tuples(st.sampled_from(("main", "other")), st.lists(puts | drops, min_size=1, max_size=6))
targets = st.sampled_from(("namespace", "tenant", "a", "b", "c"))


def act(world: World, partition: str, operations: list[tuple[object, ...]], crashed: Path | None) -> None:
    with world.open(partition) as store:
        for operation in operations:
            match operation:
                case ("put", Namespace() as space, tuple() as path, str() as label):
                    world.put(store, partition, chain(space, *path), label)
                case ("invalidate", Namespace() as space, tuple() as path, int() as start):
                    world.invalidate(store, partition, chain(space, *path), min(start, len(path) - 1))
                case _:
                    raise AssertionError(operation)
        if crashed is not None:
            world.crash(crashed)


def target_of(world: World, what: str) -> tuple[Target, set[Name]]:
    match what:
        case "namespace":
            return ByNamespace(ACME.digest.hex()), world.of_namespace(ACME)
        case "tenant":
            return ByTenant("beta"), world.of_namespace(BETA)
        case _:
            return BySequence(padded(what)), world.of_label(what)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(openings, min_size=1, max_size=4), targets, st.booleans(), st.booleans(), st.lists(openings, max_size=2)
)
def test_any_store_any_target(
    sessions: list[tuple[str, list[tuple[object, ...]]]],
    what: str,
    crash: bool,
    damage: bool,
    later: list[tuple[str, list[tuple[object, ...]]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "live")
        for number, (partition, operations) in enumerate(sessions):
            last = crash and number == len(sessions) - 1
            act(world, partition, operations, Path(folder) / "kv" if last else None)
        if damage:  # a footer: its segment is read record by record from then on
            for path in [path for partition in world.live for path in segments(world.root, partition)][::2]:
                flip(path, path.stat().st_size - PAGE + 30)
        target, gone = target_of(world, what)
        world.present(gone)
        report = purge_store(world.root, target)
        assert report.complete, report
        assert sum(one.records for one in report.partitions) == len([one for one in world.records if one[1] in gone])
        live = sum(len(names & gone) for names in world.live.values())
        assert sum(one.live_records for one in report.partitions) == live
        assert sum(one.damaged_records for one in report.partitions) == 0
        world.absent(gone)
        assert verify_store(world.root).faults == []
        again = purge_store(world.root, target)
        assert sum(one.segments for one in again.partitions) == 0
        world.served(gone)
        world.forget(gone)
        for partition, operations in later:  # a store goes on in what the purge has left
            act(world, partition, operations, None)
        world.served(set())
        target, gone = target_of(world, what)
        assert purge_store(world.root, target).complete
        world.absent(gone)
        world.served(gone)
