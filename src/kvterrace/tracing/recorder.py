"""The recorder: a store's traffic goes into a folder of trace files, on a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.clock import Clock, SystemClock
from kvterrace.config import is_whole, parse_nbytes
from kvterrace.engine.transfers import Transfer
from kvterrace.errors import ConfigError
from kvterrace.keys import KEY_NBYTES, KeyChain
from kvterrace.layout import KVLayout
from kvterrace.tracing.files import header, line, pack
from kvterrace.tracing.ring import Ring
from kvterrace.tracing.rows import Rows, Sampling, how_it_ended
from kvterrace.types import Hint, Tier

__all__ = ["TraceRecorder", "TraceStats"]

_log = logging.getLogger(__name__)

#: What waits for the recorder's thread at most: events, and blocks in all of them (32 B of keys each).
_QUEUED_EVENTS = 16_384
_QUEUED_BLOCKS = 1 << 20
#: Rows are packed and written when there is so much of them, or so long after the first.
_MEMBER_NBYTES = 1 << 18
_MEMBER_S = 10.0
#: Blocks that one file names; the next file names them anew. Bounds the recorder's memory to about 15 MB.
_NAMED_BLOCKS = 1 << 17
_TURN_S = 0.5
_LEAST_CAP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What a recorder has done.

    Attributes:
        rows: made, and written to files or about to be.
        lost_events: of which no row was made: the queue was full, or recording had stopped.
        nbytes: what the folder's trace files take.
        stopped: why recording ended before the store was closed; empty if it did not.
    """

    rows: int
    lost_events: int
    nbytes: int
    stopped: str


class TraceRecorder:
    """Records one store's traffic; `open_store(..., trace=TraceRecorder(folder))`. docs/reference/trace-format.md.

    No text and no token ids are written, and keys only as hashes with a salt that is forgotten. What is not written
    yet when the process dies, the last ten seconds at most, is lost. A full queue loses events, and counts them; a
    drive that takes no writes ends the recording, with one warning. Neither touches the store.

    Args:
        path: folder for the files, made (0700) if it is missing; of nobody else.
        sample: share of the sequences to record, above 0, up to 1. Each is recorded whole or not at all, by the
            `sequence` that `get` and `put` are given; without one, by the first key of its chain.
        cap_bytes: what the folder's trace files may take, those of earlier recordings included; the oldest go first.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(self, path: str | Path, *, sample: float = 1.0, cap_bytes: int | str = "256MiB") -> None:
        self._path = _folder(path)
        number = is_whole(sample) or isinstance(sample, (float, np.floating))
        if not number or not 0 < sample <= 1:
            raise ConfigError(f"trace: sample is a share of the sequences, above 0, up to 1; not {sample!r}")
        self._cap_nbytes = parse_nbytes(cap_bytes, "trace: cap_bytes")
        if self._cap_nbytes < _LEAST_CAP_NBYTES:
            raise ConfigError(f"trace: cap_bytes: {cap_bytes!r} is too small; give at least 1MiB")
        self._sample = float(sample)
        self._clock: Clock = SystemClock()
        self._ring: Ring | None = None
        self._queue: deque[tuple[Any, ...]] = deque()
        self._layouts: dict[bytes, KVLayout] = {}  # by digest of the namespace
        self._came_blocks = 0  # written by the store's thread alone
        self._done_blocks = 0  # written by who drains alone
        self._lost = 0  # written by the store's thread alone
        self._cleared = 0  # events that were queued when recording stopped
        self._lost_told = 0
        self._rows_before = 0  # in files that were ended
        self._stopped = ""
        self._since_s: float | None = None  # when the oldest row came that is not in the file yet
        self._lock = threading.Lock()  # held by who drains
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, clock: Clock | None = None, *, background: bool = True) -> None:
        """For `open_store`: lock the folder and begin. Without `background`, `drain` is the caller's to call.

        Raises:
            ConfigError: the folder cannot be used, or this recorder was used before.
        """
        if self._ring is not None:
            raise ConfigError("trace: a recorder serves one store, once; make another")
        self._clock = clock or self._clock
        self._began_s = self._clock.monotonic_s()
        unix_s = self._clock.unix_s()
        self._began_unix_s = round(unix_s, 3)
        self._ring = Ring(self._path, self._cap_nbytes, int(unix_s * 1e9))
        self._name = os.urandom(8).hex()
        self._sampling = Sampling(os.urandom(32), self._sample)
        self._rows = Rows(self._sampling, self._began_s)
        if background:
            self._thread = threading.Thread(target=self._run, name="kvterrace-trace", daemon=True)
            self._thread.start()

    def stats(self) -> TraceStats:
        """Counts at this moment."""
        ring = self._ring
        if ring is None:
            return TraceStats(0, 0, 0, "")
        rows = self._rows_before + self._rows.rows
        return TraceStats(rows, self._lost + self._cleared, ring.nbytes, self._stopped)

    # -- what the store tells, under its lock --------------------------------------------------------------------------
    # What is queued is bytes, numbers and text alone: nothing that the garbage collector looks through as long as it
    # waits.

    def transferred(self, transfer: Transfer, ended_s: float) -> None:
        chain = transfer.chain
        if chain is None or self._is_full():
            return
        namespace, layers = chain.namespace, transfer.layers
        if namespace.digest not in self._layouts:
            self._layouts[namespace.digest] = namespace.layout
        span = None if layers is None else (layers.start, layers.stop)
        self._queue_up(
            len(chain),
            (
                transfer.kind.value,
                namespace.digest,
                chain.data,
                transfer.start,
                transfer.stop,
                transfer.sequence,
                span,
                how_it_ended(transfer),
                transfer.submitted_s,
                ended_s,
            ),
        )

    def touched(self, chain: KeyChain, scores: np.ndarray | None, now_s: float) -> None:
        if not self._is_full():
            if scores is not None and scores.ndim == 2:  # by layer group
                scores = scores.sum(axis=0)
            self._queue_up(len(chain), ("touch", chain.data, scores, now_s))

    def hinted(self, sequence: bytes, kind: Hint, seconds: float | None, now_s: float) -> None:
        if not self._is_full():
            self._queue_up(0, ("hint", sequence, kind.value, seconds, now_s))

    def invalidated(self, chain: KeyChain, start: int, now_s: float) -> None:
        if not self._is_full():
            self._queue_up(len(chain), ("invalidate", chain.data, start, now_s))

    def entered(self, tier: Tier, keys: bytes) -> None:
        if not self._is_full():
            self._queue_up(len(keys) // KEY_NBYTES, ("enter", tier.name.lower(), keys, self._clock.monotonic_s()))

    def left(self, tier: Tier, keys: bytes) -> None:
        if not self._is_full():
            self._queue_up(len(keys) // KEY_NBYTES, ("leave", tier.name.lower(), keys, self._clock.monotonic_s()))

    def _is_full(self) -> bool:
        """Whether this event is lost."""
        full = len(self._queue) >= _QUEUED_EVENTS or self._came_blocks - self._done_blocks > _QUEUED_BLOCKS
        if full or self._stopped:
            self._lost += 1
            return True
        return False

    def _queue_up(self, blocks: int, event: tuple[Any, ...]) -> None:
        self._came_blocks += blocks
        self._queue.append((blocks, *event))

    # -- writing -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Make rows of what has come, and write them if it is time. Never raises: a fault ends the recording."""
        with self._lock:
            self._guarded(self._drain)

    def close(self) -> None:
        """Write what has come, and give the folder back. Closing twice does nothing. Never raises."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._ring is None:
                return
            self._guarded(self._drain)
            self._guarded(self._write)
            self._stopped = self._stopped or "closed"
            self._ring.close()

    def _run(self) -> None:
        while not self._end.wait(_TURN_S):
            self.drain()

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._stopped:
            self._clear()
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on without its trace
            self._stopped = repr(error)
            self._clear()
            _log.warning("recording to %s has stopped, the store goes on: %r", self._path, error)

    def _clear(self) -> None:
        self._cleared += len(self._queue)
        self._queue.clear()

    def _drain(self) -> None:
        while self._queue:
            blocks, op, *event = self._queue.popleft()
            if self._rows.named >= _NAMED_BLOCKS:
                self._write()
                self._next_file()
            self._add(op, event)
            self._done_blocks += blocks
            if self._rows.nbytes >= min(_MEMBER_NBYTES, self._cap_nbytes // 16):
                self._write()
        if self._lost > self._lost_told:
            self._rows.add({"op": "lost", "events": self._lost - self._lost_told})
            self._lost_told = self._lost
        now_s = self._clock.monotonic_s()
        if not self._rows.nbytes:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= _MEMBER_S:
            self._write()

    def _add(self, op: str, event: list[Any]) -> None:
        rows = self._rows
        match op:
            case "touch":
                rows.touch(*event)
            case "hint":
                rows.hint(*event)
            case "invalidate":
                rows.invalidate(*event)
            case "enter" | "leave":
                rows.move(op, *event)
            case _:
                digest, keys, start, stop, sequence, layers, ended, submitted_s, ended_s = event
                rows.transfer(
                    op,
                    digest,
                    self._layouts[digest],
                    keys,
                    start,
                    stop,
                    sequence=sequence,
                    layers=layers,
                    ended=ended,
                    submitted_s=submitted_s,
                    ended_s=ended_s,
                )

    def _write(self) -> None:
        ring = self._ring
        assert ring is not None
        if not self._rows.nbytes:
            return
        lines = self._rows.take()
        self._since_s = None
        if not ring.files:
            ring.begin()
            lines = self._header() + lines
        if not ring.append(pack(lines)):
            raise OSError(f"{len(lines)} bytes of rows at once do not fit cap_bytes={self._cap_nbytes}")
        if ring.is_full:
            self._next_file()

    def _next_file(self) -> None:
        """What comes now names its blocks anew: each file can be read without those before it, which may be gone."""
        ring = self._ring
        assert ring is not None
        if not ring.files:
            return
        self._rows_before += self._rows.rows
        self._rows = Rows(self._sampling, self._began_s)
        ring.begin()
        if not ring.append(pack(self._header())):
            raise OSError(f"a header does not fit cap_bytes={self._cap_nbytes}")

    def _header(self) -> bytes:
        assert self._ring is not None
        return line(
            header(
                recording=self._name,
                number=self._ring.files - 1,
                began_unix_s=self._began_unix_s,
                sample=self._sample,
            )
        )


def _folder(path: object) -> Path:
    if isinstance(path, str | Path) and str(path) and "\0" not in str(path):
        return Path(path)
    raise ConfigError(f"trace: give a folder, as text or a Path, not {path!r}")
