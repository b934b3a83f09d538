"""Segments into and out of being: made, sealed, removed."""

from __future__ import annotations

import logging

from kvterrace.engine.core import Core
from kvterrace.engine.pausing import WritePause
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.syncing import Syncing
from kvterrace.io.base import IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.tiers.segments import NewFile

__all__ = ["SegmentMaker"]

_log = logging.getLogger(__name__)


class SegmentMaker:
    """Makes, seals and removes the files of segments. Used under the store's lock."""

    def __init__(self, core: Core, pause: WritePause, syncing: Syncing) -> None:
        assert core.files is not None and core.ledger.space is not None
        self._core = core
        self._pause = pause
        self._syncing = syncing
        self._files = core.files
        self._space = core.ledger.space
        self._sealing: set[int] = set()
        self._removing = 0

    @property
    def creating(self) -> bool:
        """Whether a segment that will be the open one is being made, or made sure of."""
        return bool(self._space.in_state(SegmentState.CREATING) or self._space.in_state(SegmentState.RESUMING))

    @property
    def sealing(self) -> bool:
        """Whether a segment is being sealed."""
        return bool(self._sealing)

    @property
    def busy(self) -> bool:
        """Whether a segment is being made, sealed or removed."""
        return bool(self._removing or self._sealing or self.creating)

    @property
    def can_open(self) -> bool:
        """Whether there is a segment that reclaim can write to, or can be one."""
        return self._space.open is not None or self.creating or self._space.room_for_carried()

    def make(self) -> None:
        """Make a segment, to be the open one. There must be room for it."""
        core, segment = self._core, self._space.begin()
        created_ns = int(core.clock.unix_s() * 1e9)

        def on_headed(result: IoResult) -> None:
            segment.state = SegmentState.OPEN
            if result.complete:
                self._space.open = segment
            else:
                segment.state = SegmentState.SEALED  # empty: the next to be reclaimed
                self._pause.failed(segment, result)

        def on_created(result: IoResult) -> None:
            if result.crash is not None:
                del self._space.segments[segment.number]
                if isinstance(result.crash, FileExistsError):
                    return  # something lies there that is no segment of ours: the next number will do
                self._pause.failed(segment, result)
                return
            assert isinstance(result.value, NewFile)
            file, nonce, page = result.value.file, result.value.nonce, result.value.page
            self._files.created(segment.number, file, nonce)
            core.engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, 0, [page], tag=on_headed)])

        core.engine.submit(
            [
                IoRequest(
                    IoKind.CALL,
                    IoClass.DEMOTION,
                    finish=lambda _: self._files.create(segment.number, segment.file_nbytes, created_ns),
                    tag=on_created,
                )
            ]
        )

    def seal_shut(self) -> None:
        """Seal every segment that takes no more writes and waits for none."""
        for segment in self._space.in_state(SegmentState.SEALING):
            if not segment.writers and segment.number not in self._sealing:
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """SYNC data, write footer and trailer, cut the file behind them, SYNC. A failure leaves it to a scan at the
        next open.
        """
        core, number = self._core, segment.number
        if not segment.records:
            self.remove(segment)  # made and never used
            return
        file: IoFile = self._files.file(number)
        self._sealing.add(number)
        footer = self._files.footer(number, segment.used_nbytes)
        end = segment.used_nbytes + footer.nbytes
        steps = [
            IoRequest(IoKind.SYNC, IoClass.DEMOTION, file),
            IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, segment.used_nbytes, [footer]),
            IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: core.engine.truncate(file, end)),
            IoRequest(IoKind.SYNC, IoClass.DEMOTION, file),
        ]

        def on_result(result: IoResult) -> None:
            fine = result.complete and result.crash is None
            if fine and steps:
                step = steps.pop(0)
                step.tag = on_result
                core.engine.submit([step])
                return
            self._sealing.discard(number)
            segment.state = SegmentState.SEALED
            self._files.sealed(number)
            if fine:
                self._pause.synced()
                segment.file_nbytes = end
                self._syncing.forget(number)
            elif result.request.kind is IoKind.SYNC:
                self._syncing.failed(segment, result)
            else:
                self._pause.failed(segment, result)

        on_result(IoResult(steps[0]))

    def remove(self, segment: Segment) -> None:
        """Unlink the file of a segment that holds nothing any more; until that is done it counts towards the
        capacity.
        """
        number = segment.number
        segment.state = SegmentState.RECLAIMING
        self._files.forget(number)
        self._syncing.forget(number)
        self._removing += 1

        def on_removed(result: IoResult) -> None:
            self._removing -= 1
            if result.crash is None or isinstance(result.crash, FileNotFoundError):
                del self._space.segments[number]
                return
            segment.state = SegmentState.STUCK
            _log.warning(
                "%s cannot be removed: %s; its room is lost until it can", self._files.path(number), result.crash
            )

        request = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: self._files.remove(number), tag=on_removed)
        self._core.engine.submit([request])
