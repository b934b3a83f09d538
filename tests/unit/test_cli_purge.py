"""`kvterrace purge`, as a user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.crash.purge_kit import ACME, BETA, World, padded, rich_world

from kvterrace.cli import main
from kvterrace.cli.purge import EPILOGUE


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    return rich_world(tmp_path_factory.mktemp("world") / "kv")


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    shutil.copytree(built.root, tmp_path / "kv")
    return World(tmp_path / "kv", built.records, built.live, built.chains, built.contents)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["purge", *map(str, arguments)])
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return status, streams.out


def test_the_documented_json(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = told(capsys, world.root, "--sequence", "a", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["complete"], found["dry_run"]) == (0, "kvterrace.purge/1", True, False)
    main_, other = found["partitions"]
    assert (main_["name"], main_["records"], main_["live_records"], main_["record_nbytes"]) == (
        "main",
        14,
        12,
        14 * 8192,
    )
    assert (other["name"], other["copy_records"], other["descendant_records"]) == ("other", 3, 2)
    documented = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    names = set(found) | set(main_) | {"where", "what", "digest", "records", "record_nbytes"}
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []
    world.absent(world.of_label("a"))


def test_tables_say_what_went(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = told(capsys, world.root, "--tenant", "beta", "--dry-run")
    assert status == 0
    assert "would be purged" in out and "free room" in out
    world.served(set())
    status, out = told(capsys, world.root, "--tenant", "beta")
    rows = [line for line in out.splitlines() if line.startswith("│")]
    records = [one for one in world.records if one[1] in world.of_namespace(BETA)]
    assert [row.split("│")[2].strip() for row in rows] == [
        str(sum(one[0] == name for one in records)) for name in ("main", "other")
    ]
    assert f"description of namespace {BETA.digest.hex()}: removed" in out
    world.absent(world.of_namespace(BETA))
    status, out = told(capsys, world.root, "--tenant", "beta")
    assert (status, "no record of it was found" in out) == (0, True)


def test_a_label_that_is_no_text(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = told(capsys, world.root, "--sequence", f"hex:{padded('b').hex()}", "--json")
    assert status == 0
    assert sum(one["records"] for one in json.loads(out)["partitions"]) == len(
        [one for one in world.records if one[1] in world.of_label("b")]
    )


def test_what_cannot_be_purged_is_status_1_and_listed(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.root / "namespaces" / f"{BETA.digest.hex()}.json").unlink()
    status, out = told(capsys, world.root, "--tenant", "beta")
    assert status == 1
    number = len([one for one in world.records if one[1][0] == BETA.digest])
    assert f"! namespace {BETA.digest.hex()} has no description" in out
    assert f"{number} records" in out and "--namespace" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--tenant", "acme", "--sequence", "a"],
        ["--tenant", ""],
        ["--sequence", "x" * 17],
        ["--sequence", "hex:xyz"],
        ["--namespace", "../.."],
        ["--namespace", ACME.digest.hex() + "00"],
        ["--tenant", "acme", "--partition", "nowhere"],
        ["--tenant", "acme", "--partition", "../main"],
        ["--tenant", "acme", "--force"],
    ],
)
def test_bad_input_is_one_line_and_status_2(
    world: World, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["purge", str(world.root), *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("kvterrace: ")
    assert streams.err.count("\n") == 1
    assert streams.out == ""


def test_folders_that_are_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("/nowhere/at/all", str(tmp_path), "/proc"):
        assert main(["purge", path, "--tenant", "acme"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_is_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with world.open("other"):
        capsys.readouterr()
        assert main(["purge", str(world.root), "--tenant", "acme"]) == 2
        err = capsys.readouterr().err
    assert "is being written by process" in err and "purge again" in err
    assert err.count("\n") == 1
    world.served(set())


def test_help_names_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["purge", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert EPILOGUE in shown
    for word in ("SSD", "snapshots", "backups", "copy-on-write", "encrypted"):
        assert word in EPILOGUE


def test_inspect_and_verify_tell_of_an_interrupted_purge(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    segment = next(world.root.glob("partitions/main/*.seg"))
    segment.rename(segment.with_name(segment.name + ".gone"))
    for command in ("inspect", "verify"):
        capsys.readouterr()
        assert main([command, str(world.root)]) == 0
        assert "interrupted: run the purge again" in capsys.readouterr().out
    status, out = told(capsys, world.root, "--sequence", "nobody's")
    assert status == 0
    assert f"{segment.name}.gone: left by an interrupted purge; overwritten and removed" in out
    assert not list(world.root.rglob("*.gone"))
