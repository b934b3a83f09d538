"""What bounds the invalidations of a drive: past a limit, what they could be about is given up in their stead."""

from __future__ import annotations

import logging

from kvterrace.engine.core import Core
from kvterrace.engine.missing import MissingFiles
from kvterrace.engine.reclaim import tombstones_nbytes
from kvterrace.engine.sealing import SegmentMaker
from kvterrace.engine.space import SegmentState
from kvterrace.engine.tombstones import Tombstones
from kvterrace.engine.volume import Volume

__all__ = ["MOST_OWED", "Emptying"]

_log = logging.getLogger(__name__)

#: Keys that wait to be written down as dead while none is written, at most: about 140 B of memory each.
MOST_OWED = 1 << 18
#: None is written if none has been for this long.
_STILL_S = 60.0
#: A segment that should go and is still there after this long is not waited for by a flush.
_STUCK_S = 5.0
#: Most time between two looks that counts: a process that was stopped has not waited for the drive.
_WATCH_S = 2.0
#: Of the capacity, what tombstones may take beside a segment that could not be read; looked at this often.
_KEPT_SHARE = 1 / 8
_LOOK_S = 10.0


class Emptying:
    """Gives up segments where remembering what is dead in them would have no bound. Used under the store's lock.

    A drive that takes no writes, and owes more than `MOST_OWED` keys, is emptied: its segments go one by one, the
    oldest first, each durably before the next, since a tombstone that is on the drive must outlive what it kills. Until
    all are gone the invalidations are owed, so no flush says that they are durable. What DRAM holds stays; what is on
    that drive alone is lost, active KV included.

    A segment that could not be read at open keeps every later tombstone on the drive. Once these take an eighth of the
    capacity it is removed.
    """

    def __init__(
        self, core: Core, volume: Volume, maker: SegmentMaker, tombstones: Tombstones, missing: MissingFiles
    ) -> None:
        self._maker = maker
        self._tombstones = tombstones
        self._missing = missing
        self._files = volume.files
        self._space = volume.space
        self._forgetting = False  # what could not be read is given up
        self._going: list[int] = []  # in rising order
        self._oldest: int | None = None  # put-sequence number of the oldest invalidation that is not remembered
        #: Whether it gets nowhere for now: a file cannot be removed, or something hangs.
        self.is_stuck = False
        self._first: tuple[int, float] = (0, 0.0)  # the next to go, and since when
        self._written = 0
        self._still_s = 0.0
        self._looked_s = self._watched_s = core.clock.monotonic_s()

    @property
    def busy(self) -> bool:
        """Whether the drive is being emptied."""
        return bool(self._going)

    def owes(self, put_seq: int) -> bool:
        """Whether an invalidation from before the put-sequence number `put_seq` waits for the drive to be empty."""
        return self._oldest is not None and self._oldest < put_seq

    def pump(self, now_s: float) -> None:
        """To be called now and then."""
        if self._tombstones.written != self._written or len(self._tombstones) <= MOST_OWED:
            self._written, self._still_s = self._tombstones.written, 0.0
        else:
            self._still_s += min(now_s - self._watched_s, _WATCH_S)
        self._watched_s = now_s
        if self._still_s >= _STILL_S:
            self._still_s = 0.0
            self._begin()
        if self._maker.unread and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            nbytes = sum(map(tombstones_nbytes, self._space.segments.values()))
            self._forgetting = nbytes > _KEPT_SHARE * self._space.cap_nbytes
        if self._forgetting:
            self._maker.give_up_unread("what may be dead in it takes more than an eighth of the capacity to remember")
        self._go_on(now_s)

    def _begin(self) -> None:
        _log.warning(
            "%s takes no writes and owes more than %d invalidations: all that it holds is given up, so that none of "
            "that comes back; see why it cannot be written to",
            self._files.folder,
            MOST_OWED,
        )
        made = {one.number for one in self._space.segments.values() if one.state is not SegmentState.CREATING}
        self._going = sorted({*self._going, *made} - self._files.foreign)
        oldest = self._tombstones.drop()
        self._oldest = oldest if self._oldest is None else min(oldest, self._oldest)

    def _go_on(self, now_s: float) -> None:
        while self._going and self._going[0] not in self._space.segments:
            del self._going[0]
        if not self._going:
            self._oldest, self.is_stuck = None, False
            return
        segment = self._space.segments[self._going[0]]
        if segment.number != self._first[0]:
            self._first = segment.number, now_s
        self.is_stuck = now_s - self._first[1] >= _STUCK_S
        if segment.number in self._maker.unread:
            self._maker.give_up_unread("the drive takes no writes")
        elif self._missing.can_give_up(segment):
            self._missing.give_up(segment)
