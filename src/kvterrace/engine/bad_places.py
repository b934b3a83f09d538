"""What went wrong on one drive, remembered over restarts: its quarantine, kept in a log on that drive."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock
from kvterrace.engine.space import Segment, SegmentSpace
from kvterrace.health.breaker import Fault, fault_of
from kvterrace.health.quarantine import BadPlace, LogWrite, Quarantine, log_nbytes_for
from kvterrace.health.quarantine_log import LogFile
from kvterrace.io.base import IoResult
from kvterrace.tiers.answering import answer
from kvterrace.tiers.segments import SegmentFiles

__all__ = ["ONLY_DRIVE_STRIKES", "BadPlaces"]

_log = logging.getLogger(__name__)

#: Places in which a block may go wrong before it is not written to this drive any more, where there is no other drive.
#: With another one, the first failure sends it there. With none, a block that may not be written takes along all that
#: hangs on it, of every conversation that shares it, and one flipped bit would do that. What makes a record go wrong is
#: its place, and that is never used again; a block that fails in a third place is more than bad luck.
ONLY_DRIVE_STRIKES = 3
#: After a failed write of the log, this long until the next.
_AGAIN_S = 5.0


class BadPlaces:
    """One drive's quarantine. Used under the store's lock; only `recover` blocks.

    The log takes its room from the capacity. Its failures cost nobody anything but memory of failed reads.
    """

    def __init__(
        self,
        files: SegmentFiles,
        space: SegmentSpace,
        clock: Clock,
        *,
        max_strikes: int = ONLY_DRIVE_STRIKES,
        file_nbytes: int | None = None,
    ) -> None:
        """`file_nbytes`: size of a log file, and so how much is remembered; None: by the capacity of `space`."""
        self._files = files
        self._space = space
        self._clock = clock
        self._file_nbytes = log_nbytes_for(space.cap_nbytes) if file_nbytes is None else file_nbytes
        self._quarantine = Quarantine(
            files.store_uuid, self._begin, max_strikes=max_strikes, file_nbytes=self._file_nbytes
        )
        self._log = LogFile(files.engine, files.folder, self._ended, file_nbytes=self._file_nbytes)
        self._counted_nbytes = 0  # of the logs, in `space.other_nbytes`
        self._again_s = float("-inf")
        self._quiet = False
        self._told_full = False

    # -- asking --------------------------------------------------------------------------------------------------------

    def may_store(self, key: bytes) -> bool:
        """Whether the block of this key may be written to this drive."""
        return self._quarantine.may_store(key)

    def places(self, nonce: bytes) -> tuple[BadPlace, ...]:
        """The bad places in the segment with this nonce."""
        return self._quarantine.places(nonce)

    def __len__(self) -> int:
        """Entries remembered: bad places and failed blocks."""
        return len(self._quarantine)

    @property
    def wants_room(self) -> bool:
        """Whether something is to be written down for which the capacity, or the drive, leaves no room."""
        quarantine = self._quarantine
        return quarantine.pending and not quarantine.writing and not self._has_room

    @property
    def busy(self) -> bool:
        """Whether something is being written down, or will be at the next `pump`."""
        quarantine = self._quarantine
        due = quarantine.pending and self._has_room and self._clock.monotonic_s() >= self._again_s
        return quarantine.writing or due

    @property
    def _has_room(self) -> bool:
        if not self._quarantine.makes_file:
            return True
        # what reclaim keeps for itself stays free: else active KV would hold every segment until one without goes
        return self._space.file_nbytes + self._file_nbytes + self._space.segment_nbytes <= self._space.most_nbytes

    # -- telling -------------------------------------------------------------------------------------------------------

    def recover(self, nonces: Collection[bytes]) -> None:
        """Take in what the logs of the folder hold of segments with these nonces. Once, before anything else, and after
        `space.other_nbytes` was set. Blocks.

        Raises:
            StoreUnusableError: the drive does not answer.
        """
        logs: list[tuple[str, Bytes]] = answer(self._files.engine, self._files.folder, self._log.read)
        self._counted_nbytes = self._log.nbytes
        self._quarantine.recover(logs, nonces)

    def learn(self, logs: Sequence[Bytes], nonces: Collection[bytes]) -> set[bytes]:
        """Take in what logs hold that another process writes, as `recover` does; of which segments (by nonce) more
        places are bad now than before.
        """
        if not logs:
            return set()
        before = {nonce: len(self.places(nonce)) for nonce in nonces}
        for data in logs:
            self._quarantine.learn(data, nonces)
        return {nonce for nonce, count in before.items() if len(self.places(nonce)) > count}

    def went_wrong(self, key: bytes, segment: Segment, nonce: bytes, offset: int, nbytes: int) -> None:
        """The record of block `key` at this place could not be read, or was not that block."""
        self._quarantine.add(
            key, segment=self._files.on_drive(segment.number), nonce=nonce, offset=offset, nbytes=nbytes
        )
        if self._quarantine.full and not self._told_full:
            self._told_full = True
            _log.warning(
                "%s: %d places and blocks went wrong on this drive, as many as are remembered; replace it",
                self._files.folder,
                len(self._quarantine),
            )

    def not_written(self, segment: Segment, result: IoResult) -> None:
        """A write into `segment` has failed. If the place is to blame, nothing that lies there is believed later."""
        request = result.request
        if result.error is None or fault_of(result.error) is not Fault.MEDIA:
            return
        self._quarantine.add_place(
            segment=self._files.on_drive(segment.number),
            nonce=self._files.nonce(segment.number),
            offset=request.offset,
            nbytes=result.wanted_nbytes,
        )

    def forget_segment(self, nonce: bytes) -> None:
        """The segment with this nonce is being removed."""
        self._quarantine.forget_segment(nonce)

    # -- writing down --------------------------------------------------------------------------------------------------

    def pump(self, now_s: float) -> None:
        """Begin to write down what is new. Not to be called while nothing is written to the drive."""
        if now_s >= self._again_s and self._has_room:
            self._quarantine.pump()
        self._count()

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _begin(self, write: LogWrite) -> None:
        self._log.start(write)
        self._count()

    def _ended(self, write: LogWrite, fault: str | None) -> None:
        self._quarantine.ended(write, durable=fault is None)
        self._count()
        if fault is None:
            self._quiet = False
            return
        self._again_s = self._clock.monotonic_s() + _AGAIN_S
        if not self._quiet:
            _log.warning(
                "%s: the list of bad places could not be written (%s); tried again every %.0f s; until then a restart "
                "would try those places once more",
                self._files.folder,
                fault,
                _AGAIN_S,
            )
        self._quiet = True

    def _count(self) -> None:
        nbytes = self._log.nbytes
        self._space.other_nbytes += nbytes - self._counted_nbytes
        self._counted_nbytes = nbytes
