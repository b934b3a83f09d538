"""Reads of whole records: those that lie one behind the other in one request, prefetches in line behind all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvterrace.engine.core import Core, OnResult
from kvterrace.engine.landing import Landing, is_lost, read_ended, reading
from kvterrace.engine.outbox import Outbox
from kvterrace.engine.prefetching import HeldBack
from kvterrace.engine.volume import Volume
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.types import DeviceFailed

__all__ = ["RecordReads", "stopped"]

#: Reads that lie one behind the other are merged up to this size: 4 MiB of payload, and its headers.
_MERGE_NBYTES = (4 << 20) + (64 << 10)


class _Landed(Protocol):
    def __call__(self, one: Landing, *, lost: bool) -> None: ...


def stopped(volume: Volume) -> DeviceFailed:
    """The outcome of a read that the gate of its drive did not let through."""
    return DeviceFailed(str(volume.files.folder), "reads of this drive are stopped for a while")


class RecordReads:
    """Called under the store's lock, except for what runs on the engine's threads."""

    def __init__(
        self,
        core: Core,
        landed: _Landed,
        *,
        expired: Callable[[Landing], None],
        time_left: Callable[[list[Landing]], float | None],
    ) -> None:
        """
        Args:
            landed: `landed(one, lost=...)`, a read has ended. `lost`: it did not bring the block, and will not the next
                time.
            expired: the engine gave a read up at its deadline.
            time_left: seconds until nobody waits for any of these; None: somebody has all the time.
        """
        self._core = core
        self._landed = landed
        self._expired = expired
        self._time_left = time_left
        self._held_back = tuple(HeldBack() for _ in core.volumes)

    def prefetch(self, landings: list[Landing], outbox: Outbox) -> None:
        """Put reads in line; send what is due."""
        for volume, held_back in zip(self._core.volumes, self._held_back, strict=True):
            held_back.add([one for one in landings if one.volume is volume])
        for held_back in self._held_back:
            self._send_due(held_back, outbox)

    def _send_due(self, held_back: HeldBack, outbox: Outbox) -> None:
        due = held_back.due()
        self.send(due[:], IoClass.PREFETCH, outbox)
        for one in due:
            one.segment.readers -= 1

    def promote(self, block: int) -> None:
        """Somebody waits for a block whose read was held back: it goes now."""
        outbox = Outbox()
        for held_back in self._held_back:
            one = held_back.take(block)
            if one is not None:
                self.send([one], IoClass.DEMAND, outbox)
                one.segment.readers -= 1
        outbox.send()

    def send(
        self, landings: list[Landing], io_class: IoClass, outbox: Outbox, *, more_to_come: bool = False
    ) -> list[Landing]:
        """Send one request for each stretch of records that lie one behind the other in a segment. Returns what is not
        sent yet: with `more_to_come` the last stretch, which may go on.
        """
        landings.sort(key=lambda one: (one.segment.number, one.offset))
        groups: list[list[Landing]] = []
        nbytes = end = 0
        for one in landings:
            last = groups[-1][-1] if groups else None
            joins = last is not None and last.nonce == one.nonce and end == one.offset
            if joins and nbytes + one.memory.nbytes <= _MERGE_NBYTES:
                groups[-1].append(one)
                nbytes += one.memory.nbytes
            else:
                groups.append([one])
                nbytes = one.memory.nbytes
            end = one.offset + one.memory.nbytes
        rest = groups.pop() if groups and more_to_come else []
        for group in groups:
            self._read(group, io_class, outbox)
        return rest

    def _read(self, group: list[Landing], io_class: IoClass, outbox: Outbox) -> None:
        core, volume, segment = self._core, group[0].volume, group[0].segment
        core.stats.ssd_read_requests += 1
        segment.readers += 1
        request = IoRequest(
            IoKind.READ,
            io_class,
            volume.files.file(segment.number),
            group[0].offset,
            [one.memory for one in group],
            finish=reading(group),
            deadline_s=self._time_left(group),
        )
        engine = volume.engine
        if not volume.gate.admit(request):
            request = IoRequest(IoKind.CALL, io_class)  # answered as any read is, but the drive is not asked
            engine = core.engine
        request.tag = self._on_read(group, io_class)
        outbox.add(engine, request)

    def _on_read(self, group: list[Landing], io_class: IoClass) -> OnResult:
        def on_result(result: IoResult) -> None:
            if result.lent:
                return  # who waits is told by the clock; the slots stay the engine's
            volume, held_back = group[0].volume, self._held_back[group[0].volume.number]
            group[0].segment.readers -= 1
            asked = result.request.kind is IoKind.READ
            if asked:
                volume.gate.ended(result)
            self._core.stats.ssd_read_nbytes += result.nbytes
            outbox = Outbox()
            for one in group:
                if io_class is IoClass.PREFETCH:
                    held_back.ended(one)
                if result.expired:
                    one.verdict = None
                    self._expired(one)
                    continue
                if asked:
                    read_ended(one, result)
                else:
                    one.verdict, one.outcome = None, stopped(volume)
                if asked and isinstance(one.outcome, DeviceFailed) and len(group) > 1:
                    # one bad place must not cost the blocks beside it: each is read by itself before it is given up
                    one.outcome = None
                    one.missing = False
                    one.memory[:PAGE_NBYTES] = 0
                    if io_class is IoClass.PREFETCH:
                        held_back.started(one)
                    self._read([one], io_class, outbox)
                    continue
                self._landed(one, lost=is_lost(one, result.error))
            self._send_due(held_back, outbox)
            outbox.send()

        return on_result
