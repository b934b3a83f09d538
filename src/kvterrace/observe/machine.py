"""What this machine and a folder on it let a store do: each finding with its remedy. Changes nothing that stays."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvterrace.format import checksum
from kvterrace.io import probe
from kvterrace.io.base import PAGE_NBYTES
from kvterrace.io.descriptors import set_direct
from kvterrace.policy.directories import default_policy

__all__ = ["Finding", "State", "examine"]

#: A store smaller than this holds too little to be worth its while.
_FREE_NBYTES = 1 << 30


class State(StrEnum):
    """How a finding is meant."""

    GOOD = "good"
    #: Worth knowing; it costs little or nothing.
    NOTE = "note"
    #: A store is slow with it, or cannot work.
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at; stable, for programs.
        state: how it is.
        text: what was seen.
        remedy: what to do; "" if nothing need be done.
        value: the figure behind it, if it has one: bytes, or a name.
    """

    name: str
    state: State
    text: str
    remedy: str = ""
    value: str | int | None = None


def examine(folder: Path) -> list[Finding]:
    """Look at the machine, and at the drive of `folder` (or of its nearest parent that exists).

    Raises ConfigError if the environment names an engine that does not work here.
    """
    return [_kernel(), _engine(), _eviction(), _memlock(), _crc(), *_folder(folder)]


def _kernel() -> Finding:
    release = platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    if platform.system() != "Linux":
        return Finding(
            "kernel", State.PROBLEM, f"{platform.system()} {release}", "kvterrace runs on Linux only", release
        )
    if numbers < [5, 6]:
        return Finding("kernel", State.NOTE, f"Linux {release} is too old for io_uring", "use 5.6 or newer", release)
    return Finding("kernel", State.GOOD, f"Linux {release}", value=release)


def _engine() -> Finding:
    choice = probe.choose()
    text = f"{choice.name}: {choice.reason}"
    if choice.degraded:
        remedy = "install with a C++ compiler at hand, or from a wheel"
        return Finding("engine", State.PROBLEM, text, remedy, choice.name)
    if choice.name != "uring" and not choice.forced:
        remedy = "allow io_uring_setup, io_uring_enter and io_uring_register, if the drive does more than 2 GB/s"
        return Finding("engine", State.NOTE, text, remedy, choice.name)
    return Finding("engine", State.GOOD, text, value=choice.name)


def _eviction() -> Finding:
    name = default_policy().name
    if name == "lru":
        text = "least recently used first: the return-index policy is in the extension module, which is not there"
        return Finding("eviction", State.NOTE, text, "install with a C++ compiler at hand, or from a wheel", name)
    return Finding("eviction", State.GOOD, f"{name}: by when a sequence is likely to come back", value=name)


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", State.GOOD, "no limit on locked memory")
    text = f"{soft:,} B of memory may be locked: the kernel pins a DRAM tier beyond that anew for each transfer"
    return Finding("memlock", State.NOTE, text, "ulimit -l unlimited, or LimitMEMLOCK=infinity", soft)


def _crc() -> Finding:
    if checksum.hardware():
        return Finding("crc32c", State.GOOD, "the CPU's CRC32C instruction is used")
    return Finding(
        "crc32c",
        State.PROBLEM,
        "CRC32C is computed in software: every read is checked, at about a tenth of the speed",
        "use a CPU with SSE4.2, or the CRC extension of ARMv8",
    )


def _folder(folder: Path) -> list[Finding]:
    place = next((one for one in (folder.absolute(), *folder.absolute().parents) if one.exists()), folder)
    if not place.is_dir():
        return [Finding("folder", State.PROBLEM, f"{place} is not a folder", "name another place")]
    free_nbytes = _free_nbytes(place)
    if free_nbytes < _FREE_NBYTES:
        space = Finding("free_space", State.PROBLEM, f"{free_nbytes:,} B are free at {place}", "make room", free_nbytes)
    else:
        space = Finding("free_space", State.GOOD, f"{free_nbytes:,} B are free at {place}", value=free_nbytes)
    return [_direct(place), space]


def _free_nbytes(place: Path) -> int:
    info = os.statvfs(place)
    return info.f_bavail * info.f_frsize


def _direct(place: Path) -> Finding:
    try:
        direct = _takes_direct(place)
    except OSError as error:
        return Finding(
            "direct_io",
            State.PROBLEM,
            f"a file in {place} cannot be made and used: {error.strerror or error}",
            "give the user of the store the right to write there, or name another place",
        )
    if direct:
        return Finding("direct_io", State.GOOD, f"{place} takes O_DIRECT: the page cache is left alone")
    return Finding(
        "direct_io",
        State.PROBLEM,
        f"{place} refuses O_DIRECT: all goes through the page cache, and is copied once more",
        "use ext4 or XFS on a local drive",
    )


def _takes_direct(place: Path) -> bool:
    """Whether a page can be written to a file there past the page cache. The file is removed again."""
    fd, name = tempfile.mkstemp(prefix=".kvterrace-doctor-", dir=place)
    try:
        if not set_direct(fd):
            return False
        with contextlib.closing(mmap.mmap(-1, PAGE_NBYTES)) as page:
            return os.pwrite(fd, page, 0) == PAGE_NBYTES
    finally:
        os.close(fd)
        Path(name).unlink()
