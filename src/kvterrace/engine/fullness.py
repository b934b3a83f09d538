"""A drive that has less room than the store may take: others fill it, or a quota is smaller than the capacity."""

from __future__ import annotations

import errno
import logging

from kvterrace.engine.space import SegmentState
from kvterrace.engine.volume import Volume
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult

__all__ = ["Fullness"]

_log = logging.getLogger(__name__)

#: What the store keeps, whatever others do: as many segments, and this share of what it had when the drive was full
#: first. Below that, writing stops and loads go on.
_KEPT_SEGMENTS = 3
_KEPT_SHARE = 0.5
#: Segments that go for a refusal: one for the new one, and one for the room that reclaim has for itself.
_GIVEN_SEGMENTS = 2
#: Segments that must fit beside the store's own before it grows again.
_ROOM_SEGMENTS = 2
#: How often that is looked at.
_LOOK_S = 5.0


class Fullness:
    """Makes the store live with what it has: from the first refusal on, each new segment takes the place of one of its
    own, and the store grows no more until there is room. Used under the store's lock.

    What the store holds when it is refused is its limit, reclaim's own room included, so two segments go before the new
    one is made. They are given up for a refusal only if the one before it was followed by a new one: whoever takes the
    room that the store makes gets so much of it, not all.
    """

    def __init__(self, volume: Volume) -> None:
        self._engine = volume.engine
        self._folder = volume.files.folder
        self._space = volume.space
        self._first_nbytes = 0  # what the store held when the drive was full first
        self._made = False  # since the limit was set
        self._looking = False
        self._next_look_s = float("-inf")

    def helps(self, result: IoResult) -> bool:
        """Whether a write or a new file that failed for lack of room can have one of the store's own segments' place.
        If so, that segment has to go first: there is no room under the capacity any more.
        """
        fault = result.error or result.crash
        if not isinstance(fault, OSError) or fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
        space = self._space
        held_nbytes = sum(one.file_nbytes for one in space.segments.values() if one.state is not SegmentState.CREATING)
        if space.limit_nbytes is None:
            self._first_nbytes = held_nbytes
        elif not self._made:
            return False
        kept = max(_KEPT_SEGMENTS * space.segment_nbytes, _KEPT_SHARE * self._first_nbytes)
        if held_nbytes - _GIVEN_SEGMENTS * space.segment_nbytes < kept:
            return False
        if space.limit_nbytes is None:
            _log.warning(
                "%s: the drive is full (%s); the store goes on within the %d MiB that it holds, and grows again when "
                "there is room",
                self._folder,
                fault,
                held_nbytes >> 20,
            )
        space.limit_nbytes = space.other_nbytes + held_nbytes
        self._made = False
        return True

    def made(self) -> None:
        """A segment was made."""
        self._made = True

    def pump(self, now_s: float) -> None:
        """Look whether others have left some room."""
        if self._space.limit_nbytes is None or self._looking or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        self._looking = True
        engine, folder = self._engine, self._folder

        def on_told(result: IoResult) -> None:
            self._looking = False
            if result.crash is not None or not isinstance(result.value, int):
                return
            space = self._space
            if space.limit_nbytes is None:
                return
            # what reclaim keeps free under the limit is the store's own: it says nothing about the others
            own_nbytes = max(0, space.limit_nbytes - space.file_nbytes)
            if result.value - own_nbytes >= _ROOM_SEGMENTS * space.segment_nbytes:
                space.limit_nbytes = None
                _log.warning("%s: the drive has room again; the store grows up to its capacity", folder)

        call = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: engine.free_nbytes(folder), tag=on_told)
        engine.submit([call])
