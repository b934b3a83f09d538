"""The command line without an inference engine: version, options, sizes, files."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from kvterrace import __version__
from kvterrace.cli import main
from kvterrace.cli.console import fail, human_nbytes, write_json
from kvterrace.errors import ConfigError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvterrace {__version__}\n"


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "generate" in shown
    assert "demo" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "Missing option '--model'"),
        (["generate", "--modle", "x"], "No such option: --modle"),
        (["nonsense"], "No such command 'nonsense'"),
        (["demo", "--tokens", "many"], "Invalid value for '--tokens'"),
        pytest.param(
            ["demo", "--json", "/nonexistent/out.json"],
            "its folder does not exist",
            marks=pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the demo needs torch"),
        ),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_fail_is_always_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fail("a\n  b\n")
    assert capsys.readouterr().err == "kvterrace: a b\n"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert human_nbytes(nbytes) == text


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    write_json(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(ConfigError, match="give --json another place"):
        write_json(tmp_path / "missing" / "out.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, {"a": 1})
        assert json.loads(os.read(reader, 1 << 10)) == {"a": 1}
    finally:
        os.close(reader)
    assert [one.is_fifo() for one in tmp_path.iterdir()] == [True]
