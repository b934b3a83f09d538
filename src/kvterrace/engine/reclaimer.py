"""Making room on the drive: one segment at a time, what is worth keeping first, then the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvterrace.engine import reclaim, residence
from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.core import Core
from kvterrace.engine.reader import Reader
from kvterrace.engine.sealing import SegmentMaker
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.syncing import Syncing
from kvterrace.engine.tombstones import Tombstones
from kvterrace.engine.transfers import Transfer
from kvterrace.engine.volume import Volume
from kvterrace.types import DeviceFailed, Expired, Hit

__all__ = ["Reclaimer"]

#: Where every segment is in use, this long until they are looked at again.
_RECLAIM_AGAIN_S = 0.02
#: A segment that could not be read at open serves nobody: it is the first to make room, but not at once.
_UNREAD_S = 10.0
#: Where a read of what must not be lost has failed, this long until the next try.
_AFTER_FAILURE_S = 5.0
#: Reclaims called off in a row because DRAM had no room for what must not be lost, until the blocks in DRAM that are
#: worth least give way to it, written or not: else a full DRAM tier and a full drive would wait for each other for
#: ever.
_CALL_OFFS = 12
#: Another drive that writes or syncs what was carried over is waited for this long at most, from when nothing of it is
#: left for this drive to do: if that hangs, this one must not fill up meanwhile. This drive has all the time it takes.
_ANEW_S = 1.0
#: Reads of a segment of which none has ended for this long are not waited for any more; as those of a request.
_STALL_S = 30.0


class Reclaimer:
    """Carries out what `reclaim` decides. Used under the store's lock."""

    def __init__(
        self,
        core: Core,
        volume: Volume,
        reader: Reader,
        maker: SegmentMaker,
        syncing: Syncing,
        tombstones: Tombstones,
        *,
        sync_volumes: Callable[[set[int], Callable[[bool], None]], int],
    ) -> None:
        """`sync_volumes`: as `Syncing.sync`, for volumes by number."""
        self._core = core
        self._volume = volume
        self._reader = reader
        self._maker = maker
        self._syncing = syncing
        self._sync_volumes = sync_volumes
        self._tombstones = tombstones
        self._space = volume.space
        self._reclaiming: Segment | None = None
        self._carry: Transfer | None = None
        self._moved: list[bool] | None = None  # tombstones of the segment being reclaimed are on their way elsewhere
        self._moved_syncs: int | None = None
        #: Given up, now to be written again: ids, put_seq, pages of the old copies.
        self._anew: tuple[Ids, npt.NDArray[np.int64], Ids] | None = None
        self._progress: tuple[int, float] = (-1, 0.0)  # blocks carried, and when that was first seen
        self._anew_syncs: list[tuple[list[bool], int]] | None = None  # of this drive, and of the others
        self._avoided: set[int] = set()  # segments of which reclaim was called off since one succeeded
        self._called_off = 0
        self._carried: Ids = np.zeros(0, np.int32)
        self._anew_until_s = 0.0
        self._reclaim_again_s = 0.0
        self._unread_until_s = core.clock.monotonic_s() + _UNREAD_S
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether a segment is being reclaimed."""
        return self._reclaiming is not None

    @property
    def is_writing(self) -> bool:
        """Whether something of the segment being reclaimed is to be written elsewhere before it goes."""
        return self._anew is not None or self._moved is not None

    def close(self) -> None:
        """Begin no more; what is under way is called off by the next `go_on`."""
        self._closing = True

    def is_done_with(self, segment: Segment) -> bool:
        """Whether nothing in `segment` matters any more. One being reclaimed may be called off until it goes."""
        if segment is self._reclaiming:
            return False
        return segment.state in (SegmentState.RECLAIMING, SegmentState.STUCK)

    def ahead(self, now_s: float) -> None:
        """Make room for the next segment while the open one still has some."""
        segment = self._space.open
        if segment is None or self._closing or self._space.room_for_segment():
            return
        if segment.used_nbytes > segment.file_nbytes // 2:
            self.start(now_s)

    def start(self, now_s: float) -> None:
        """Begin to make room for one more segment, unless that is under way, or cannot be for now."""
        if self._closing:
            return
        if self._reclaiming is not None:
            return
        if self._maker.sealing or self._space.in_state(SegmentState.SEALING):
            return
        if now_s < self._reclaim_again_s:
            return
        if not self._volume.gate.is_open:
            return  # what is worth keeping could not be read
        if now_s >= self._unread_until_s and self._maker.give_up_unread("its room is wanted"):
            return
        ledger = self._core.ledger
        space, avoided = self._space, self._avoided

        def only(one: Segment) -> bool:
            return one.number not in avoided and self._may_go(one)

        found = residence.choose(ledger, now_s, space=space, only=only)
        if found is None and avoided:
            avoided.clear()
            found = residence.choose(ledger, now_s, space=space, only=only)
        if found is None:
            self._space.lent = True
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            return
        segment, carry = found
        fits = [ledger.geometry_of(block).record_nbytes <= self._space.max_record_nbytes for block in carry.tolist()]
        carry = carry[np.array(fits, bool)]  # larger ones are from a store with larger segments
        if self._called_off:  # there is little room in DRAM: only for what others need
            pinned = ledger.table.pins[carry] > 0
            needed = [reclaim.holds_up(ledger, segment, block) for block in carry.tolist()]
            carry = carry[pinned | np.array(needed, bool)]
        room_nbytes = self._space.carried_room_nbytes
        if room_nbytes:
            carry = reclaim.fitting(ledger, carry, room_nbytes)
        if self._called_off >= _CALL_OFFS:
            table, namespaces = ledger.table, [ledger.run_of(block).namespace for block in carry.tolist()]
            for namespace in set(namespaces):  # what gives way to those of one may take some of another along
                some = carry[(np.array(namespaces) == namespace) & (table.segment[carry] == segment.number)]
                if len(some):
                    ledger.drop_for(some)
            carry = carry[table.segment[carry] == segment.number]
        self._reclaiming = segment
        self._progress = (-1, now_s)
        segment.state = SegmentState.RECLAIMING
        self._carried = carry
        self._carry = self._reader.bring(carry, now_s)

    def _may_go(self, segment: Segment) -> bool:
        """Whether the tombstones of `segment`, if they are still needed, and its active KV could be written elsewhere
        first.
        """
        if not self._maker.can_open and self._kills_older(segment) and not self._kills_stuck_alone(segment):
            return False
        ledger = self._core.ledger
        ids = segment.live_ids(ledger.table)
        pinned = ids[ledger.table.pins[ids] > 0]
        return len(reclaim.fitting(ledger, pinned, self._space.carried_room_nbytes)) == len(pinned)

    def _end(self) -> None:
        self._space.moving = False
        self._tombstones.move_no_more()
        self._space.first = np.zeros(0, np.int32)
        self._reclaiming = self._carry = self._moved = self._moved_syncs = self._anew = self._anew_syncs = None

    def _call_off(self, segment: Segment) -> None:
        """What `segment` holds stays where it is, for now."""
        segment.state = SegmentState.SEALED
        self._avoided.add(segment.number)
        self._end()

    def go_on(self, now_s: float) -> None:
        """Take the reclaim under way as far as it can go by now."""
        segment, carry, ledger = self._reclaiming, self._carry, self._core.ledger
        if segment is None or carry is None:
            return
        if self._closing:
            self._call_off(segment)
            return
        if self._anew is not None:
            self._finish(segment, now_s)
            return
        live = segment.live_ids(ledger.table)
        if not carry.done or segment.readers or (ledger.table.users[live] > 0).any():
            if self._progress[0] != carry.done_blocks:
                self._progress = (carry.done_blocks, now_s)
            if now_s - self._progress[1] >= _STALL_S:
                carry.give_up()
                self._call_off(segment)  # not chosen again while it is in use
            return
        missing = ledger.table.state[live] == DramState.EMPTY
        if (ledger.table.pins[live] > 0)[missing].any():
            self._called_off += 1
            self._space.lent = True
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            self._call_off(segment)  # active KV found no room in DRAM: this segment stays for now
            return
        missing &= np.isin(live, self._carried)
        failed = any(isinstance(outcome, DeviceFailed | Expired) for outcome in carry.outcomes)
        if any(reclaim.holds_up(ledger, segment, block) for block in live[missing].tolist()):
            self._called_off += not failed
            self._space.lent = not failed
            self._reclaim_again_s = now_s + (_AFTER_FAILURE_S if failed else _RECLAIM_AGAIN_S)
            self._call_off(segment)
            return
        if self._kills_older(segment) and not self._tombstones_moved(segment, now_s):
            return
        ready = ledger.table.state[live] == DramState.READY
        pinned = ledger.table.pins[live] > 0
        room_nbytes = self._space.carried_room_nbytes
        if len(reclaim.fitting(ledger, live[pinned], room_nbytes)) < pinned.sum():
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            self._call_off(segment)  # pinned since the reclaim began, or its tombstones have taken the room
            return
        if room_nbytes:
            others = self._carried[np.isin(self._carried, live[ready & ~pinned])]
            self._carried = reclaim.fitting(ledger, np.concatenate([live[pinned], others]), room_nbytes)
        self._core.stats.carried_blocks += sum(isinstance(outcome, Hit) for outcome in carry.outcomes)
        self._core.stats.reclaimed_segments += 1
        self._called_off = 0
        self._space.lent = False
        self._avoided.clear()
        live = np.sort(live)
        pages = ledger.table.page[live]
        anew = reclaim.give_up(ledger, segment, self._carried, now_s)
        ledger.dirty.hurry(anew)
        if not room_nbytes:
            # Opened with less room than it takes, or what was kept for this is spoilt. There is idle KV alone here: it
            # stays in DRAM until there is room, which a crash may forestall.
            anew = anew[:0]
        self._anew = anew, ledger.table.put_seq[anew], pages[np.searchsorted(live, anew)]
        self._anew_until_s = now_s + _ANEW_S
        self._finish(segment, now_s)

    def _finish(self, segment: Segment, now_s: float) -> None:
        if self._written_anew(now_s):
            self._end()
            self._maker.remove(segment)

    def _written_anew(self, now_s: float) -> bool:
        """Whether what was carried over is on a drive elsewhere, and synced. Until then its old copies are what a crash
        leaves; they count again if it can be written nowhere (the room for it went with a failed write). Another drive
        that has it, and may hang, is not waited for for ever; this one is, however slow it may be.
        """
        assert self._anew is not None and self._reclaiming is not None
        ledger = self._core.ledger
        table, (ids, put_seq, pages), segment = ledger.table, self._anew, self._reclaiming
        if not len(ids):
            return True
        waits = (table.put_seq[ids] == put_seq) & (table.run[ids] != NOWHERE) & (table.state[ids] == DramState.READY)
        waits &= (table.segment[ids] == NOWHERE) & ~table.spent[ids] & ~ledger.doomed(ids)
        self._space.first = ids[waits]
        if waits.any():
            self._anew_syncs = None
            writing = table.writing[ids[waits]]
            if not self._maker.can_open and not writing.any():
                reclaim.take_back(ledger, segment, ids[waits], pages[waits])
                self._call_off(segment)
                return False
            ours = any(ledger.dealing.takes(self._space, block) for block in ids[waits][~writing].tolist())
            return self._given_up_waiting(now_s, here=ours or self._writes_here)
        if self._anew_syncs is None:
            own = self._core.volume_of(segment.number).number
            copies = table.segment[ids][table.segment[ids] != NOWHERE].tolist()
            others = {self._core.volume_of(number).number for number in copies} - {own}
            self._anew_syncs = []
            for volumes in ({own}, others):
                ended: list[bool] = []
                self._anew_syncs.append((ended, self._sync_volumes(volumes, ended.append)))
        here, elsewhere = (len(ended) < wanted for ended, wanted in self._anew_syncs)
        if here or elsewhere:
            return self._given_up_waiting(now_s, here=here)
        fine = all(all(ended) for ended, _ in self._anew_syncs)
        if not fine:
            self._anew_syncs = None  # what the SYNC has lost waits again
        return fine

    @property
    def _writes_here(self) -> bool:
        """Whether this drive is writing something: maybe what was carried over."""
        shut = self._space.in_state(SegmentState.SEALING)
        return any(one.writers for one in shut) or (self._space.open is not None and self._space.open.writers > 0)

    def _given_up_waiting(self, now_s: float, *, here: bool) -> bool:
        """Whether another drive alone has kept reclaim waiting for too long. `here`: this drive has something to do."""
        if here:
            self._anew_until_s = now_s + _ANEW_S
        return now_s >= self._anew_until_s

    def _tombstones_moved(self, segment: Segment, now_s: float) -> bool:
        """Whether the tombstones of `segment` are on the drive elsewhere: what they kill is in older segments, and must
        not come back. Where they cannot be written, reclaim is called off.
        """
        if self._moved is None:
            self._tombstones.move(segment)
            self._moved = []
        if not self._maker.can_open and self._kills_stuck_alone(segment):
            return True  # they go into the segment that gets its room
        self._space.moving = not self._tombstones.moved
        if self._buried(self._moved):
            return True
        failed = self._moved_syncs is not None and not all(self._moved)
        if failed or (self._tombstones.moved_wait and not self._maker.can_open):
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            self._call_off(segment)
        return False

    def _kills_older(self, segment: Segment) -> bool:
        oldest = self._space.oldest
        return bool(segment.tombstones) and oldest is not None and oldest < segment.number

    def _kills_stuck_alone(self, segment: Segment) -> bool:
        """Whether what its tombstones kill can only be in segments that cannot be read. These keep their share of the
        capacity for a while; where nothing else is older, and nothing is left to write to, all would stand still. The
        tombstones are owed meanwhile: a crash before they are written again could bring back what is in such a segment,
        if that can be read then.
        """
        older = (one for number, one in self._space.segments.items() if number < segment.number)
        return all(one.state is SegmentState.STUCK for one in older)

    def _buried(self, ended: list[bool]) -> bool:
        """Whether the tombstones that are to be moved are written, and every SYNC since has succeeded; `ended` collects
        these, submitted by the first call that finds all written. What is invalidated meanwhile is not waited for.
        """
        if self._moved_syncs is None:
            if not self._tombstones.moved:
                return False
            self._moved_syncs = self._syncing.sync(ended.append)
        return len(ended) >= self._moved_syncs and all(ended)
