"""Segments that outlive the process that made them: what is little used at close is appended to after the next open.

So the number of files is bounded however often a store is opened: a file that is sealed is at least half full.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvterrace.engine.core import Core
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.syncing import Syncing
from kvterrace.engine.volume import Volume
from kvterrace.engine.write_gate import WriteGate
from kvterrace.format.record import PAGE_NBYTES, RecordKind, pad_to_page
from kvterrace.format.recovery import SegmentContents
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.format.segment import TOMBSTONE_DTYPE, BadSegment
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import KEY_NBYTES
from kvterrace.tiers.segments import RecoveredSegment

__all__ = ["Resumer", "choose_resumed", "is_worth_sealing"]

#: The least record: a header and a payload.
_LEAST_NBYTES = 2 * PAGE_NBYTES


def is_worth_sealing(segment: Segment) -> bool:
    """Whether the open segment, at close, becomes a file for good. One without a record is not kept at all."""
    return not segment.records or segment.used_nbytes >= segment.file_nbytes // 2


def choose_resumed(core: Core, found: Sequence[RecoveredSegment]) -> None:
    """The newest of the segments found on one drive, in order of number, becomes the open one if it was never sealed
    and can take records. Namespaces are entered already.

    Only the newest: a tombstone kills in its own segment and in older ones, and of equal copies the later segment's
    counts. Only one that could be read to its end and is as long as when it was made: else there may be more in it, or
    it was cut by something else. Not one that is longer than new segments are: this store has less room than the one
    before. Not one with a bad place behind its last record: what was written over it would not be believed after the
    next open. All others are sealed.
    """
    newest = next((one for one in reversed(found) if not isinstance(one.contents, BadSegment)), None)
    if newest is None or not isinstance(newest.contents, SegmentContents) or not newest.readable:
        return
    space = core.ledger.space_of(newest.number)
    contents, segment = newest.contents, space.segments[newest.number]
    if contents.state is not ScanState.SCANNED:
        return
    if not contents.file_nbytes == contents.header.capacity <= space.segment_nbytes:
        return
    bad = core.volume_of(newest.number).bad.places(contents.header.nonce) if core.volumes else ()
    if any(place.offset + place.nbytes > contents.data_end for place in bad):
        return
    tombstones = contents.entries[contents.entries["kind"] == RecordKind.TOMBSTONE]
    rows = (tombstones["payload_nbytes"] // KEY_NBYTES * TOMBSTONE_DTYPE.itemsize).tolist()
    segment.reserved_nbytes = sum(pad_to_page(nbytes) for nbytes in rows)
    segment.namespaces = frozenset(core.numbers[digest] for digest in contents.namespaces)
    segment.file_nbytes = contents.file_nbytes
    if space.fits(segment, _LEAST_NBYTES, 0):
        segment.state = SegmentState.RESUMING


class Resumer:
    """Makes the segment that was chosen the open one. Used under the store's lock.

    What was found in it is synced first: what the scan saw, and numbered its successors above, is then the oldest that
    a power cut can bring back where records are now written.
    """

    def __init__(self, volume: Volume, gate: WriteGate, syncing: Syncing) -> None:
        self._gate = gate
        self._files = volume.files
        self._space = volume.space
        self._syncing = syncing
        self._asked: set[int] = set()

    def go_on(self) -> None:
        """Submit what is due."""
        for segment in self._space.in_state(SegmentState.RESUMING):
            if segment.number not in self._asked and self._resume(segment):
                self._asked.add(segment.number)

    def _resume(self, segment: Segment) -> bool:
        """Whether the drive was fit to be asked."""

        def on_synced(result: IoResult) -> None:
            if not result.complete:
                segment.state = SegmentState.SEALING
                self._syncing.failed(segment, result)
                return
            self._syncing.forget(segment.number)
            self._files.resume(segment.number)
            segment.state = SegmentState.OPEN
            self._space.open = segment

        file = self._files.file(segment.number)
        return self._gate.submit(IoRequest(IoKind.SYNC, IoClass.DEMOTION, file), on_synced)
