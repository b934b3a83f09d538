"""Breaking the library on purpose: a soak that cannot fail proves nothing. `--mutate NAME`; see docs/guide/soak.md."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from kvterrace.engine import landing
from kvterrace.engine.core import Core
from kvterrace.engine.mover import Mover
from kvterrace.engine.space import SegmentSpace
from kvterrace.engine.transfers import Transfer
from kvterrace.engine.writer import Writer
from kvterrace.format import passes
from kvterrace.io.posix import PosixEngine
from kvterrace.tiers.segments import SegmentFiles

_count = itertools.count(1)
_leaked: list[Any] = []


def _accept_payloads() -> None:
    """The CRCs of parts are not looked at."""
    landing.verify_parts = lambda *_args, **_options: None  # type: ignore[attr-defined]


def _accept_headers() -> None:
    """Whose record it is does not matter."""
    landing.check_identity = lambda *_args, **_options: None  # type: ignore[attr-defined]


def _leak_fd() -> None:
    """Every file that is closed leaves a descriptor behind."""
    close_file = PosixEngine.close_file

    def leaking(self: PosixEngine, file: Any) -> None:
        _leaked.append(os.open(os.devnull, os.O_RDONLY))
        close_file(self, file)

    PosixEngine.close_file = leaking  # type: ignore[method-assign, assignment]


def _leak_thread() -> None:
    """Every close leaves a thread behind."""
    close = PosixEngine.close

    def leaking(self: PosixEngine, timeout_s: float) -> bool:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return close(self, timeout_s)

    PosixEngine.close = leaking  # type: ignore[method-assign]


def _leak_memory() -> None:
    """Every transfer leaves 16 KiB behind."""
    count = Mover._count

    def leaking(self: Mover, transfer: Transfer) -> None:
        _leaked.append(bytearray(os.urandom(16 << 10)))
        count(self, transfer)

    Mover._count = leaking  # type: ignore[method-assign]


def _drop_completion() -> None:
    """One completion in five thousand never comes."""
    poll = PosixEngine.poll

    def forgetful(self: PosixEngine, timeout_s: float) -> Any:
        return [one for one in poll(self, timeout_s) if next(_count) % 5000]

    PosixEngine.poll = forgetful  # type: ignore[method-assign]


def _drop_wake() -> None:
    """Transfers are not given up, whatever time it is."""
    Mover._expire = lambda _self, _now_s: None  # type: ignore[method-assign, assignment]


def _late_copy() -> None:
    """What has expired is copied all the same."""
    Transfer.begin_copy = lambda _self, _index: True  # type: ignore[method-assign, assignment]
    Transfer.end_copy = lambda _self, _index: None  # type: ignore[method-assign, assignment]


def _miscount() -> None:
    """One transfer in two hundred is not counted."""
    count = Mover._count

    def forgetful(self: Mover, transfer: Transfer) -> None:
        if next(_count) % 200:
            count(self, transfer)

    Mover._count = forgetful  # type: ignore[method-assign]


def _no_tombstones() -> None:
    """Invalidations are forgotten by a restart."""
    Writer.bury = lambda *_: None  # type: ignore[method-assign]


def _over_cap() -> None:
    """Room for a segment is found a little too easily."""
    SegmentSpace.room_for_segment = lambda self: (  # type: ignore[method-assign]
        self.file_nbytes <= self.cap_nbytes
    )


def _keep_files() -> None:
    """One segment in twenty is not removed, though the store thinks so."""
    remove = SegmentFiles.remove

    def sparing(self: SegmentFiles, number: int) -> None:
        if number % 20:
            remove(self, number)

    SegmentFiles.remove = sparing  # type: ignore[method-assign]


def _hide_corruption() -> None:
    """What is corrupt is called a miss."""
    from kvterrace import Corrupt, Miss

    settle = Transfer.settle

    def lying(self: Transfer, index: int, outcome: Any) -> None:
        settle(self, index, Miss() if isinstance(outcome, Corrupt) else outcome)

    Transfer.settle = lying  # type: ignore[method-assign]
    from kvterrace.engine.reader import Reader

    Reader._discard = lambda *_: None  # type: ignore[method-assign]


def _sync_lies() -> None:
    """A flush does not wait for what it has to write."""
    Writer.owes = lambda _self, _put_seq: False  # type: ignore[method-assign, assignment]


def _wrong_stats() -> None:
    """DRAM is said to be larger than it is used."""
    snapshot = Core.snapshot

    def wrong(self: Core) -> Any:
        stats = snapshot(self)
        stats.ssd_file_nbytes = stats.ssd_nbytes + 1
        return stats

    Core.snapshot = wrong  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "accept-payloads": _accept_payloads,
    "accept-headers": _accept_headers,
    "leak-fd": _leak_fd,
    "leak-thread": _leak_thread,
    "leak-memory": _leak_memory,
    "drop-completion": _drop_completion,
    "never-expire": _drop_wake,
    "late-copy": _late_copy,
    "miscount": _miscount,
    "no-tombstones": _no_tombstones,
    "over-cap": _over_cap,
    "keep-files": _keep_files,
    "hide-corruption": _hide_corruption,
    "flush-lies": _sync_lies,
    "wrong-stats": _wrong_stats,
}


def apply(name: str) -> None:
    """Break this process's library, which then does without its extension module: what is broken is the Python."""
    if name:
        os.environ |= {"KVTERRACE_NATIVE": "off", "KVTERRACE_ENGINE": "posix"}
        passes.native.cache_clear()
    MUTATIONS[name]()
