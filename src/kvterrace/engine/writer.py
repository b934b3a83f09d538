"""The way down: idle blocks that have no copy below, into segments; and segments in and out of being."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvterrace.engine import reclaim
from kvterrace.engine.blocks import NOWHERE, DramState, Ids
from kvterrace.engine.core import Core
from kvterrace.engine.dirty import WriteBatch
from kvterrace.engine.reader import Reader
from kvterrace.engine.space import Segment, SegmentState
from kvterrace.engine.transfers import Transfer
from kvterrace.format.record import (
    PAGE_NBYTES,
    RecordHeader,
    decode_header,
    encode_tombstone,
    pad_to_page,
    place,
    tombstone_nbytes_for,
)
from kvterrace.format.segment import TOMBSTONE_DTYPE
from kvterrace.io.base import IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.keys import KEY_NBYTES
from kvterrace.tiers.segments import NewFile
from kvterrace.types import DeviceFailed, Expired, Hit

__all__ = ["Writer"]

_log = logging.getLogger(__name__)

#: Write batches in flight at once: one being written, one queued behind it.
_DEPTH = 2
#: After as many failed writes as `_FAILURES`, or one that says that the drive takes none, the SSD tier takes none for
#: this long; reads go on.
_PAUSE_S = 5.0
#: Failures in a row after which writing pauses. One bad place is not met twice: what failed goes into a new segment.
_FAILURES = 3
#: Errors that say that the drive takes no writes at all.
_NO_WRITES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))
#: Where every segment is in use, this long until they are looked at again.
_RECLAIM_AGAIN_S = 0.02
#: Reclaims called off in a row because DRAM had no room for what must not be lost, until one goes on without it: else
#: a full DRAM tier and a full drive would wait for each other for ever.
_CALL_OFFS = 12
#: A failure this long after the one before it is a new episode, and worth a new warning.
_EPISODE_S = 60.0
#: Keys of one tombstone record.
_TOMBSTONE_KEYS = 4096


class Writer:
    """Write-behind, sealing, reclaim. Called under the store's lock. Used only where there is an SSD tier."""

    def __init__(self, core: Core, reader: Reader) -> None:
        assert core.files is not None and core.ledger.space is not None
        self._core = core
        self._reader = reader
        self._files = core.files
        self._space = core.ledger.space
        self._batches = 0
        self._sealing: set[int] = set()
        self._reclaiming: Segment | None = None
        self._carry: Transfer | None = None
        self._moved: list[bool] | None = None  # tombstones of the segment being reclaimed are on their way elsewhere
        self._moved_syncs: int | None = None
        self._anew: tuple[Ids, npt.NDArray[np.int64]] | None = None  # given up, now to be written again: ids, put_seq
        self._anew_syncs: tuple[list[bool], int] | None = None
        self._avoided: set[int] = set()  # segments of which reclaim was called off since one succeeded
        self._called_off = 0
        self._carried: Ids = np.zeros(0, np.int32)
        self._removing = 0
        self._tombstones: list[tuple[bytes, bytes, int]] = []  # namespace digest, key, put-sequence
        self._burying: dict[int, int] = {}  # put-sequence -> tombstone records of it in flight
        # segment -> count of writes when it was last written; synced leaves. A footer found at open says: synced
        scanned = self._files.scanned
        self._unsynced: dict[int, int] = {
            number: 0 for number, one in self._space.segments.items() if one.records and number in scanned
        }
        self._writes = 0
        self._failures = {True: 0, False: 0}  # in a row; by whether of SYNCs
        self._resume_s = 0.0
        self._reclaim_again_s = 0.0
        self._quiet_until_s = float("-inf")
        #: Flushes under way.
        self.flushing = 0
        self.closing = False

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def bury(self, namespace: bytes, keys: list[bytes]) -> None:
        """Write down that these keys are invalid up to now, so that a restart does not bring them back."""
        ledger = self._core.ledger
        for key in keys:
            self._tombstones.append((namespace, key, ledger.next_put_seq))
        if keys:
            ledger.next_put_seq += 1

    def owes(self, put_seq: int) -> bool:
        """Whether a block or an invalidation from before the put-sequence number `put_seq` is still to be written."""
        return (
            any(seq < put_seq for _, _, seq in self._tombstones)
            or any(seq < put_seq for seq in self._burying)
            or self._core.ledger.dirty.owes(put_seq)
        )

    def sync(self, on_end: Callable[[bool], None]) -> int:
        """Make durable what was written up to now; `on_end` is called as often as the number returned says, each time
        with whether that went well.
        """
        requests = []
        for number, writes in self._unsynced.items():
            request = IoRequest(IoKind.SYNC, IoClass.DEMOTION, self._files.file(number))
            request.tag = partial(self._on_synced, number, writes, on_end)
            requests.append(request)
        self._core.engine.submit(requests)
        return len(requests)

    def _on_synced(self, number: int, writes: int, on_end: Callable[[bool], None], result: IoResult) -> None:
        segment = self._space.segments.get(number)
        gone = segment is None or segment.state in (SegmentState.RECLAIMING, SegmentState.STUCK)
        if segment is self._reclaiming and self._anew is None:
            gone = segment is None  # reclaim may be called off yet
        if result.complete:
            self._failures[True] = 0
            if self._unsynced.get(number) == writes:
                del self._unsynced[number]
        elif segment is not None and not gone:
            self._not_durable(segment, result)
        on_end(result.complete or gone)

    def _not_durable(self, segment: Segment, result: IoResult) -> None:
        """A SYNC has failed, and a second one would not say so again: what DRAM still holds is written anew."""
        ledger = self._core.ledger
        now_s = self._core.clock.monotonic_s()
        ids = segment.live_ids(ledger.table)
        for block in ids[ledger.table.state[ids] == DramState.READY].tolist():
            ledger.lost(block, now_s)
        waiting = set(self._tombstones)
        self._tombstones.extend(one for one in segment.tombstones if one not in waiting)
        self._unsynced.pop(segment.number, None)
        self._failed(segment, result)

    def _wrote(self, segment: Segment) -> None:
        self._writes += 1
        self._failures[False] = 0
        self._unsynced[segment.number] = self._writes

    @property
    def idle(self) -> bool:
        """Whether nothing is being written and, as far as writing is possible, nothing waits to be."""
        ledger = self._core.ledger
        waits = ledger.can_write and self.owes(ledger.next_put_seq)
        return not waits and not (self._batches or self._removing or self._sealing or self._creating)

    @property
    def pending(self) -> bool:
        """Whether there is something to write, now or later."""
        return bool(self._core.ledger.dirty.since_s or self._tombstones) or self._reclaiming is not None

    @property
    def _creating(self) -> bool:
        return bool(self._space.in_state(SegmentState.CREATING))

    def pump(self, now_s: float, *, pressed: bool) -> None:
        """Submit what is due. `pressed`: somebody waits for room."""
        ledger = self._core.ledger
        if not ledger.can_write and now_s >= self._resume_s and not self.closing:
            ledger.can_write = True
        pressed = pressed or self.flushing > 0
        if ledger.can_write:
            while self._batches < _DEPTH:
                batch = ledger.next_write(now_s, pressed=pressed)
                if batch is None:
                    break
                self._write(batch)
            self._write_tombstones()
            if ledger.needs_segment() or (self._tombstones and self._space.open is None):
                self._next_segment(now_s)
        for segment in self._space.in_state(SegmentState.SEALING):
            if not segment.writers and segment.number not in self._sealing:
                self._seal(segment)
        if self._space.file_nbytes > self._space.cap_nbytes:
            self._start_reclaim(now_s)  # the store was opened with less room than it takes
        self._reclaim_ahead(now_s)
        self._finish_reclaim(now_s)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, batch: WriteBatch) -> None:
        core, number = self._core, batch.segment.number
        buffers, headers = [], []
        offset = batch.offset
        for block in batch.ids.tolist():
            slot = core.slot(block)
            place(slot, self._files.nonce(number), offset)
            header = decode_header(slot)
            assert isinstance(header, RecordHeader), f"a slot without a header: {header}"
            headers.append(header)
            buffers.append(slot)
            offset += slot.nbytes

        def on_result(result: IoResult) -> None:
            self._batches -= 1
            core.stats.ssd_written_nbytes += result.nbytes
            if result.complete:
                for header in headers:
                    self._files.footers[number].add(header)
                self._wrote(batch.segment)
                core.ledger.written(batch)
            else:
                core.ledger.write_failed(batch)
                core.ledger.dirty.hurry(batch.ids)
                self._failed(batch.segment, result)

        self._batches += 1
        core.stats.ssd_write_requests += 1
        core.engine.submit(
            [IoRequest(IoKind.WRITE, IoClass.DEMOTION, self._files.file(number), batch.offset, buffers, tag=on_result)]
        )

    def _write_tombstones(self) -> None:
        core, segment = self._core, self._space.open
        if not self._tombstones or segment is None:
            return
        digest, _, put_seq = self._tombstones[0]
        most = self._tombstone_keys
        some = list(itertools.takewhile(lambda one: (one[0], one[2]) == (digest, put_seq), self._tombstones[:most]))
        nbytes = tombstone_nbytes_for(len(some))
        rows_nbytes = pad_to_page(len(some) * TOMBSTONE_DTYPE.itemsize)  # what its keys add to the footer
        if not self._space.fits(segment, nbytes + rows_nbytes, core.numbers[digest]):
            self._close_open()
            return
        staging = core.ledger.reserve_extent(nbytes)
        if staging is None:
            return
        memory = core.arena.view(staging, nbytes)
        keys = b"".join(key for _, key, _ in some)
        encode_tombstone(keys, memory, put_seq=put_seq, namespace=digest)
        offset = self._space.place(segment, nbytes, core.numbers[digest])
        segment.reserved_nbytes += rows_nbytes
        place(memory, self._files.nonce(segment.number), offset)
        header = decode_header(memory)
        assert isinstance(header, RecordHeader)
        del self._tombstones[: len(some)]
        self._burying[put_seq] = self._burying.get(put_seq, 0) + 1
        segment.writers += 1
        self._batches += 1

        def on_result(result: IoResult) -> None:
            self._batches -= 1
            segment.writers -= 1
            self._burying[put_seq] -= 1
            if not self._burying[put_seq]:
                del self._burying[put_seq]
            core.ledger.dram.allocator.free(staging)
            core.stats.ssd_written_nbytes += result.nbytes
            if result.complete:
                self._files.footers[segment.number].add(header, tombstone_keys=keys)
                segment.tombstones.extend(some)
                self._wrote(segment)
            else:
                self._tombstones.extend(some)
                self._failed(segment, result)

        file = self._files.file(segment.number)
        core.engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMOTION, file, offset, [memory], tag=on_result)])

    def _failed(self, segment: Segment, result: IoResult) -> None:
        """A write did not succeed: never write into this segment again, and none at all for a while if the drive takes
        none. Warned of once in each episode.
        """
        sync = result.request.kind is IoKind.SYNC
        self._failures[sync] += 1
        fault = result.error or result.crash
        full = isinstance(fault, OSError) and fault.errno in _NO_WRITES
        pauses = full or self._failures[sync] >= _FAILURES
        ledger = self._core.ledger
        self._core.stats.ssd_write_failures += 1
        now_s = self._core.clock.monotonic_s()
        if now_s >= self._quiet_until_s:
            _log.warning(
                "writing to %s failed: %s; tried again %s, reads go on",
                self._files.folder,
                _why(result),
                f"every {_PAUSE_S:.0f} s" if pauses else "elsewhere",
            )
        self._quiet_until_s = now_s + _EPISODE_S
        if pauses:
            self._resume_s = now_s + _PAUSE_S
            ledger.can_write = False
        if segment is self._space.open:
            self._close_open()

    @property
    def _tombstone_keys(self) -> int:
        """Keys that a tombstone may have so that it, and its rows in the footer, fit half a segment and some DRAM."""
        room = min(self._space.segment_nbytes // 6, self._core.arena.nbytes // 4) - 2 * PAGE_NBYTES
        return max(PAGE_NBYTES // KEY_NBYTES, min(_TOMBSTONE_KEYS, room // KEY_NBYTES))

    # -- segments ------------------------------------------------------------------------------------------------------

    def _next_segment(self, now_s: float) -> None:
        if self._space.open is not None:
            self._close_open()
        if self._creating:
            return
        if not self._space.room_for_segment():
            self._start_reclaim(now_s)
            return
        core, segment = self._core, self._space.begin()
        created_ns = int(core.clock.unix_s() * 1e9)

        def on_headed(result: IoResult) -> None:
            segment.state = SegmentState.OPEN
            if result.complete:
                self._space.open = segment
            else:
                segment.state = SegmentState.SEALED  # empty: the next to be reclaimed
                self._failed(segment, result)

        def on_created(result: IoResult) -> None:
            if result.crash is not None:
                self._space.remove(segment)
                if isinstance(result.crash, FileExistsError):
                    return  # something lies there that is no segment of ours: the next number will do
                self._failed(segment, result)
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

    def _close_open(self) -> None:
        segment = self._space.open
        if segment is not None:
            segment.state = SegmentState.SEALING
            self._space.open = None

    def seal_open(self) -> None:
        """Append no more to the open segment: it is sealed once its writes have ended."""
        self._close_open()

    def _seal(self, segment: Segment) -> None:
        """SYNC data, write footer and trailer, cut the file behind them, SYNC. A failure leaves it to a scan at the
        next open.
        """
        core, number = self._core, segment.number
        if not segment.records:
            self._remove(segment)  # made and never used
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
                self._failures[True] = 0
                segment.file_nbytes = end
                self._unsynced.pop(number, None)
            elif result.request.kind is IoKind.SYNC:
                self._not_durable(segment, result)
            else:
                self._failed(segment, result)

        on_result(IoResult(steps[0]))

    # -- reclaim -------------------------------------------------------------------------------------------------------

    def _reclaim_ahead(self, now_s: float) -> None:
        """Make room for the next segment while the open one still has some."""
        segment = self._space.open
        if segment is None or self.closing or self._space.room_for_segment():
            return
        if segment.used_nbytes > segment.file_nbytes // 2:
            self._start_reclaim(now_s)

    def _start_reclaim(self, now_s: float) -> None:
        if self.closing or self._reclaiming is not None or self._sealing or self._space.in_state(SegmentState.SEALING):
            return
        if now_s < self._reclaim_again_s:
            return
        if self._reader.gate is not None and not self._reader.gate.is_open:
            return  # what is worth keeping could not be read
        ledger = self._core.ledger
        found = reclaim.choose(ledger, now_s, only=lambda one: self._may_go(one) and one.number not in self._avoided)
        if found is None:
            self._avoided.clear()
            found = reclaim.choose(ledger, now_s, only=self._may_go)
        if found is None:
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            return
        segment, carry = found
        fits = [ledger.geometry_of(block).record_nbytes <= self._space.max_record_nbytes for block in carry.tolist()]
        carry = carry[np.array(fits, bool)]  # larger ones are from a store with larger segments
        if self._called_off:  # there is little room in DRAM: only for what others need
            pinned = ledger.table.pins[carry] > 0
            needed = [reclaim.holds_up(ledger, segment, block) for block in carry.tolist()]
            carry = carry[pinned | np.array(needed, bool)]
        self._reclaiming = segment
        segment.state = SegmentState.RECLAIMING
        self._carried = carry
        self._carry = self._reader.bring(carry, now_s)

    def _may_go(self, segment: Segment) -> bool:
        """Whether the tombstones of `segment`, if they are still needed, could be written elsewhere first."""
        return self._can_open or not self._kills_older(segment)

    def _end_reclaim(self) -> None:
        self._reclaiming = self._carry = self._moved = self._moved_syncs = self._anew = self._anew_syncs = None

    def _call_off(self, segment: Segment) -> None:
        """What `segment` holds stays where it is, for now."""
        segment.state = SegmentState.SEALED
        self._avoided.add(segment.number)
        self._end_reclaim()

    def _finish_reclaim(self, now_s: float) -> None:
        segment, carry, ledger = self._reclaiming, self._carry, self._core.ledger
        if segment is None or carry is None:
            return
        if self.closing:
            self._call_off(segment)
            return
        if self._anew is not None:
            if self._written_anew():
                self._end_reclaim()
                self._remove(segment)
            return
        if not carry.done:
            return
        live = segment.live_ids(ledger.table)
        if segment.readers or (ledger.table.users[live] > 0).any():
            return
        missing = ledger.table.state[live] == DramState.EMPTY
        if (ledger.table.pins[live] > 0)[missing].any():
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            self._call_off(segment)  # active KV found no room in DRAM: this segment stays for now
            return
        missing &= np.isin(live, self._carried)
        failed = any(isinstance(outcome, DeviceFailed | Expired) for outcome in carry.outcomes)
        if (failed or self._called_off < _CALL_OFFS) and any(
            reclaim.holds_up(ledger, segment, block) for block in live[missing].tolist()
        ):
            self._called_off += not failed
            self._reclaim_again_s = now_s + (_PAUSE_S if failed else _RECLAIM_AGAIN_S)
            self._call_off(segment)
            return
        if self._kills_older(segment) and not self._tombstones_moved(segment, now_s):
            return
        self._core.stats.carried_blocks += sum(isinstance(outcome, Hit) for outcome in carry.outcomes)
        self._core.stats.reclaimed_segments += 1
        self._called_off = 0
        self._avoided.clear()
        anew = reclaim.give_up(ledger, segment, self._carried, now_s)
        ledger.dirty.hurry(anew)
        self._anew = anew, ledger.table.put_seq[anew]
        if self._written_anew():
            self._end_reclaim()
            self._remove(segment)

    def _written_anew(self) -> bool:
        """Whether what was carried over is on the drive elsewhere, and synced, or cannot be before there is room. Until
        then its old copies are what a crash leaves.
        """
        assert self._anew is not None
        ledger = self._core.ledger
        table, (ids, put_seq) = ledger.table, self._anew
        if not len(ids) or not ledger.can_write or not self._can_open:
            return True
        waits = (table.put_seq[ids] == put_seq) & (table.run[ids] != NOWHERE) & (table.state[ids] == DramState.READY)
        waits &= (table.segment[ids] == NOWHERE) & ~table.spent[ids] & ~ledger.doomed(ids)
        if waits.any():
            self._anew_syncs = None
            return False
        if self._anew_syncs is None:
            ended: list[bool] = []
            self._anew_syncs = ended, self.sync(ended.append)
        ended, wanted = self._anew_syncs
        if len(ended) < wanted:
            return False
        if not all(ended):
            self._anew_syncs = None  # what the SYNC has lost waits again
        return all(ended)

    def _tombstones_moved(self, segment: Segment, now_s: float) -> bool:
        """Whether the tombstones of `segment` are on the drive elsewhere: what they kill is in older segments, and must
        not come back. Where they cannot be written, reclaim is called off.
        """
        if self._moved is None:
            waiting = set(self._tombstones)
            self._tombstones.extend(one for one in segment.tombstones if one not in waiting)
            self._moved = []
        if self._buried(self._moved):
            return True
        failed = self._moved_syncs is not None and len(self._moved) >= self._moved_syncs
        if failed or (self._tombstones and not self._can_open):
            self._reclaim_again_s = now_s + _RECLAIM_AGAIN_S
            self._call_off(segment)
        return False

    def _kills_older(self, segment: Segment) -> bool:
        return bool(segment.tombstones) and any(other < segment.number for other in self._space.segments)

    @property
    def _can_open(self) -> bool:
        return self._space.open is not None or self._creating or self._space.room_for_segment()

    def _buried(self, ended: list[bool]) -> bool:
        """Whether every tombstone is written, and every SYNC since has succeeded; `ended` collects these, submitted by
        the first call that finds all written.
        """
        if self._tombstones or self._burying:
            return False
        if self._moved_syncs is None:
            self._moved_syncs = self.sync(ended.append)
        return len(ended) >= self._moved_syncs and all(ended)

    def _remove(self, segment: Segment) -> None:
        """Unlink the file of a segment that holds nothing any more; until that is done it counts towards the
        capacity.
        """
        number = segment.number
        segment.state = SegmentState.RECLAIMING
        self._files.forget(number)
        self._unsynced.pop(number, None)
        self._removing += 1

        def on_removed(result: IoResult) -> None:
            self._removing -= 1
            if result.crash is None or isinstance(result.crash, FileNotFoundError):
                self._space.remove(segment)
                return
            segment.state = SegmentState.STUCK
            _log.warning(
                "%s cannot be removed: %s; its room is lost until it can", self._files.path(number), result.crash
            )

        request = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: self._files.remove(number), tag=on_removed)
        self._core.engine.submit([request])


def _why(result: IoResult) -> str:
    fault = result.error or result.crash
    if fault is not None:
        return str(fault)
    return f"short write: {result.nbytes} of {result.wanted_nbytes} B"
