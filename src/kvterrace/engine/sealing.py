"""Segments into and out of being: made, sealed, removed."""

from __future__ import annotations

import logging
from functools import partial

from kvterrace.engine.core import Core
from kvterrace.engine.fullness import Fullness
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.syncing import Syncing
from kvterrace.engine.volume import Volume
from kvterrace.engine.write_gate import WriteGate
from kvterrace.io.base import IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.tiers.segments import NewFile

__all__ = ["SegmentMaker"]

_log = logging.getLogger(__name__)

#: Files that could not be removed are tried again this often, so many at a time.
_REMOVE_AGAIN_S = 5.0
_REMOVE_AGAIN = 4


class SegmentMaker:
    """Makes, seals and removes the files of segments. Used under the store's lock."""

    def __init__(self, core: Core, volume: Volume, gate: WriteGate, syncing: Syncing) -> None:
        self._core = core
        self._volume = volume
        self._gate = gate
        self._fullness = Fullness(volume)
        self._syncing = syncing
        self._files = volume.files
        self._space = volume.space
        self._sealing: dict[int, list[IoRequest]] = {}  # segment -> steps not sent yet
        self._ends: dict[int, int] = {}  # of those, what their file is cut to
        self._steps: set[int] = set()  # segments of which a step is under way
        self._removing = 0
        self._to_remove: list[int] = []  # to be tried again: STUCK. Those found so at open are not among them
        #: Segments that could not be read at open, and are still here.
        self.unread = {one.number for one in self._space.in_state(SegmentState.STUCK)} - self._files.foreign
        self._leaving: int | None = None  # the last of these that was given up
        self._remove_again_s = float("-inf")
        #: Segments that are not to be sealed: their records are not what a footer would say.
        self.not_sealed: set[int] = set()

    @property
    def creating(self) -> bool:
        """Whether a segment that will be the open one is being made, or made sure of."""
        return bool(self._space.in_state(SegmentState.CREATING) or self._space.in_state(SegmentState.RESUMING))

    @property
    def sealing(self) -> bool:
        """Whether a segment is being sealed."""
        return bool(self._sealing)

    def is_sealing(self, number: int) -> bool:
        """Whether segment `number` is being sealed."""
        return number in self._sealing

    @property
    def busy(self) -> bool:
        """Whether a segment is being made or removed, or sealed, where the drive takes writes."""
        waits = self._gate.takes_writes and self._space.in_state(SegmentState.SEALING)
        return bool(self._removing or self._steps or self.creating or waits)

    @property
    def can_open(self) -> bool:
        """Whether there is a segment that reclaim can write to, or can be one."""
        return self._space.open is not None or self.creating or self._space.room_for_small()

    def make(self) -> None:
        """Make a segment, to be the open one, if the drive is fit for it. There must be room for it."""
        if not self._gate.is_open:
            return
        core, segment = self._core, self._space.begin()
        created_ns = int(core.clock.unix_s() * 1e9)

        def on_headed(result: IoResult) -> None:
            segment.state = SegmentState.OPEN
            if result.complete and result.request.kind is IoKind.WRITE:
                self._space.open = segment
            else:
                segment.state = SegmentState.SEALED  # empty: the next to be reclaimed
                self._gate.failed(segment, result)

        def on_created(result: IoResult) -> None:
            if result.crash is not None:
                self._space.remove(segment)
                if not isinstance(result.crash, FileExistsError):  # that is no segment of ours: the next number will do
                    self._gate.failed(segment, result)
                return
            assert isinstance(result.value, NewFile)
            self._fullness.made()
            file, nonce, page = result.value.file, result.value.nonce, result.value.page
            self._files.created(segment.number, file, nonce)
            header = IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [page])
            if not self._gate.submit(header, on_headed, proof=False, excuse=self._fullness.helps):
                segment.state = SegmentState.SEALED

        request = IoRequest(
            IoKind.CALL,
            IoClass.DEMOTION,
            finish=lambda _: self._files.create(segment.number, segment.file_nbytes, created_ns),
        )
        sent = self._gate.submit(request, on_created, proof=False, excuse=self._fullness.helps)
        assert sent, "the gate was open"

    def pump(self, now_s: float) -> None:
        """To be called now and then: finds out whether a drive that was full has room again, and whether files can be
        removed by now that could not.
        """
        self._fullness.pump(now_s)
        if self._to_remove and now_s >= self._remove_again_s:
            self._remove_again_s = now_s + _REMOVE_AGAIN_S
            again = self._to_remove[:_REMOVE_AGAIN]
            del self._to_remove[:_REMOVE_AGAIN]
            for number in again:
                self._unlink(self._space.segments[number])

    def helps(self, result: IoResult) -> bool:
        """Whether a write that failed for lack of room can have one of the store's own segments' place."""
        return self._fullness.helps(result)

    def seal_shut(self) -> None:
        """Seal every segment that takes no more writes and waits for none; go on where the drive had to be waited
        for.
        """
        for segment in self._space.in_state(SegmentState.SEALING):
            if segment.number in self._sealing:
                self._next_step(segment)
            elif not segment.writers and segment.number not in self.not_sealed:
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """SYNC data, write footer and trailer, cut the file behind them, SYNC. A failure leaves it to a scan at the
        next open.
        """
        number = segment.number
        if not segment.records:
            self.remove(segment)  # made and never used
            return
        if not self._gate.is_open:
            return
        file: IoFile = self._files.file(number)
        footer = self._files.footer(number, segment.used_nbytes)
        end = self._ends[number] = segment.used_nbytes + footer.nbytes
        self._sealing[number] = [
            IoRequest(IoKind.SYNC, IoClass.DEMOTION, file),
            IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, segment.used_nbytes, [footer]),
            IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: self._volume.engine.truncate(file, end)),
            IoRequest(IoKind.SYNC, IoClass.DEMOTION, file),
        ]
        self._next_step(segment)

    def _next_step(self, segment: Segment) -> None:
        steps = self._sealing[segment.number]
        if segment.number in self._steps:
            return
        if self._gate.submit(steps[0], partial(self._on_step, segment), proof=steps[0].kind is IoKind.SYNC):
            self._steps.add(segment.number)
            del steps[0]

    def _on_step(self, segment: Segment, result: IoResult) -> None:
        number = segment.number
        self._steps.discard(number)
        fine = result.complete and result.crash is None
        if fine and self._sealing[number]:
            self._next_step(segment)
            return
        del self._sealing[number]
        end = self._ends.pop(number)
        segment.state = SegmentState.SEALED
        if fine:
            segment.file_nbytes = end
            self._syncing.forget(number)
        self._files.sealed(number)
        if fine:
            return
        if result.request.kind is IoKind.SYNC:
            self._syncing.failed(segment, result)
        else:
            self._gate.failed(segment, result)

    def remove(self, segment: Segment) -> None:
        """Unlink the file of a segment that holds nothing any more; until that is done it counts towards the
        capacity.
        """
        number = segment.number
        segment.state = SegmentState.RECLAIMING
        if self._files.is_open(number):
            self._volume.bad.forget_segment(self._files.nonce(number))
        self._files.forget(number)
        self.not_sealed.discard(number)
        self._syncing.forget(number)
        self._unlink(segment)

    def give_up_unread(self, why: str) -> bool:
        """Remove the oldest segment that could not be read at open; whether there is one, and none on its way out. Its
        blocks, and its invalidations, are lost to this process anyway; now they are for good.

        One after the other, and each durably before the next: a younger one may hold the tombstones of what is in an
        older, which nobody knows.
        """
        if not self.unread or self._leaving in self._space.segments:
            return False
        number = self._leaving = min(self.unread)
        self.unread.discard(number)
        _log.warning(
            "%s could not be read when the store was opened, and is removed: %s", self._files.path(number), why
        )
        self.remove(self._space.segments[number])
        return True

    def _unlink(self, segment: Segment) -> None:
        number = segment.number
        self._removing += 1

        def on_removed(result: IoResult) -> None:
            self._removing -= 1
            if result.crash is None:
                self._space.remove(segment)
                return
            if not self._to_remove:
                self._remove_again_s = self._core.clock.monotonic_s() + _REMOVE_AGAIN_S
            self._to_remove.append(number)
            if segment.state is SegmentState.STUCK:
                return  # told
            segment.state = SegmentState.STUCK
            _log.warning(
                "%s cannot be removed: %s; its room is lost until it can", self._files.path(number), result.crash
            )

        request = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: self._files.remove(number), tag=on_removed)
        self._volume.engine.submit([request])
