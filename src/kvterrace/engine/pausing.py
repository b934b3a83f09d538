"""When writing to a drive pauses: after failures that say that it would only fail again."""

from __future__ import annotations

import errno
import logging

from kvterrace.engine.core import Core
from kvterrace.engine.space import Segment
from kvterrace.engine.volume import Volume
from kvterrace.io.base import IoKind, IoResult

__all__ = ["PAUSE_S", "WritePause"]

_log = logging.getLogger(__name__)

#: After as many failed writes as `_FAILURES`, or one that says that the drive takes none, it is given none for this
#: long; reads go on.
PAUSE_S = 5.0
#: Failures in a row after which writing pauses. One bad place is not met twice: what failed goes into a new segment.
_FAILURES = 3
#: Errors that say that the drive takes no writes at all.
_NO_WRITES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))
#: A failure this long after the one before it is a new episode, and worth a new warning.
_EPISODE_S = 60.0


class WritePause:
    """Counts failures of writes and SYNCs, and turns writing off and on again. Used under the store's lock."""

    def __init__(self, core: Core, volume: Volume) -> None:
        self._core = core
        self._folder = volume.files.folder
        self._space = volume.space
        self._failures = {True: 0, False: 0}  # in a row; by whether of SYNCs
        self._resume_s = 0.0
        self._quiet_until_s = float("-inf")

    def resume(self, now_s: float) -> None:
        """Turn writing on again if it has paused for long enough."""
        if not self._space.can_write and now_s >= self._resume_s and not self._space.used_up:
            self._space.can_write = True

    def stop(self) -> None:
        """No segment can be made any more before the store is opened anew."""
        if self._space.can_write:
            _log.warning("every segment number of %s is used up; open the store again to go on writing", self._folder)
        self._space.can_write = False

    def wrote(self) -> None:
        """A write has succeeded."""
        self._failures[False] = 0

    def synced(self) -> None:
        """A SYNC has succeeded."""
        self._failures[True] = 0

    def failed(self, segment: Segment, result: IoResult) -> None:
        """A write did not succeed: never write into this segment again, and none at all for a while if the drive takes
        none. Warned of once in each episode.
        """
        sync = result.request.kind is IoKind.SYNC
        self._failures[sync] += 1
        fault = result.error or result.crash
        full = isinstance(fault, OSError) and fault.errno in _NO_WRITES
        pauses = full or self._failures[sync] >= _FAILURES
        self._core.stats.ssd_write_failures += 1
        now_s = self._core.clock.monotonic_s()
        if now_s >= self._quiet_until_s:
            _log.warning(
                "writing to %s failed: %s; tried again %s, reads go on",
                self._folder,
                _why(result),
                f"every {PAUSE_S:.0f} s" if pauses else "elsewhere",
            )
        self._quiet_until_s = now_s + _EPISODE_S
        if pauses:
            self._resume_s = now_s + PAUSE_S
            self._space.can_write = False
        if segment is self._space.open:
            self._space.shut()


def _why(result: IoResult) -> str:
    fault = result.error or result.crash
    if fault is not None:
        return str(fault)
    return f"short write: {result.nbytes} of {result.wanted_nbytes} B"
