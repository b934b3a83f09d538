"""Which folders make one store of several drives: left out, added, back again, mixed up."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import (
    LAYOUT,
    MiB,
    all_hits,
    chain_of,
    checked,
    hits,
    opened,
    segments,
    snapshot,
    stored,
    until,
)

from kvterrace import ConfigError, NotAStoreError, Store, StoreUnusableError
from kvterrace.cli import main
from kvterrace.errors import StoreLockedError
from kvterrace.maintenance.pending import read_pending
from kvterrace.tiers import directory as directory_module
from kvterrace.tiers import drives as drives_module
from kvterrace.tiers import marker as marker_module
from kvterrace.tiers.directory import PartitionLock
from kvterrace.tiers.drives import Candidate, plan_drives
from kvterrace.tiers.marker import DriveRecord, Marker

#: Chains that are stored in all tests: large enough to lie on every drive, in batches of one block each.
CHAINS = [chain_of(number, 6) for number in range(8)]


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders for three drives; batches are small, so that each gets some."""
    real = Store.__init__

    def small(self: Store, **options: Any) -> None:
        from kvterrace.engine.dirty import WritePolicy

        real(self, **(options | {"writes": WritePolicy(after_s=options["writes"].after_s, batch_nbytes=8192)}))

    monkeypatch.setattr(Store, "__init__", small)
    return [tmp_path / name / "kv" for name in "abc"]


def record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "store.json").read_text())
    return found


def drive(root: Path) -> tuple[int, int, int]:
    """generation, index, count"""
    found = record(root)["drives"]
    return found["generation"], found["index"], found["count"]


def fill(paths: list[Path]) -> None:
    """Store `CHAINS`, of which each drive gets two blocks of the first six, at least."""
    with opened(paths, write_behind_s=60.0) as store:
        for number in itertools.count(5000):  # until each drive has a segment to write to
            stored(store, chain_of(number, len(paths)))
            assert store.flush()
            if all(one.live_nbytes for one in store.stats().drives):
                break
        for chain in CHAINS:
            stored(store, chain)
        assert store.flush()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    caplog.clear()
    return found


def found_blocks(store: Store) -> int:
    return sum(store.match(chain).blocks for chain in CHAINS)


# -- as it should be ---------------------------------------------------------------------------------------------------


def test_a_set_is_made_and_opened_in_any_order(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three)
    assert [drive(root) for root in three] == [(1, 0, 3), (1, 1, 3), (1, 2, 3)]
    records = [record(root) for root in three]
    assert len({one["drives"]["set"] for one in records}) == 1
    assert len({one["uuid"] for one in records}) == 3
    before = [(root / "store.json").read_bytes() for root in three]
    for paths in (three, three[::-1], [three[1], three[2], three[0]]):
        with opened(paths) as store:
            for chain in CHAINS:
                all_hits(store, chain)
            folders = [Path(one.folder).parents[1] for one in store.stats().drives]
            assert folders == three, "the drives are not in the order of their records"
    assert [(root / "store.json").read_bytes() for root in three] == before
    assert not warnings(caplog)


def test_one_path_stays_what_it_was(tmp_path: Path) -> None:
    for path in (tmp_path / "one", [tmp_path / "two"]):
        with opened(path) as store:
            stored(store, CHAINS[0])
    for name in ("one", "two"):
        assert record(tmp_path / name).keys() == {"format_version", "uuid", "created_unix_s"}


def test_partitions_share_a_set(three: list[Path]) -> None:
    with opened(three, partition="p0") as one, opened(three, partition="p1") as two:
        stored(one, CHAINS[0])
        stored(two, CHAINS[1])
    assert [drive(root)[0] for root in three] == [1, 1, 1]
    with opened(three, partition="p1") as store:
        all_hits(store, CHAINS[1])
        assert not store.match(CHAINS[0]).blocks


def test_processes_that_make_a_set_at_once_make_one(three: list[Path]) -> None:
    faults: list[BaseException] = []

    def make(number: int) -> None:
        try:
            with opened(three if number % 2 else three[::-1], partition=f"p{number}") as store:
                stored(store, CHAINS[number])
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert sorted(drive(root)[1] for root in three) == [0, 1, 2]
    assert {drive(root)[0] for root in three} == {1}


# -- left out, back, added ---------------------------------------------------------------------------------------------


def test_a_drive_left_out_is_emptied_when_it_comes_back(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three)
    with opened(three[:2]) as store:
        (said,) = warnings(caplog)
        assert "1 of its drives missing" in said
        assert 0 < found_blocks(store) < 48
        for chain in CHAINS:
            checked(store, chain)
            store.invalidate(chain)
        assert store.flush()
    assert [drive(root) for root in three] == [(2, 0, 2), (2, 1, 2), (1, 2, 3)]
    with opened(three[:2]):
        assert not warnings(caplog), "the set is what it was"
    assert segments(three[2])
    with opened(three) as store:
        (said,) = warnings(caplog)
        assert str(three[2]) in said and "was away" in said and "removed" in said and str(three[0]) in said
        assert found_blocks(store) == 0, "what was invalidated while the drive was away is back"
    assert [drive(root) for root in three] == [(3, 0, 3), (3, 1, 3), (3, 2, 3)]
    fill(three)
    with opened(three) as store:
        assert not warnings(caplog)
        assert found_blocks(store) == 48


def test_what_was_stored_while_a_drive_was_away_stays(three: list[Path]) -> None:
    fill(three)
    with opened(three[:2]) as store:
        for chain in CHAINS:
            stored(store, chain)
        assert store.flush()
    with opened(three) as store:
        for chain in CHAINS:
            all_hits(store, chain)


def test_one_drive_of_a_set_alone(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three)
    with opened(three[1]) as store:
        assert "2 of its drives missing" in warnings(caplog)[0]
        stored(store, chain_of(99, 3))
    assert drive(three[1]) == (2, 0, 1)
    with opened(three[1]) as store:
        all_hits(store, chain_of(99, 3))
        assert not warnings(caplog)
    with opened(three) as store:
        all_hits(store, chain_of(99, 3))
        assert str(three[0]) in warnings(caplog)[0]
        assert all(not one.live_nbytes for one in store.stats().drives[1:])


def test_drives_that_were_used_apart_do_not_mix(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """Both halves have the same generation, and put-sequence numbers that were given twice."""
    fill(three)
    with opened(three[0]) as store:
        for chain in CHAINS:
            store.invalidate(chain)
        assert store.flush()
    with opened(three[1:]) as store:
        stored(store, chain_of(50, 4))
        kept = [store.match(chain).blocks for chain in CHAINS]
    assert {drive(root)[0] for root in three} == {2}
    warnings(caplog)
    with opened(three) as store:
        assert [store.match(chain).blocks for chain in CHAINS] == kept
        all_hits(store, chain_of(50, 4))
        assert str(three[0]) in warnings(caplog)[0]
        assert not segments(three[0])


def test_a_drive_is_added(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three[:2])
    with opened(three) as store:
        (said,) = warnings(caplog)
        assert f"{three[2]} is a new drive" in said
        for chain in CHAINS:
            all_hits(store, chain)
        for number in range(20, 30):
            stored(store, chain_of(number, 6))
        assert store.flush()
        assert store.stats().drives[2].live_nbytes
    assert [drive(root) for root in three] == [(2, 0, 3), (2, 1, 3), (2, 2, 3)]
    with opened(three) as store:
        for number in range(20, 30):
            all_hits(store, chain_of(number, 6))
        assert not warnings(caplog)


def test_a_store_of_one_drive_becomes_one_of_two(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three[:1])
    uuid = record(three[0])["uuid"]
    with opened([three[1], three[0]]) as store:
        for chain in CHAINS:
            all_hits(store, chain)
        assert f"{three[1]} is a new drive" in warnings(caplog)[0]
        assert [Path(one.folder).parents[1] for one in store.stats().drives] == three[:2]
    assert record(three[0])["uuid"] == uuid
    assert [drive(root) for root in three[:2]] == [(1, 0, 2), (1, 1, 2)]


def test_an_empty_mount_point_is_not_taken_without_a_word(three: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    fill(three)
    three[1].rename(three[1].with_name("elsewhere"))
    three[1].mkdir()
    with opened(three):
        (said,) = warnings(caplog)
        assert f"{three[1]} is a new drive" in said and "mounted" in said and "1 of its drives missing" in said


def test_a_folder_that_is_gone_is_refused_by_name(three: list[Path]) -> None:
    fill(three)
    three[1].rename(three[1].with_name("elsewhere"))
    before = snapshot(three[0].parents[1])
    with pytest.raises(StoreUnusableError, match="leave it out of the list to go on without it") as caught:
        opened(three)
    assert str(three[1]) in str(caught.value) and "\n" not in str(caught.value)
    assert snapshot(three[0].parents[1]) == before
    with opened([three[0], three[2]]) as store:
        stored(store, CHAINS[0])  # where its first block was, is chance
        all_hits(store, CHAINS[0])


def test_a_drive_that_cannot_be_read_is_refused_by_name(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(three)
    before = snapshot(three[0].parents[1])
    open_file = os.open

    def failing(path: str | Path, *arguments: Any, **named: Any) -> int:
        if Path(path) == three[1] / "store.json":
            raise OSError(5, "Input/output error")
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StoreUnusableError, match="leave it out of the list to go on without it") as caught:
        opened(three)
    assert str(three[1]) in str(caught.value) and "Input/output" in str(caught.value)
    monkeypatch.setattr(os, "open", open_file)
    assert snapshot(three[0].parents[1]) == before
    assert opened(three).close(), "a lock was left behind"


def test_a_drive_that_cannot_be_written_is_refused_by_name(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(three)
    before = snapshot(three[0].parents[1])

    def refuse(partition: Path) -> PartitionLock:
        if three[1] in partition.parents:
            raise OSError(30, "Read-only file system")
        return PartitionLock(partition)

    monkeypatch.setattr(directory_module, "PartitionLock", refuse)
    with pytest.raises(StoreUnusableError, match=r"Read-only.*leave the drive out of the list") as caught:
        opened(three)
    assert str(three[1]) in str(caught.value)
    monkeypatch.undo()
    assert snapshot(three[0].parents[1]) == before
    with opened(three) as store:
        assert found_blocks(store) == 48


# -- mixed up ----------------------------------------------------------------------------------------------------------


def test_a_drive_of_another_store_is_refused(three: list[Path], tmp_path: Path) -> None:
    fill(three)
    others = [tmp_path / name / "kv" for name in "xy"]
    fill(others)
    before = snapshot(tmp_path)
    for paths in ([*three, others[0]], [others[1], *three], [three[0], others[0]]):
        with pytest.raises(StoreUnusableError, match="another store") as caught:
            opened(paths)
        assert str(paths[0]) in str(caught.value)
    assert snapshot(tmp_path) == before


def test_a_store_of_its_own_is_refused(three: list[Path], tmp_path: Path) -> None:
    fill(three[:2])
    fill(three[2:])
    with opened(tmp_path / "d") as store:
        stored(store, CHAINS[0])
    before = snapshot(tmp_path)
    for paths in (three, [three[2], tmp_path / "d"]):
        with pytest.raises(StoreUnusableError, match="a store of its own"):
            opened(paths)
    assert snapshot(tmp_path) == before


def test_a_copy_of_a_drive_is_refused(three: list[Path], tmp_path: Path) -> None:
    fill(three)
    shutil.copytree(three[1], tmp_path / "copy")
    before = snapshot(tmp_path)
    with pytest.raises(StoreUnusableError, match="a copy of"):
        opened([*three, tmp_path / "copy"])
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda one: [], "0 folders"),
        (lambda one: [one] * 128, "128 folders"),
        (lambda one: [one, one], "one folder"),
        (lambda one: [one, one.parent / "." / one.name], "one folder"),
        (lambda one: [one, one / "deeper"], "lies in the other"),
        (lambda one: [one / "deeper", one], "lies in the other"),
    ],
)
def test_paths_that_cannot_be_drives(three: list[Path], make: Callable[[Path], list[Path]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(make(three[0]))
    assert not three[0].exists()


def test_links_to_one_folder_are_one_drive(three: list[Path], tmp_path: Path) -> None:
    fill(three[:2])
    (tmp_path / "link").symlink_to(three[1])
    with pytest.raises(ConfigError, match="one folder"):
        opened([three[0], three[1], tmp_path / "link"])
    with opened([three[0], tmp_path / "link"]) as store:
        assert found_blocks(store) == 48


def test_too_little_room_for_so_many_drives(three: list[Path]) -> None:
    with pytest.raises(ConfigError, match="3 drive"):
        opened(three, ssd_bytes=2 * MiB)
    with opened(three, ssd_bytes=3 * MiB) as store:
        assert [one.nbytes for one in store.stats().drives] == [MiB] * 3


def test_a_folder_with_other_things_is_no_drive(three: list[Path]) -> None:
    fill(three[:2])
    three[2].mkdir(parents=True)
    (three[2] / "photo.jpg").write_text("x")
    before = snapshot(three[0].parents[1])
    with pytest.raises(NotAStoreError, match="other files"):
        opened(three)
    assert snapshot(three[0].parents[1]) == before


@pytest.mark.parametrize(
    "drives", [1, {}, {"set": 1}, {"set": "x", "generation": 1, "change": "x", "index": 0, "count": 1}]
)
def test_a_record_that_cannot_be_believed(three: list[Path], drives: object) -> None:
    fill(three[:2])
    (three[0] / "store.json").write_text(json.dumps(record(three[0]) | {"drives": drives}))
    for paths in (three[:2], three[:1]):
        with pytest.raises(NotAStoreError, match="damaged"):
            opened(paths)


@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("name", ["00000000", "7ffffffe"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_stray_file_only_takes_room(three: list[Path], drives: int, name: str, empty: bool) -> None:
    """No number of it counts: 0 is none, and after the last there would be none left to write to."""
    paths = three[:drives]
    fill(paths)
    folder = paths[-1] / "partitions" / "main"
    shutil.copyfile(next(folder.glob("*.seg")), folder / f"{name}.seg")
    if empty:
        (folder / f"{name}.seg").write_bytes(b"")
    for number in range(200, 203):
        with opened(paths) as store:
            assert found_blocks(store) == 48
            stored(store, chain_of(number, 6))
            assert store.flush()
        with opened(paths) as store:
            all_hits(store, chain_of(number, 6))


@pytest.mark.parametrize("what", ["pipe", "huge", "drives"])
def test_a_marker_that_is_none_is_refused_at_once(three: list[Path], what: str) -> None:
    fill(three[:2])
    path = three[0] / "store.json"
    if what == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "huge":
        path.write_text(path.read_text() + " " * (64 << 10))
    else:
        path.write_text(json.dumps(record(three[0]) | {"drives": record(three[0])["drives"] | {"count": 10**19}}))
    with pytest.raises(NotAStoreError, match="damaged"):
        opened(three[:2])


def test_a_pending_purge_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "purge.pending")
    with pytest.raises(StoreUnusableError, match="damaged"):
        read_pending(tmp_path)


@pytest.mark.parametrize("created", [float("nan"), float("inf"), -1e300, 1e308])
def test_a_store_made_at_no_time_can_be_inspected(three: list[Path], created: float) -> None:
    fill(three[:1])
    (three[0] / "store.json").write_text(json.dumps(record(three[0]) | {"created_unix_s": created}))
    assert main(["inspect", str(three[0])]) == 0


# -- locks and crashes -------------------------------------------------------------------------------------------------


def test_a_drive_in_use_is_refused_and_nothing_stays_locked(three: list[Path]) -> None:
    with opened(three) as store:
        stored(store, CHAINS[0])
        for paths in (three, three[:1], three[1:]):
            with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
                opened(paths)
    assert [drive(root)[0] for root in three] == [1, 1, 1]
    with opened(three) as store:
        all_hits(store, CHAINS[0])


def test_a_stale_drive_is_not_emptied_under_another_process(three: list[Path]) -> None:
    with opened(three, partition="p0") as other:
        stored(other, CHAINS[0])
        assert other.flush()
        with opened(three[:2], partition="p1") as store:
            stored(store, CHAINS[1])
        before = segments(three[2], "p0")
        with pytest.raises(StoreLockedError, match=str(three[2])):
            opened(three, partition="p1")
        assert segments(three[2], "p0") == before
        all_hits(other, CHAINS[0])
    with opened(three, partition="p1") as store:
        all_hits(store, CHAINS[1])
    assert not segments(three[2], "p0"), "an old segment of another partition could come back"


@pytest.mark.parametrize("given", ["added", "left out", "back"])
@pytest.mark.parametrize("after", range(7))
def test_a_crash_while_the_records_are_written(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, after: int, given: str
) -> None:
    """Whatever was written of a new generation, the next open finds all blocks that it would have found."""
    fill(three[:2] if given == "added" else three)
    if given == "back":
        with opened(three[:2]):
            pass
    paths = three[:2] if given == "left out" else three
    copy = three[0].parents[1] / "copy"
    for number, root in enumerate(paths):
        if root.exists():
            shutil.copytree(root, copy / str(number) / "kv")
    with opened([copy / str(number) / "kv" for number in range(len(paths))]) as store:
        expected = found_blocks(store)
    written: list[Path] = []
    for name in ("propose_drives", "write_drives", "make_root"):
        function = getattr(drives_module, name)
        monkeypatch.setattr(
            drives_module, name, lambda root, *rest, function=function: _step(written, after, function, root, *rest)
        )
    with contextlib.suppress(KeyboardInterrupt):
        opened(paths).close()
    monkeypatch.undo()
    for _ in range(2):
        with opened(paths) as store:
            assert found_blocks(store) == expected
            for chain in CHAINS:
                checked(store, chain)


@pytest.mark.parametrize("full", range(2))
def test_a_full_drive_is_refused_and_nothing_has_changed(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """Written drive by drive, the records made those that got none look as if they had been away."""
    fill(three)
    real = marker_module.write_whole

    def write(path: Path, *rest: Any, **options: Any) -> None:
        if path.parent == three[full]:
            raise OSError(28, "No space left on device")
        real(path, *rest, **options)

    monkeypatch.setattr(marker_module, "write_whole", write)
    with pytest.raises(StoreUnusableError, match="No space left"):
        opened(three[:2])
    monkeypatch.undo()
    with opened(three) as store:
        assert found_blocks(store) == 48
    assert [drive(root)[0] for root in three] == [1, 1, 1]


def test_a_proposal_that_came_to_nothing_is_not_believed_later(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(three)
    written: list[Path] = []
    real = marker_module.propose_drives
    monkeypatch.setattr(drives_module, "propose_drives", lambda root, *rest: _step(written, 1, real, root, *rest))
    with pytest.raises(KeyboardInterrupt):
        opened(three[:2])
    monkeypatch.undo()
    with opened(three[1:]) as store:
        stored(store, CHAINS[0])
    with opened(three) as store:
        assert found_blocks(store) < 48, "the first drive was away"
    assert not segments(three[0]) or len({drive(root)[0] for root in three}) == 1


def _step(written: list[Path], after: int, function: Any, root: Path, *rest: Any) -> None:
    if len(written) == after:
        raise KeyboardInterrupt
    written.append(root)
    function(root, *rest)


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tools_look_at_one_drive_and_call_nothing_damage(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    fill(three)
    counted = 0
    for number, root in enumerate(three):
        before = snapshot(root)
        capsys.readouterr()
        assert main(["verify", str(root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["clean"]
        assert main(["inspect", str(root), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["drives"] == record(root)["drives"] and found["drives"]["index"] == number
        (partition,) = found["partitions"]
        assert not found["problems"] and not partition["problems"]
        assert not any(one["problems"] for one in partition["segments"])
        counted += partition["blocks"] + partition["orphan_blocks"]
        assert partition["orphan_blocks"], "the test is about chains that begin elsewhere"
        assert main(["inspect", str(root)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"drive {number + 1} of 3" in out and "on other drives, or nowhere" in out and "never matched" not in out
        assert snapshot(root) == before
    with opened(three) as store:
        assert counted == store.stats().blocks >= 48


# -- the rule by itself ------------------------------------------------------------------------------------------------


def _candidate(
    name: str, *, set_id: str = "5", generation: int = 1, change: str = "1", index: int, count: int
) -> Candidate:
    return Candidate(
        Path(name), Marker(name.encode(), DriveRecord(set_id * 32, generation, change * 32, index, count)), True
    )


def test_the_newest_generation_counts_and_of_equals_the_larger_part() -> None:
    old = _candidate("old", generation=4, index=0, count=1)
    left = [_candidate(f"left{n}", generation=5, change="a", index=n, count=2) for n in range(2)]
    right = [_candidate(f"right{n}", generation=5, change="b", index=n, count=3) for n in (2, 0, 1)]
    plan = plan_drives([old, *left, *right])
    assert [one.root.name for one in plan.order[:3]] == ["right0", "right1", "right2"]
    assert {one.root.name for one in plan.stale} == {"old", "left0", "left1"}
    assert plan.missing == 0 and not plan.new
    assert [(one.generation, one.index, one.count) for one in plan.records] == [(6, at, 6) for at in range(6)]
    assert len({one.change_id for one in plan.records}) == 1 and plan.records[0].change_id not in ("a" * 32, "b" * 32)
    plan = plan_drives([*left, *right[:2]])
    assert plan.order[0] is left[0] and plan.missing == 0, "of equals the one given first"
    plan = plan_drives(right[:2])
    assert plan.missing == 1 and plan.records[0].generation == 6


# -- a drive that hangs, in earnest ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("python_engine")
def test_copies_go_on_while_the_first_drive_hangs(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drive's engine makes the copies in memory; its threads for those are no threads for I/O."""
    paths = three[:2]
    fill(paths)
    go_on, stuck = threading.Event(), threading.Event()
    calls = {name: getattr(os, name) for name in ("preadv", "pwritev", "fdatasync")}

    def hanging(name: str) -> Callable[..., Any]:
        def call(fd: int, *arguments: Any) -> Any:
            if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(paths[0]):
                stuck.set()
                go_on.wait()
            return calls[name](fd, *arguments)

        return call

    store = opened(paths, dram_bytes=16 * MiB)
    try:
        for name in calls:
            monkeypatch.setattr(os, name, hanging(name))
        outs = [bytearray(6 * LAYOUT.block_nbytes) for _ in CHAINS]
        reads = [store.get(chain, out, deadline_s=0.5) for chain, out in zip(CHAINS, outs, strict=True)]
        for number in range(100, 160):  # more than the threads and the queue of one drive take
            stored(store, chain_of(number, 6))
            all_hits(store, chain_of(number, 6))
        assert stuck.is_set()
        outcomes = [one for transfer in reads for one in store.wait(transfer, 30.0)]
        assert 0 < sum(hits(outcomes)) < 48, "one drive's blocks come, the other's do not"
        until(lambda: store.stats().drives[1].live_nbytes > 250 * 8192)
        for number in range(100, 160):
            all_hits(store, chain_of(number, 6))
        assert not store.close(0.5)
        with opened(paths[1]) as other:  # the healthy drive is given back
            assert other.stats().blocks >= 0
        with pytest.raises(StoreLockedError):
            opened(paths[0])
    finally:
        go_on.set()
    until(lambda: all(not one.is_alive() for _, engine in store._drives for one in engine._threads))  # type: ignore[attr-defined]
    store._drives[0][0].close()
