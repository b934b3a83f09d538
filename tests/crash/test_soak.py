"""The soak in a short form, and that it finds out what was broken on purpose. `make soak` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import ROOT

#: After these the store may stand still until it is opened again: tests/unit/test_reclaim_stuck.py.
_KNOWN = ("opening", "unlink-eperm", "folder-eio")


def _soak(tmp_path: Path, seconds: int, seed: int, *more: str) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.soak", "--dir", str(tmp_path), "--json", str(file), "--seed", str(seed)]
    command += ["--seconds", str(seconds), "--every", "0.3", *more, "--without", "drive-full"]
    for kind in _KNOWN:
        command += ["--without", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout + done.stderr


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    code, figures, said = _soak(tmp_path, 20, 1)
    assert code == 0 and figures["failures"] == [], said
    assert "PASSED" in said
    seen = figures["seen"]
    for name in ("get_dram_blocks", "get_ssd_blocks", "put_stored_blocks", "invalidations", "layered", "prefetches"):
        assert seen[name] > 0, f"{name}: the soak has not done what it is for"
    assert len(figures["injected"]) >= 5 and figures["lives"] >= 2
    assert figures["store"]["reclaimed_segments"] > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "kinds"),
    [
        ("accept-payloads", ("wrong bytes", "wrong-bytes in a child", "silent fault")),
        ("late-copy", ("wrong bytes", "wrong-bytes in a child", "late write")),
        ("miscount", ("count",)),
    ],
)
def test_a_soak_of_a_broken_library_fails(tmp_path: Path, mutation: str, kinds: tuple[str, ...]) -> None:
    code, _, said = _soak(tmp_path, 40, 1, "--mutate", mutation)
    assert code == 1 and "FAILED" in said
    assert any(f" x {kind}" in said for kind in kinds), said
