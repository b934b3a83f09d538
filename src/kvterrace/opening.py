"""From options to an open store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvterrace.clock import SystemClock
from kvterrace.config import parse_nbytes, require_flag, require_seconds
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.space import MIN_CAP_NBYTES, MOST_VOLUMES
from kvterrace.errors import ConfigError
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoEngine
from kvterrace.io.probe import best_engine, choose
from kvterrace.policy.admission import default_daily_nbytes
from kvterrace.policy.directories import default_policy
from kvterrace.shutdown import flush_at_exit
from kvterrace.store import Store
from kvterrace.tiers.directory import StoreDirectory, check_name
from kvterrace.tiers.drives import open_drives
from kvterrace.tiers.viewing import view_drives
from kvterrace.tracing.recorder import TraceRecorder

__all__ = ["default_write_budget", "open_store"]


def open_store(
    path: str | Path | Sequence[str | Path] | None,
    *,
    dram_bytes: int | str = "1GiB",
    ssd_bytes: int | str = "16GiB",
    partition: str = "main",
    write_behind_s: float = 2.0,
    busy_after_s: float = 5.0,
    sigterm_flush: bool = True,
    read_only: bool = False,
    trace: str | Path | TraceRecorder | None = None,
    ssd_daily_write_bytes: int | str | None = None,
) -> Store:
    """Open a store, making it if `path` is missing or empty. Blocks while it reads the index and prefaults DRAM.

    With `read_only`, any number of processes share what one process writes, while it writes and after. They take no
    lock and change nothing on the drive. What the writer has written is found within about a second; what it has given
    up for room is a `Miss`. Its invalidations come the same way, so not at once; those of a reader concern its own
    process alone, and only until the block is written anew. What a reader puts stays in its own DRAM, is never written,
    and goes when that room is wanted; its `flush` owes the drive nothing: True once the puts under way have ended.

    What leaves DRAM and the SSD for want of room is decided by the return-index policy of the extension module; without
    that, least recently used first. `kvterrace doctor` says which.

    Each drive gets an I/O engine of the best kind that works here, or the kind that the environment variable
    KVTERRACE_ENGINE names: uring, native-posix or posix. `kvterrace doctor` says which, and why.

    Args:
        path: folder of the store; None for a ladder of DRAM alone. Several drives: a folder on each, in any order. Long
            prompts then lie on all of them, and are read from all at once. A drive left out, added or back again is
            accepted with a warning: one left out takes its blocks along, and comes back empty. Up to 127.
        dram_bytes: size of the DRAM tier, reserved at once. At least a few blocks.
        ssd_bytes: what all files of this partition may take together, at any time; each drive has an equal share,
            divided into segments of a sixteenth, at most 64 MiB, of which one is kept for what outlives another, and
            one is being filled: of a small capacity, live blocks take about two thirds (1 MiB) to four fifths (from
            16 MiB on).
        partition: name of the part of the store that this process writes; one process at a time.
        write_behind_s: a block that has been idle this long is written to the SSD.
        busy_after_s: how long a block waits for room before it is answered `Busy`.
        sigterm_flush: flush on SIGTERM where the process has no handler of its own; the process then ends at once with
            status 143 (`os._exit`: nothing else that waits for its end is run).
        read_only: read what another process writes; the store, and the partition, must exist. `path` names exactly the
            drives that the writer has. `ssd_bytes`, `write_behind_s`, `sigterm_flush` and `ssd_daily_write_bytes` mean
            nothing then.
        trace: folder to record the traffic to: no text, no token ids, hashes that lead nowhere; at most 256 MiB. A
            `TraceRecorder` for a sample of it, or another cap.
        ssd_daily_write_bytes: what this partition may write in a day, over restarts; as it runs low, only what is
            likeliest to be read again is written. None: 0.3 times the size of the drives, which is what consumer
            drives are rated for over five years, but at least 40 GiB each. A drive rated for three full writes a day
            takes ten times as much.

    Raises:
        ConfigError: an argument that cannot work, or KVTERRACE_ENGINE names an engine that does not.
        StoreUnusableError: or one of its kinds: not a store, a newer format, locked by another process, no permission,
            a drive that is not there, is one of another store, or has not answered for a minute while its segments were
            read.
    """
    paths = _paths(path)
    check_name(partition)
    write_behind_s = require_seconds(write_behind_s, "write_behind_s")
    busy_after_s = require_seconds(busy_after_s, "busy_after_s")
    sigterm_flush = require_flag(sigterm_flush, "sigterm_flush")
    read_only = require_flag(read_only, "read_only")
    dram_nbytes = parse_nbytes(dram_bytes, "dram_bytes") // PAGE_NBYTES * PAGE_NBYTES
    ssd_nbytes = parse_nbytes(ssd_bytes, "ssd_bytes")
    daily_nbytes = (
        None if ssd_daily_write_bytes is None else parse_nbytes(ssd_daily_write_bytes, "ssd_daily_write_bytes")
    )
    if dram_nbytes < PAGE_NBYTES:
        raise ConfigError(f"dram_bytes: {dram_nbytes} B is too small; give at least a few blocks' worth, e.g. 1GiB")
    if read_only and not paths:
        raise ConfigError("read_only: there is nothing to read without a path; give the folder of the store")
    if ssd_nbytes < MIN_CAP_NBYTES * len(paths) and not read_only:
        raise ConfigError(
            f"ssd_bytes: {ssd_nbytes} B is too small for {len(paths)} drive(s); give at least {MIN_CAP_NBYTES} B for "
            "each, or path=None for DRAM alone"
        )
    kind = choose().name
    clock = SystemClock()
    recorder = trace if trace is None or isinstance(trace, TraceRecorder) else TraceRecorder(trace)
    if recorder is not None:
        recorder.start(clock)
    directories: list[StoreDirectory] = []
    engines: list[IoEngine] = []
    try:
        if read_only:
            directories = view_drives(paths, partition)
        elif paths:
            directories = open_drives(paths, partition, created_unix_s=clock.unix_s())
        names = [f"{kind}{number}" for number in range(len(directories))] if len(directories) > 1 else [kind]
        for name in names:  # one by one: what was made is closed if the next cannot be
            engines.append(best_engine(name)[0])  # noqa: PERF401
        store = Store(
            dram_nbytes=dram_nbytes,
            ssd_nbytes=ssd_nbytes,
            directory=directories[0] if directories else None,
            engine=engines[0],
            more=list(zip(directories[1:], engines[1:], strict=True)),
            clock=clock,
            writes=WritePolicy(after_s=write_behind_s),
            busy_after_s=busy_after_s,
            read_only=read_only,
            make_policy=default_policy,
            recorder=recorder,
            daily_write_nbytes=default_write_budget(paths) if daily_nbytes is None else daily_nbytes,
        )
    except BaseException:
        if recorder is not None:
            recorder.close()
        for engine in engines:
            engine.close(1.0)
        for directory in directories:
            directory.close()
        raise
    flush_at_exit(store, on_sigterm=sigterm_flush and not read_only)
    return store


def default_write_budget(paths: Sequence[Path]) -> int | None:
    """Bytes a day for the drives under these folders, which may not be there yet, each drive counted once; None: there
    is none.
    """
    sizes = {}
    for path in paths:
        there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
        found = os.statvfs(there)
        sizes[there.stat().st_dev] = found.f_blocks * found.f_frsize
    return sum(map(default_daily_nbytes, sizes.values())) or None


def _paths(path: object) -> list[Path]:
    if path is None:
        return []
    if isinstance(path, str | os.PathLike):
        return [_path(path)]
    if not isinstance(path, Sequence) or isinstance(path, bytes | bytearray | memoryview):
        raise ConfigError(f"path: give a folder, or a list of folders, as text or a Path, not {path!r}")
    paths = [_path(one) for one in path]
    if not 1 <= len(paths) <= MOST_VOLUMES:
        raise ConfigError(f"path: {len(paths)} folders; give 1 to {MOST_VOLUMES}, or None for DRAM alone")
    return paths


def _path(one: object) -> Path:
    text: object = os.fspath(one) if isinstance(one, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"path: {one!r} is no path of a folder; give text that is not empty, or a Path")
    return Path(text)
