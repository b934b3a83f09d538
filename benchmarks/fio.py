"""fio, as the measure of a drive: one plain file, O_DIRECT, at a fixed depth."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common import MIB
from benchmarks.pairs import Skip

from kvterrace.io.probe import why_not_uring

__all__ = ["Fio"]


class Fio:
    """Reads and writes `nbytes` in blocks of `block_nbytes`, `depth` of them in flight, from first to last."""

    def __init__(self, file: Path, nbytes: int, block_nbytes: int, depth: int) -> None:
        """Raises `Skip` where fio is missing."""
        if shutil.which("fio") is None:
            raise Skip("fio is not installed: apt install fio")
        self._command = [
            "fio", "--name=bench", f"--filename={file}", f"--size={nbytes}", f"--bs={block_nbytes}",
            f"--iodepth={depth}", f"--ioengine={'libaio' if why_not_uring() else 'io_uring'}", "--direct=1", "--thread",
            "--allow_file_create=1", "--output-format=json",
        ]  # fmt: skip
        self._nbytes = nbytes
        self._file = file

    def read(self) -> float:
        """Bytes a second by fio's own count, from its first request to the end of its last: without its start-up."""
        return self._run("read", "--invalidate=1")

    def write(self) -> float:
        """The same of writing a fresh file whose room was reserved before, until the drive says that it is durable."""
        self._file.unlink(missing_ok=True)
        return self._run("write", "--fallocate=posix", "--end_fsync=1")

    def _run(self, kind: str, *more: str) -> float:
        done = subprocess.run(
            [*self._command, f"--rw={kind}", *more], capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            raise Skip(f"fio cannot {kind} here: {done.stderr.strip()[-300:] or done.stdout.strip()[-300:]}")
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if job["error"] or job[kind]["io_bytes"] != self._nbytes:
            raise Skip(f"fio moved {job[kind]['io_bytes'] // MIB} of {self._nbytes // MIB} MiB (error {job['error']})")
        return float(self._nbytes / (job[kind]["runtime"] / 1e3))
