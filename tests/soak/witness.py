"""Between the store and its faulty engine: what is being asked, which records that are, and where tombstones lie."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.io.base import FileInfo, IoFile, IoKind, IoRequest, IoResult
from kvterrace.testing.faults import FaultyEngine

#: magic, version, kind, header_nbytes: the start of a record, as docs/design.md has it.
_START = struct.Struct("<8sHHI")
_TOMBSTONE = 2


class Segments:
    """What the soak knows about files of the partition: tombstones in each, and damage done to it. Thread-safe.

    `untrusted` are files that a fault has reached: what is lost with them is nobody's fault. `on_tombstones` and
    `on_untrusted` are told before it happens, so that a parent knows of it if this process is killed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.tombstones: dict[str, set[bytes]] = {}
        self.untrusted: set[str] = set()
        #: Byte ranges of a file that are not what the store wrote, or not at all there: (start, end).
        self.ranges: dict[str, list[tuple[float, float]]] = {}

    def note_tombstones(self, name: str, keys: set[bytes]) -> None:
        with self._lock:
            self.tombstones.setdefault(name, set()).update(keys)
        self.on_tombstones(name, keys)

    def damage(self, name: str, start: float, end: float) -> None:
        """Bytes `start..end` of file `name` are about to be, or to stay, wrong."""
        with self._lock:
            self.untrusted.add(name)
            self.ranges.setdefault(name, []).append((start, end))
        self.on_untrusted(name, start, end)

    def distrust(self, name: str) -> None:
        """What was read of file `name` when the store was opened may have been wrong."""
        self.damage(name, 0, 0)

    def is_damaged(self, name: str, start: float, end: float) -> bool:
        with self._lock:
            return any(low < end and start < high for low, high in self.ranges.get(name, ()))

    def removed(self, name: str) -> None:
        """The store itself has removed the file: it has seen to its tombstones first."""
        with self._lock:
            self.tombstones.pop(name, None)
            self.untrusted.discard(name)

    def lost_tombstones(self) -> set[bytes]:
        """Keys of which a tombstone lies in an untrusted file."""
        with self._lock:
            return set().union(*(self.tombstones.get(name, set()) for name in self.untrusted))

    def forget_missing(self, folder: Path) -> None:
        """Drop what is known of files that are not there any more."""
        there = {one.name for one in folder.glob("*.seg")}
        with self._lock:
            for table in (self.tombstones, self.ranges):
                for name in [one for one in table if one not in there]:
                    del table[name]
            self.untrusted &= there

    def on_tombstones(self, name: str, keys: set[bytes]) -> None:
        """Overridden in a child."""

    def on_untrusted(self, name: str, start: float, end: float) -> None:
        """Overridden in a child."""


class Witness:
    """An `IoEngine` that hands everything on, one request after the other. While the engine below asks its plan about a
    request, `current` is that request.
    """

    def __init__(self, inner: FaultyEngine, segments: Segments) -> None:
        self.name = inner.name
        self._inner = inner
        self._segments = segments
        self._local = threading.local()

    @property
    def current(self) -> IoRequest | None:
        return getattr(self._local, "request", None)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        for request in requests:
            if request.kind is IoKind.WRITE and request.file is not None:
                keys = _tombstone_keys(request.buffers)
                if keys:
                    self._segments.note_tombstones(request.file.path.name, keys)
            self._local.request = request
            try:
                self._inner.submit([request])
            finally:
                self._local.request = None

    def poll(self, timeout_s: float) -> list[IoResult]:
        return self._inner.poll(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def subscribe(self, on_result: Callable[[], None]) -> bool:
        return self._inner.subscribe(on_result)

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def create(self, path: Path, nbytes: int) -> IoFile:
        return self._inner.create(path, nbytes)

    def open(self, path: Path) -> IoFile:
        return self._inner.open(path)

    def reopen(self, path: Path) -> IoFile:
        return self._inner.reopen(path)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        return self._inner.read_now(file, offset, buffer)

    def truncate(self, file: IoFile, nbytes: int) -> None:
        self._inner.truncate(file, nbytes)

    def close_file(self, file: IoFile) -> None:
        self._inner.close_file(file)

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)
        self._segments.removed(path.name)

    def list(self, folder: Path) -> Sequence[FileInfo]:
        return self._inner.list(folder)

    def sync_folder(self, folder: Path) -> None:
        self._inner.sync_folder(folder)

    def free_nbytes(self, folder: Path) -> int:
        return self._inner.free_nbytes(folder)

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)


def _tombstone_keys(buffers: Iterable[Bytes]) -> set[bytes]:
    """First eight bytes of each key in tombstone records among `buffers`."""
    keys: set[bytes] = set()
    for buffer in buffers:
        magic, _, kind, header_nbytes = _START.unpack(buffer[: _START.size].tobytes())
        if magic == b"KVTRECRD" and kind == _TOMBSTONE:
            nbytes = int.from_bytes(buffer[176:184].tobytes(), "little")
            payload = buffer[header_nbytes : header_nbytes + nbytes].tobytes()
            keys.update(payload[at : at + 8] for at in range(0, nbytes, 32))
    return keys
