"""`kvterrace inspect` and `kvterrace bench store`, as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.store_images import NAMESPACE, RECORD, chain, opened, put, sealed_store, segments, snapshot

from kvterrace import KVLayout, Namespace
from kvterrace.buffers import Bytes
from kvterrace.cli import bench_raw, main


def test_inspect_prints_the_documented_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    capsys.readouterr()
    assert main(["inspect", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kvterrace.inspect/1"
    (namespace,) = found["namespaces"]
    assert namespace["digest"] == NAMESPACE.digest.hex()
    assert (namespace["model"], namespace["tenant"], namespace["block_nbytes"]) == ("weights-1", "acme", 8192)
    (partition,) = found["partitions"]
    assert (partition["blocks"], partition["live_nbytes"]) == (3, 3 * RECORD)
    assert partition["segment_states"] == {"sealed": 1, "unsealed": 0, "damaged": 0, "unreadable": 0, "newer": 0}
    assert partition["segments"][0]["file_nbytes"] == segments(root)[0].stat().st_size
    documented = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    names = set(found) | set(namespace) | set(partition) | set(partition["segments"][0])
    names |= set(partition["namespaces"][0]) | set(partition["largest_runs"][0])
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_inspect_shows_tables_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv"
    evil = Namespace("\x1b[31mred [bold]x[/]", KVLayout(2, 1, 64, "float16", 16), tenant="t\r\n")
    with opened(root) as store:
        put(store, chain(16 * 3), sequence=b"conv-1")
        put(store, chain(16 * 2, namespace=evil), sequence=b"\xff\x1b[2J")
    before = snapshot(root)
    capsys.readouterr()
    assert main(["inspect", str(root)]) == 0
    out = capsys.readouterr().out
    assert snapshot(root) == before
    assert "weights-1" in out
    assert "2 layers x 1 KV heads x 64, float16, 16 tokens a block" in out
    assert "conv-1" in out
    assert "[bold]x" in out
    assert "\x1b" not in out
    assert "\r" not in out


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "/nowhere/at/all"], ["inspect", "/proc"], ["bench"]])
def test_bad_input_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("kvterrace: ")
    assert streams.err.count("\n") == 1


def test_bench_measures_verifies_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive, figures = tmp_path / "drive", tmp_path / "figures.json"
    drive.mkdir()
    arguments = ["bench", "store", "--dir", str(drive), "--size", "8MiB", "--block", "256KiB", "--rounds", "2"]
    assert main([*arguments, "--json", str(figures)]) == 0
    assert list(drive.iterdir()) == []
    found = json.loads(figures.read_text())
    assert found["schema"] == "kvterrace.bench-store/1"
    assert (found["blocks"], found["block_nbytes"], found["rounds"]) == (32, 256 << 10, 2)
    assert found["verified_nbytes"] == 2 * 4 * (8 << 20)  # raw read, cold, DRAM, copy
    assert found["other_tier_blocks"] == 0
    assert set(found["phases"]) == {"put", "raw_write", "get_cold", "raw_read", "get_dram", "copy"}
    for phase in found["phases"].values():
        assert len(phase["gb_per_s_by_round"]) == 2
        for rate, elapsed_s in zip(phase["gb_per_s_by_round"], phase["elapsed_s_by_round"], strict=True):
            assert rate == pytest.approx((8 << 20) / 1e9 / elapsed_s)
        assert phase["gb_per_s"] == pytest.approx(sum(phase["gb_per_s_by_round"]) / 2)
        assert 0 < phase["batch_p50_s"] <= phase["batch_p99_s"] <= max(phase["elapsed_s_by_round"])
        assert phase["batches"] == 2
    put_rates, raw_rates = (found["phases"][name]["gb_per_s_by_round"] for name in ("put", "raw_write"))
    ratios = [one / other for one, other in zip(put_rates, raw_rates, strict=True)]
    assert found["ratios"]["put"] == pytest.approx(sum(ratios) / 2)
    out = capsys.readouterr().out
    assert re.search(r"get from SSD, cold .* %", out)
    assert "all 64.0 MiB that were read equal what was written" in out
    documented = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    names = set(found) | set(found["phases"]["put"])
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_bench_takes_no_wrong_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench_raw.RawFile.read

    def short(self: bench_raw.RawFile, memory: Bytes, offset: int) -> None:
        whole(self, memory, offset)
        memory[-1] ^= 1

    monkeypatch.setattr(bench_raw.RawFile, "read", short)
    assert main(["bench", "store", "--dir", str(tmp_path), "--size", "2MiB", "--rounds", "1"]) == 2
    assert "bytes differ from what was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "nonsense"],
        ["--size", "0"],
        ["--size", "-1"],
        ["--size", "1MiB"],
        ["--size", "900TiB"],
        ["--block", "0"],
        ["--block", "100KiB"],
        ["--block", "1GiB", "--size", "1GiB"],
        ["--rounds", "0"],
        ["--dir", "/nowhere"],
        ["--json", "/nowhere/x.json"],
        ["--unknown"],
    ],
)
def test_bench_refuses_what_cannot_be(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "store", *options]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("kvterrace: ")
    assert streams.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_bench_cleans_up_when_it_is_ended(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "kvterrace.cli", "bench", "store", "--dir", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--size", "16MiB", "--rounds", "1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    limit_s = time.monotonic() + 30
    while not list(tmp_path.glob("*/0/store/partitions/main/*.seg")):
        assert process.poll() is None
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
