"""Invalidations on their way to the drive, so that a restart does not bring back what was given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.engine.core import Core
from kvterrace.engine.space import Segment
from kvterrace.engine.volume import Volume
from kvterrace.engine.write_gate import WriteGate
from kvterrace.format.record import (
    PAGE_NBYTES,
    encode_tombstone,
    pad_to_page,
    place,
    tombstone_nbytes_for,
)
from kvterrace.format.segment import TOMBSTONE_DTYPE
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import KEY_NBYTES

__all__ = ["Tombstones"]

#: Keys of one tombstone record.
_KEYS = 4096


class Tombstones:
    """The line of keys to be written down as dead. Used under the store's lock."""

    def __init__(self, core: Core, volume: Volume, gate: WriteGate, on_written: Callable[[Segment], None]) -> None:
        """`on_written` is told of each segment that a tombstone was written to."""
        self._core = core
        self._volume = volume
        self._gate = gate
        self._on_written = on_written
        self._files = volume.files
        self._space = volume.space
        self._waiting: list[tuple[bytes, bytes, int]] = []  # namespace digest, key, put-sequence
        self._moving: set[tuple[bytes, bytes, int]] = set()  # of the segment being reclaimed, not written elsewhere yet
        self._burying: dict[int, int] = {}  # put-sequence -> tombstone records of it in flight
        #: Writes in flight.
        self.writes = 0
        #: Records written since the store was opened.
        self.written = 0

    def __len__(self) -> int:
        """Keys that are to be written and are not being written yet."""
        return len(self._waiting)

    @property
    def wait(self) -> bool:
        """Whether some are to be written that are not being written yet."""
        return bool(self._waiting)

    @property
    def moved(self) -> bool:
        """Whether all that `move` was told of are written."""
        return not self._moving

    @property
    def moved_wait(self) -> bool:
        """Whether some of these are not being written yet."""
        return bool(self._waiting) and self._waiting[0] in self._moving

    def owes(self, put_seq: int) -> bool:
        """Whether one from before the put-sequence number `put_seq` is still to be written."""
        return any(seq < put_seq for _, _, seq in self._waiting) or any(seq < put_seq for seq in self._burying)

    def add(self, namespace: bytes, keys: list[bytes], put_seq: int) -> None:
        """Blocks of these keys from before the put-sequence number `put_seq` are dead."""
        self._waiting.extend((namespace, key, put_seq) for key in keys)

    def again(self, segment: Segment) -> None:
        """Write those of `segment` once more, elsewhere."""
        waiting = set(self._waiting)
        self._waiting.extend(one for one in segment.tombstones if one not in waiting)

    def move(self, segment: Segment) -> None:
        """As `again`, before all others, and into the room that only reclaim may use; until `move_no_more`."""
        self._moving = set(segment.tombstones)
        others = [one for one in self._waiting if one not in self._moving]
        self._waiting = [*dict.fromkeys(segment.tombstones), *others]

    def drop(self) -> int:
        """Forget what waits, but for what `move` was told of; the lowest put-sequence number. Some must wait."""
        oldest = min(put_seq for _, _, put_seq in self._waiting)
        self._waiting = [one for one in self._waiting if one in self._moving]
        return oldest

    def move_no_more(self) -> None:
        """What `move` was told of, and is not written, waits as all others do."""
        self._moving = set()

    def write(self) -> None:
        """Submit one record of those that wait, into the open segment; shut that if it has no room."""
        core, segment = self._core, self._space.open
        if not self._waiting or segment is None or not self._gate.is_open:
            return
        digest, _, put_seq = self._waiting[0]
        most = self._most_keys
        moving = self.moved_wait
        alike = lambda one: (one[0], one[2], one in self._moving) == (digest, put_seq, moving)  # noqa: E731
        some = list(itertools.takewhile(alike, self._waiting[:most]))
        nbytes = tombstone_nbytes_for(len(some))
        rows_nbytes = pad_to_page(len(some) * TOMBSTONE_DTYPE.itemsize)  # what its keys add to the footer
        if not self._space.fits(segment, nbytes + rows_nbytes, core.numbers[digest]):
            self._space.shut()
            return
        kept_nbytes = 0 if moving else self._space.kept_nbytes
        if not self._space.fits(segment, nbytes + rows_nbytes + kept_nbytes, core.numbers[digest]):
            return  # reclaim makes room: else these would take what it needs for that
        # not from the arena: what fills that may have to wait for these to be written
        memory = _aligned(nbytes)
        keys = b"".join(key for _, key, _ in some)
        header = encode_tombstone(
            keys,
            memory,
            put_seq=put_seq,
            namespace=digest,
            epoch=core.namespaces[core.numbers[digest]].epoch,
            created_unix_ns=int(core.clock.unix_s() * 1e9),
        )
        offset = self._space.place(segment, nbytes, core.numbers[digest])
        segment.reserved_nbytes += rows_nbytes
        place(memory, self._files.nonce(segment.number), offset)
        del self._waiting[: len(some)]
        self._burying[put_seq] = self._burying.get(put_seq, 0) + 1
        segment.writers += 1
        self.writes += 1

        def on_result(result: IoResult) -> None:
            self.writes -= 1
            segment.writers -= 1
            self._burying[put_seq] -= 1
            if not self._burying[put_seq]:
                del self._burying[put_seq]
            core.stats.ssd_written_nbytes += result.nbytes
            if result.complete:
                self._files.footers[segment.number].add(header, offset, keys)
                segment.tombstones.extend(some)
                self.written += 1
                moved = self._moving.intersection(some)
                if moved:
                    self._moving -= moved
                    # in flight when `move` was told of them: they need not be written once more
                    self._waiting = [one for one in self._waiting if one not in moved]
                self._on_written(segment)
            else:
                again = [one for one in some if one in self._moving]
                self._waiting = [*again, *self._waiting, *(one for one in some if one not in self._moving)]
                self._volume.bad.not_written(segment, result)
                self._gate.failed(segment, result)

        file = self._files.file(segment.number)
        sent = self._gate.submit(IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, offset, [memory]), on_result)
        assert sent, "the gate was open"

    @property
    def _most_keys(self) -> int:
        """Keys that a tombstone may have so that it, and its rows in the footer, fit half a segment."""
        room = self._space.segment_nbytes // 6 - 2 * PAGE_NBYTES
        return max(PAGE_NBYTES // KEY_NBYTES, min(_KEYS, room // KEY_NBYTES))


def _aligned(nbytes: int) -> Bytes:
    memory = np.zeros(nbytes + PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
