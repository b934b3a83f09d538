"""`kvterrace doctor`: findings, remedies, exit statuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvterrace.cli import main
from kvterrace.format import checksum
from kvterrace.io import probe
from kvterrace.io.probe import Choice
from kvterrace.observe import machine
from kvterrace.observe.machine import State, examine

Space = namedtuple("Space", "f_bavail f_frsize")
Named = namedtuple("Named", "name")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a fault, so that each test makes its own."""
    monkeypatch.setattr(probe, "choose", lambda: Choice("uring", "io_uring works here"))
    monkeypatch.setattr(checksum, "hardware", lambda: True)
    monkeypatch.setattr(machine, "default_policy", partial(Named, "return-index"))
    monkeypatch.setattr(machine, "set_direct", lambda _: True)
    monkeypatch.setattr(os, "statvfs", lambda _: Space(1 << 20, 4096))
    monkeypatch.setattr("platform.release", lambda: "6.1.0-13-amd64")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_eviction_without_the_extension_module_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(tmp_path)["eviction"][0] is State.GOOD
    monkeypatch.setattr(machine, "default_policy", partial(Named, "lru"))
    state, remedy = found(tmp_path)["eviction"]
    assert state is State.NOTE and "compiler" in remedy


def found(folder: Path) -> dict[str, tuple[State, str]]:
    return {one.name: (one.state, one.remedy) for one in examine(folder)}


def test_a_sound_machine_is_all_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in lines] == [
        ["good", name] for name in ("kernel", "engine", "eviction", "memlock", "crc32c", "direct_io", "free_space")
    ]
    assert f"4,294,967,296 B are free at {tmp_path}" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["path"], told["good"]) == ("kvterrace.doctor/1", str(tmp_path), True)
    values = {one["name"]: one["value"] for one in told["findings"]}
    assert values["engine"] == "uring"
    assert values["free_space"] == 4 << 30
    assert values["kernel"] == "6.1.0-13-amd64"


@pytest.mark.parametrize(
    ("choice", "state"),
    [
        (Choice("posix", "not built"), State.PROBLEM),
        (Choice("posix", "asked for", forced=True), State.GOOD),
        (Choice("native-posix", "forbidden"), State.NOTE),
        (Choice("native-posix", "asked for", forced=True), State.GOOD),
    ],
)
def test_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: Choice, state: State) -> None:
    monkeypatch.setattr(probe, "choose", lambda: choice)
    seen, remedy = found(tmp_path)["engine"]
    assert (seen, bool(remedy)) == (state, state is not State.GOOD)
    assert main(["doctor", str(tmp_path)]) == (1 if state is State.PROBLEM else 0)


@pytest.mark.parametrize(
    ("release", "state"), [("5.5.19", State.NOTE), ("5.6.0-rc1", State.GOOD), ("10.0", State.GOOD)]
)
def test_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, state: State) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert found(tmp_path)["kernel"][0] is state


def test_a_limit_on_locked_memory_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    (memlock,) = [one for one in examine(tmp_path) if one.name == "memlock"]
    assert (memlock.state, memlock.value) == (State.NOTE, 8 << 20)
    assert main(["doctor", str(tmp_path)]) == 0


def test_software_checksums_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checksum, "hardware", lambda: False)
    assert found(tmp_path)["crc32c"][0] is State.PROBLEM


def test_a_drive_that_refuses_direct_io(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "set_direct", lambda _: False)
    assert main(["doctor", str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert line == (
        f"problem  direct_io: {tmp_path} refuses O_DIRECT: all goes through the page cache, and is copied once more "
        "-> use ext4 or XFS on a local drive"
    )
    assert list(tmp_path.iterdir()) == []


def test_little_room_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: Space((1 << 30) // 4096 - 1, 4096))
    assert found(tmp_path)["free_space"] == (State.PROBLEM, "make room")


def test_a_folder_that_does_not_exist_yet_is_looked_at_by_its_parent(tmp_path: Path) -> None:
    (space,) = [one for one in examine(tmp_path / "a" / "b") if one.name == "free_space"]
    assert f"at {tmp_path}" in space.text
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_right_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert found(tmp_path / "file")["folder"][0] is State.PROBLEM

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    state, remedy = found(tmp_path)["direct_io"]
    assert state is State.PROBLEM
    assert "right to write" in remedy


def test_an_engine_that_the_environment_cannot_have_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("KVTERRACE_ENGINE", "spdk")
    assert main(["doctor", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("kvterrace: KVTERRACE_ENGINE=spdk: no such engine")


def test_on_the_real_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("KVTERRACE_ENGINE", raising=False)
    seen = {one.name: one for one in examine(tmp_path)}
    assert seen["engine"].value == probe.choose().name
    assert seen["kernel"].value == os.uname().release
    with (tmp_path / "a").open("wb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            takes = True
        except OSError:
            takes = False
    assert (seen["direct_io"].state is State.GOOD) == takes
