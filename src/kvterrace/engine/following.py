"""A reader follows the process that writes its partition: what is new on the drives, and what is gone.

A look at each drive, about once a second, on one of its engine's threads; what it found is entered under the store's
lock, in slices. Each volume is looked at by itself: a drive that hangs holds up no other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock
from kvterrace.engine.bad_places import BadPlaces
from kvterrace.engine.core import Core
from kvterrace.engine.gate import ReadGate
from kvterrace.engine.grafting import MOST_WAITING, Grafts, Row, rows_of
from kvterrace.engine.rebuild import rebuild
from kvterrace.engine.shared_ledger import SharedLedger
from kvterrace.engine.space import MOST_VOLUMES, Segment, SegmentSpace, SegmentState
from kvterrace.engine.volume import Volume
from kvterrace.errors import KVTerraceError, StoreUnusableError
from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import SegmentContents
from kvterrace.health.quarantine import FILE_NBYTES, log_generation
from kvterrace.health.quarantine_log import read_log
from kvterrace.io.base import FileInfo, IoClass, IoEngine, IoKind, IoRequest, IoResult
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.marker import Marker
from kvterrace.tiers.segments import RecoveredSegment, footer_room_nbytes
from kvterrace.tiers.sharing import Known, Learnt, Look, SharedFiles

__all__ = ["LOOK_S", "Follower", "shared_volumes"]

_log = logging.getLogger(__name__)

#: From the end of one look at a drive to the next.
LOOK_S = 1.0
#: At most one part in so many of the time is spent looking: a folder of many thousand segments is looked at less often.
_IDLE_SHARE = 20
#: Blocks that are entered, or given up, in one go under the store's lock.
_SLICE = 512
#: How often a file of the quarantine log is read as it is.
_LOG_READS = 2
#: No bound: how large a segment may be is the writer's affair.
_ANY_NBYTES = 1 << 46


def shared_volumes(drives: Sequence[tuple[StoreDirectory, IoEngine]], clock: Clock) -> tuple[Volume, ...]:
    """A volume that is only read for each drive; nothing is read yet."""
    assert len(drives) <= MOST_VOLUMES, "more drives than a segment's number can tell apart"
    volumes = []
    for number, (directory, engine) in enumerate(drives):
        alone = len(drives) == 1
        space = SegmentSpace(0, _ANY_NBYTES, footer_room_nbytes, volume=number, alone=alone)
        space.can_write = False
        files = SharedFiles(engine, directory.partition, directory.store_uuid)
        bad = BadPlaces(files, space, clock, file_nbytes=FILE_NBYTES)  # the writer's log is read, never written here
        volumes.append(Volume(number, engine, files, space, ReadGate(clock, str(files.folder)), bad))
    return tuple(volumes)


@dataclass(slots=True, eq=False)
class _Found:
    """What a look has found; `logs`: files of the writer's quarantine log, and what they hold."""

    look: Look
    logs: list[tuple[FileInfo, Bytes]] = field(default_factory=list)


class _Followed:
    """One volume, and what of it is known by file name.

    Attributes:
        gone: segments whose file is gone, until nobody holds them any more.
        logs: of each file of the writer's quarantine log its mark, and how often it was read with it.
        stale: the drive is none of the store's at this moment: nothing on it is believed, and only its `store.json` is
            looked at.
    """

    def __init__(self, volume: Volume, store_uuid: bytes) -> None:
        assert isinstance(volume.files, SharedFiles)
        self.volume = volume
        self.files = volume.files
        self.store_uuid = store_uuid
        self.marker: Marker | None = None
        self.known: dict[str, Known] = {}
        self.gone: dict[int, Segment] = {}
        self.logs: dict[str, tuple[int, int]] = {}
        self.looking = False
        self.next_s = 0.0
        self.failing = False
        self.stale = False


def _look_at(one: _Followed, known: dict[str, Known], logs: dict[str, tuple[int, int]], **how: bool) -> _Found:
    """On an engine's thread: a look at the drive. Of the quarantine log is read what was not read twice as it is: two
    changes within one tick of the file system's clock look as one, and the second read comes later than that.
    """
    found = _Found(one.files.look(known, **how))
    for info in found.look.others:
        mark, times = logs.get(info.name, (0, 0))
        if log_generation(info.name) is None or (info.mark == mark != 0 and times >= _LOG_READS):
            continue
        try:
            found.logs.append((info, read_log(one.files.engine, one.files.folder, info)))
        except OSError as error:  # gone since it was listed, or read with the next look
            _log.debug("%s: %s", one.files.folder / info.name, error)
    return found


class Follower:
    """Used under the store's lock, except for `open`, and for what runs on the engines' threads."""

    def __init__(self, core: Core, ledger: SharedLedger, directories: Sequence[StoreDirectory]) -> None:
        """`ledger`: that of `core`."""
        self._core = core
        self._grafts = Grafts(core, ledger)
        self._each = [
            _Followed(volume, directory.store_uuid) for volume, directory in zip(core.volumes, directories, strict=True)
        ]
        self._work: deque[Callable[[float], None]] = deque()
        self._put_seq = 0  # the next one of this process, when it was last looked at
        self._newest = 0  # the highest that was found on a drive
        self._closing = False

    @property
    def idle(self) -> bool:
        """Whether no look is under way."""
        return not any(one.looking for one in self._each)

    def close(self) -> None:
        """Look no more."""
        self._closing = True

    def timeout_s(self, now_s: float) -> float:
        """How long until there is something to do by the clock."""
        if self._work:
            return 0.0
        if self._closing:
            return LOOK_S
        return min((one.next_s - now_s for one in self._each if not one.looking), default=LOOK_S)

    def forget(self, keys: Collection[bytes]) -> None:
        """These blocks were invalidated in this process: they stay out of the index until they are written anew."""
        self._grafts.remember_dead((key, self._newest + 1) for key in keys)

    # -- opening -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Enter what lies on the drives. Blocks.

        Raises:
            StoreUnusableError, or one of its kinds: not all could be read, or by this version.
        """
        found: list[RecoveredSegment] = []
        contents: list[tuple[int, SegmentContents]] = []
        for one in self._each:
            try:
                first = _look_at(one, {}, {}, first=True)
            except OSError as error:
                raise StoreUnusableError(
                    f"cannot read {one.files.folder}: {error.strerror or error}; ask its owner for permission to read"
                ) from error
            one.marker = first.look.marker
            space = one.volume.space
            for learnt in first.look.learnt:
                number = space.next_number + len(one.known)
                assert learnt.contents is not None
                self._know(one, number, learnt)
                found.append(RecoveredSegment(number, learnt.file_nbytes, learnt.contents))
                contents.append((number, learnt.contents))
            self._learn(one, first)
        now_s = self._core.clock.monotonic_s()
        rebuild(self._core, found, now_s)
        for one in self._each:
            space = one.volume.space
            for known in one.known.values():
                space.segments[known.number].state = SegmentState.SEALED if known.sealed else SegmentState.GROWING
            space.cap_nbytes = space.file_nbytes
            one.next_s = now_s  # what came while others were read is to be found at once
        self._newest = self._core.ledger.next_put_seq - 1
        for _, some in contents:
            self._grafts.remember_dead(_dead(some))
        self._grafts.enter(self._left_out(contents), now_s)

    def _left_out(self, contents: list[tuple[int, SegmentContents]]) -> list[Row]:
        """Blocks that are not in the index: what they hang on may have been written after it was looked for."""
        table = self._core.ledger.table
        inside = np.unique(np.ascontiguousarray(table.key[table.run >= 0]).view("<u8").reshape(-1, 4)[:, 0])
        rows: list[Row] = []
        for number, one in reversed(contents):
            keys = np.ascontiguousarray(one.entries["key"]).view("<u8").reshape(-1, 4)[:, 0]
            left = one.entries["kind"] == RecordKind.BLOCK
            if len(inside):
                left &= inside[np.minimum(np.searchsorted(inside, keys), len(inside) - 1)] != keys
            if left.any() and len(rows) < MOST_WAITING:
                some = SegmentContents(
                    one.header, one.state, one.entries[left], one.namespaces, one.tombstones, one.data_end, 0
                )
                rows += rows_of(some, number)
        return rows

    # -- going on ------------------------------------------------------------------------------------------------------

    def pump(self, now_s: float) -> None:
        """Enter the next slice of what was found; look where it is time."""
        if self._work:
            self._work.popleft()(now_s)
        for one in self._each:
            if not one.looking and now_s >= one.next_s and not self._work and not self._closing:
                self._look(one)

    def _look(self, one: _Followed) -> None:
        known, logs = dict(one.known), dict(one.logs)
        one.looking = True

        def on_looked(result: IoResult) -> None:
            one.looking = False
            found = result.value
            assert result.crash is None and isinstance(found, _Found), f"a look at {one.files.folder} failed: {result}"
            now_s = self._core.clock.monotonic_s()
            one.next_s = now_s + max(LOOK_S, _IDLE_SHARE * found.look.took_s)
            if self._closing:
                one.files.drop(found.look)
                return
            self._take_in(one, found)

        stale = one.stale
        request = IoRequest(
            IoKind.CALL,
            IoClass.DEMOTION,
            finish=lambda _: _look_at(one, known, logs, marker_only=stale),
            tag=on_looked,
        )
        one.volume.engine.submit([request])

    def _take_in(self, one: _Followed, found: _Found) -> None:
        """What a look found, in the order: what is bad, what is dead, what is new, what is gone."""
        look = found.look
        gone: list[Known] = []
        if look.failed is not None:
            if not one.failing:
                _log.warning("%s cannot be looked at: %s; tried again", one.files.folder, look.failed)
            one.stale |= isinstance(look.failed, KVTerraceError)  # no store any more, or one of a newer format
        else:
            one.marker = look.marker
            one.stale = self._is_stale(one)
            if one.stale:
                one.files.drop(look)
            else:
                gone = [one.known.pop(name) for name in look.gone]
                new = {learnt.header.nonce for learnt in look.learnt if learnt.was is None}
                for nonce, number in self._learn(one, found, new):
                    segment = one.volume.space.segments[number]
                    self._work.append(partial(self._grafts.condemn, segment, one.volume.bad.places(nonce)))
                self._enter(one, look.learnt)
        one.failing = look.failed is not None
        if one.stale:
            gone = list(one.known.values())
            one.known.clear()
            one.logs.clear()
        for known in gone:
            # no read of it begins from the next slice on, but of what is pinned
            segment = one.volume.space.segments[known.number]
            segment.state = SegmentState.RECLAIMING
            one.gone[known.number] = segment
            self._grafts.leave(known.number)
        self._work += [partial(self._end, one, number) for number in one.gone]

    def _learn(self, one: _Followed, found: _Found, new: Collection[bytes] = ()) -> list[tuple[bytes, int]]:
        """Take in what the writer's quarantine log says of the segments known, and of those with `new` nonces; which
        of the former, by nonce and number, have more bad places now.
        """
        numbers = {known.header.nonce: known.number for known in one.known.values()}
        worse = one.volume.bad.learn([data for _, data in found.logs], numbers.keys() | set(new))
        for info, _ in found.logs:
            mark, times = one.logs.get(info.name, (0, 0))
            one.logs[info.name] = info.mark, times + 1 if info.mark == mark else 1
        one.logs = {info.name: one.logs[info.name] for info in found.look.others if info.name in one.logs}
        return [(nonce, numbers[nonce]) for nonce in worse & numbers.keys()]

    def _enter(self, one: _Followed, everything: list[Learnt]) -> None:
        space = one.volume.space
        dead: list[tuple[bytes, int]] = []
        news: list[tuple[SegmentContents, int]] = []
        for learnt in everything:
            if learnt.was is None and space.used_up:
                one.files.engine.close_file(learnt.file)  # until the store is opened anew: see ADR 0006
                continue
            number = self._enter_segment(one, learnt)
            if learnt.contents is not None:
                dead += _dead(learnt.contents)
                news.append((learnt.contents, number))
        space.cap_nbytes = space.file_nbytes
        self._newest = max([self._newest, *(int(one.entries["put_seq"].max(initial=0)) for one, _ in news)])
        self._grafts.remember_dead(dead)
        for at in range(0, len(dead), _SLICE):
            self._work.append(partial(self._grafts.bury, dead[at : at + _SLICE]))
        for contents, number in news:
            for at in range(0, len(contents.entries), _SLICE):
                self._work.append(partial(self._enter_slice, contents, number, at))
        put_seq = self._core.ledger.next_put_seq
        if news or self._grafts.later or put_seq != self._put_seq:
            self._put_seq = put_seq
            self._work.append(self._grafts.again)

    def _enter_slice(self, contents: SegmentContents, number: int, start: int, now_s: float) -> None:
        self._grafts.enter(rows_of(contents, number, start, start + _SLICE), now_s)

    def _is_stale(self, one: _Followed) -> bool:
        """Whether the drive of this volume is none of the store's any more (I14)."""
        if one.marker is None or one.marker.store_uuid != one.store_uuid:
            return True
        drives = [other.marker.drive for other in self._each if other.marker is not None]
        newest = max((drive for drive in drives if drive is not None), key=lambda drive: drive.generation, default=None)
        mine = one.marker.drive
        if newest is None or mine is None:
            return newest is not None
        # Between the two phases of a change the record is in place on some drives, and beside the old one on the rest.
        return newest.change not in (mine.change, None if one.marker.proposed is None else one.marker.proposed.change)

    def _know(self, one: _Followed, number: int, learnt: Learnt) -> None:
        if learnt.was is None:
            one.files.enter(number, learnt)
        one.known[learnt.name] = Known(number, learnt.file, learnt.header, learnt.mark, learnt.data_end, learnt.sealed)

    def _enter_segment(self, one: _Followed, learnt: Learnt) -> int:
        space = one.volume.space
        state = SegmentState.SEALED if learnt.sealed else SegmentState.GROWING
        if learnt.was is None:
            space.adopt(space.next_number, state, 0)
        number = space.next_number - 1 if learnt.was is None else learnt.was.number
        segment = space.segments[number]
        segment.state, segment.file_nbytes, segment.used_nbytes = state, learnt.file_nbytes, learnt.data_end
        self._know(one, number, learnt)
        return number

    # -- letting go ----------------------------------------------------------------------------------------------------

    def _end(self, one: _Followed, number: int, now_s: float) -> None:
        """Give up a slice of what a segment that is gone held; close it when nobody holds anything of it, else try
        again after the next look.
        """
        segment = one.gone.get(number)
        if segment is None:
            return
        if self._grafts.vanish(segment, _SLICE, now_s) == _SLICE:
            self._work.append(partial(self._end, one, number))
            return
        if segment.readers or len(segment.live_ids(self._core.ledger.table)):
            return
        del one.gone[number]
        one.volume.bad.forget_segment(one.files.nonce(number))
        one.volume.space.remove(segment)
        one.files.forget(number)
        one.volume.space.cap_nbytes = one.volume.space.file_nbytes


def _dead(contents: SegmentContents) -> list[tuple[bytes, int]]:
    keys, put_seqs = contents.tombstones["key"].tobytes(), contents.tombstones["put_seq"].tolist()
    return [(keys[at * 32 : at * 32 + 32], put_seq) for at, put_seq in enumerate(put_seqs)]
