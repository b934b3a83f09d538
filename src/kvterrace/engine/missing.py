"""Segments whose file was removed or cut behind the store's back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvterrace.engine.core import Core
from kvterrace.engine.landing import Landing
from kvterrace.engine.sealing import SegmentMaker
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.tombstones import Tombstones
from kvterrace.engine.volume import Volume
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import FileInfo, IoClass, IoKind, IoRequest, IoResult

__all__ = ["MissingFiles"]

_log = logging.getLogger(__name__)

#: How often all files are looked at, beside those that a read or write says are short. One that was removed while it is
#: open goes on serving, but would not be there after a restart.
_LOOK_S = 60.0
#: A verdict for which the folder could not be read is put off this long.
_AGAIN_S = 5.0
_AT_REST = (SegmentState.OPEN, SegmentState.SEALING, SegmentState.SEALED)


class MissingFiles:
    """Finds out what is left of such a file, and takes the rest out of the index at once. Used under the store's lock.

    What DRAM still holds of it is written again, and so are its tombstones. No place is bad by that, and no block has
    failed.
    """

    def __init__(
        self,
        core: Core,
        volume: Volume,
        maker: SegmentMaker,
        tombstones: Tombstones,
        condemn: Callable[[Landing], None],
    ) -> None:
        """`condemn`: told of a read that came short of a file that is as long as it should be."""
        self._core = core
        self._engine = volume.engine
        self._maker = maker
        self._tombstones = tombstones
        self._condemn = condemn
        self._files = volume.files
        self._space = volume.space
        self._looking: dict[int, list[Landing]] = {}  # segment -> reads that came short, waiting for the verdict
        self._put_off: list[tuple[float, Segment, np.ndarray]] = []  # until when; as `_judge` takes them
        self._cut: dict[int, Segment] = {}  # takes no more writes, and is not sealed
        self._told: set[int] = set()
        self._next_look_s = core.clock.monotonic_s() + _LOOK_S
        self._looks = 0

    @property
    def busy(self) -> bool:
        """Whether files are being looked at."""
        return bool(self._looks)

    def suspect(self, segment: Segment, short: Landing | None = None) -> None:
        """A read (`short`) or write of this segment says that its file is not what it was."""
        waiting = self._looking.get(segment.number)
        if waiting is not None:
            waiting += [short] if short is not None else []
            return
        self._looking[segment.number] = [short] if short is not None else []
        # what is written while the folder is read is not in doubt
        self._ask(segment, segment.live_ids(self._core.ledger.table))

    def can_give_up(self, segment: Segment) -> bool:
        """Whether `give_up` can be called of this segment: it is at rest, and is not going already."""
        return segment.state in _AT_REST and segment.number not in self._cut

    def give_up(self, segment: Segment) -> None:
        """Nothing in `segment`, which `can_give_up`, counts any more, whatever is on the drive: it is removed once
        nobody uses it. None of its tombstones may be needed any more.
        """
        self._shut(segment)
        self._lose(segment.live_ids(self._core.ledger.table))

    def pump(self, now_s: float) -> None:
        """Look at all files if it is time; let go of those that hold nothing any more."""
        for number, segment in list(self._cut.items()):
            if segment.state not in _AT_REST:  # it is being reclaimed as it is
                del self._cut[number]
            elif not (segment.writers or segment.readers or self._maker.is_sealing(number)):
                del self._cut[number]
                segment.state = SegmentState.SEALED  # as one whose footer did not get there
                self._files.sealed(number)
                if not segment.live_nbytes:
                    self._maker.remove(segment)
        due = [one for one in self._put_off if now_s >= one[0]]
        self._put_off = [one for one in self._put_off if now_s < one[0]]
        for _, segment, ids in due:
            self._ask(segment, ids)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            used = {
                number: one.used_nbytes
                for number, one in self._space.segments.items()
                if one.state in _AT_REST and not one.writers and one.live_nbytes
            }
            self._look(partial(self._compare, used), failed=lambda: None)

    def _ask(self, segment: Segment, ids: np.ndarray) -> None:
        """What became of the blocks `ids` of `segment`?"""

        def failed() -> None:
            self._put_off.append((self._core.clock.monotonic_s() + _AGAIN_S, segment, ids))

        self._look(partial(self._judge, segment, ids), failed)

    def _look(self, then: Callable[[dict[str, FileInfo]], None], failed: Callable[[], object]) -> None:
        engine = self._engine
        self._looks += 1

        def on_listed(result: IoResult) -> None:
            self._looks -= 1
            if result.crash is not None:  # nothing is known
                failed()
                return
            found: Sequence[FileInfo] = result.value  # type: ignore[assignment] # what `list` returned
            then({info.name: info for info in found})

        folder = self._files.folder
        call = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: engine.list(folder), tag=on_listed)
        engine.submit([call])

    def _compare(self, used: dict[int, int], found: dict[str, FileInfo]) -> None:
        for number, nbytes in used.items():
            segment = self._space.segments.get(number)
            info = found.get(self._files.path(number).name)
            if segment is not None and segment.state in _AT_REST and (info is None or info.nbytes < nbytes):
                self.suspect(segment)

    def _judge(self, segment: Segment, ids: np.ndarray, found: dict[str, FileInfo]) -> None:
        number, ledger = segment.number, self._core.ledger
        short = self._looking.pop(number, [])
        if self._space.segments.get(number) is not segment or not self._files.is_open(number):
            return
        info = found.get(self._files.path(number).name)
        nbytes = 0 if info is None else info.nbytes
        cut = 0  # of the reads that came short, those that did for lack of a file
        for landing in short:
            if landing.offset + landing.geometry.record_nbytes <= nbytes:
                self._condemn(landing)
            else:
                cut += 1
        table = ledger.table
        ids = ids[table.segment[ids] == number]
        sizes = np.array([ledger.geometry_of(block).record_nbytes for block in ids.tolist()], np.int64)
        gone = ids[table.page[ids].astype(np.int64) * PAGE_NBYTES + sizes > nbytes] if len(ids) else ids
        if info is not None and not len(gone) and not cut:
            return
        if segment.state in _AT_REST:
            self._shut(segment)
            taken = 0 if info is None else max(info.nbytes, info.allocated_nbytes)
            segment.file_nbytes = min(segment.file_nbytes, taken)
        self._tombstones.again(segment)
        self._lose(gone)
        if number not in self._told:
            self._told.add(number)
            what = "was removed" if info is None else f"was cut to {nbytes} B"
            _log.warning(
                "%s %s by somebody else; the %d blocks lost with it are recomputed when they are wanted",
                self._files.path(number),
                what,
                len(gone) + cut,
            )

    def _shut(self, segment: Segment) -> None:
        self._cut[segment.number] = segment
        self._maker.not_sealed.add(segment.number)
        if segment is self._space.open:
            self._space.shut()

    def _lose(self, ids: np.ndarray) -> None:
        ledger, now_s = self._core.ledger, self._core.clock.monotonic_s()
        for block in ids[np.argsort(-ledger.table.page[ids])].tolist():
            ledger.lost(block, now_s)
            ledger.tidy(block)
