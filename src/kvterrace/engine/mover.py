"""The mover: carries out what the ledger decides, and is the only one that submits I/O. It has no thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvterrace.engine.core import Core
from kvterrace.engine.filler import Filler
from kvterrace.engine.following import Follower
from kvterrace.engine.reader import Reader
from kvterrace.engine.space import SegmentState
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.engine.writers import Writers
from kvterrace.io.base import IoResult
from kvterrace.keys import KeyChain
from kvterrace.types import (
    Busy,
    Corrupt,
    DeviceFailed,
    Expired,
    Hit,
    Miss,
    Pending,
    Present,
    Rejected,
    Stale,
    Stored,
    Tier,
)

__all__ = ["STALL_S", "Mover"]

_log = logging.getLogger(__name__)

#: A transfer of which no block has come for this long is given up, deadline or not: a drive that hangs must not hang a
#: request. Linux resets an NVMe controller after 30 s (`nvme_core.io_timeout`); what has not come by then will not.
STALL_S = 30.0
#: What a put has found room for, but of which nothing was copied this long after the deadline, is given up.
_PUT_GRACE_S = 1.0

_PUT_COUNTS: dict[type[Any], str] = {Stored: "stored", Present: "present", Busy: "busy", Rejected: "rejected"}
_GET_COUNTS: dict[type[Any], str] = {
    Miss: "miss",
    Corrupt: "corrupt",
    Stale: "stale",
    DeviceFailed: "failed",
    Expired: "expired",
    Busy: "busy",
}


@dataclass(slots=True)
class _Progress:
    """How far a transfer had come, and when that was first seen."""

    done_blocks: int
    at_s: float


class Mover:
    """All of it runs under the store's lock, except what requests do on the engine's threads."""

    def __init__(self, core: Core, *, busy_after_s: float, follower: Follower | None = None) -> None:
        """`follower`: of a partition that another process writes, and this one never."""
        self.core = core
        self.follower = follower
        self.fault: str | None = None
        self._reader = Reader(core, busy_after_s)
        self._filler = Filler(core, busy_after_s)
        self.writers = Writers(core, self._reader) if core.volumes and follower is None else None
        self._active: dict[Transfer, _Progress] = {}  # in the order they came
        self.finished: list[Transfer] = []

    @property
    def active(self) -> list[Transfer]:
        """Transfers that are not done, oldest first; a copy."""
        return list(self._active)

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer."""
        self._active[transfer] = _Progress(0, transfer.submitted_s)
        if transfer.kind is TransferKind.PUT:
            self._filler.start(transfer)
            self.pump()
        else:
            self._reader.start(transfer)
            self.pump(writes=False)

    def handle(self, results: Iterable[IoResult]) -> None:
        """Take in what the engine has finished. An exception here is a bug: the store is marked as failed, never
        silently dead.
        """
        for result in results:
            tag = result.request.tag
            try:
                if callable(tag):
                    tag(result)
            except Exception as error:  # noqa: BLE001 - the store must be marked as failed, whatever it was
                self.fail(error)

    def pump(self, *, writes: bool = True) -> None:
        """Let everything go on that can: expire, retry what waits for room, write, seal, reclaim. Without `writes` the
        last three only if somebody waits for room.
        """
        try:
            if self.fault is not None:
                self._reap()
                return
            now_s = self.core.clock.monotonic_s()
            self._expire(now_s)
            self._reader.pump(now_s)
            self._filler.pump(now_s)
            pressed = bool(self._filler.waiting or self._reader.waiting)
            if self.writers is not None and (writes or pressed):
                self.writers.pump(now_s, pressed=pressed)
            self._reap()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)

    def follow(self) -> None:
        """Take in a little of what the partition's writer has done. For the driver: no caller is to wait for it."""
        if self.follower is None or self.fault is not None:
            return
        try:
            self.follower.pump(self.core.clock.monotonic_s())
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)

    def abandon(self) -> list[Transfer]:
        """Settle what is not done (the store is closing); returns it. Memory of callers is not touched after that."""
        left = list(self._active)
        for transfer in left:
            put = transfer.kind is TransferKind.PUT
            transfer.give_up(Busy() if put else Expired())
        self._reap()
        return left

    def invalidate(self, chain: KeyChain, start: int) -> None:
        """Give up blocks, in DRAM and on the SSD, so that a restart does not bring them back either."""
        if chain.namespace.digest not in self.core.numbers:
            if not any(space.in_state(SegmentState.STUCK) for space in self.core.ledger.spaces):
                return  # nothing of it is here, or on the drive
            self.core.namespace_number(chain.namespace)  # in a segment that could not be read there may be some
        if start < len(chain):
            self._filler.invalidate(chain, start)
        keys = self.core.ledger.invalidate(chain, start)
        if self.follower is not None:
            self.follower.forget(keys)
        if self.writers is not None and keys:
            self.writers.bury(chain.namespace.digest, keys)
            self.pump()

    def timeout_s(self) -> float:
        """How long the engine may be waited for before `pump` has something to do by the clock."""
        if self.fault is not None:
            return 1.0
        now_s = self.core.clock.monotonic_s()
        deadlines = [t.deadline_s for t in self._active if t.deadline_s is not None]
        due = [deadline_s - now_s for deadline_s in deadlines if deadline_s > now_s]
        if self._filler.waiting or self._reader.waiting:
            due.append(0.02)
        elif self.writers is not None and self.writers.pending:
            due.append(0.1)
        if self.follower is not None:
            due.append(self.follower.timeout_s(now_s))
        return max(0.0, min([*due, 1.0]))

    def _expire(self, now_s: float) -> None:
        for transfer, progress in self._active.items():
            if transfer.done_blocks != progress.done_blocks:
                progress.done_blocks, progress.at_s = transfer.done_blocks, now_s
            put = transfer.kind is TransferKind.PUT
            late = transfer.deadline_s is not None and now_s >= transfer.deadline_s
            if late and put:  # the deadline is for room: what has found room by then is copied, unless nothing moves
                late = now_s - max(progress.at_s, transfer.deadline_s or 0.0) >= _PUT_GRACE_S
            if late or now_s - progress.at_s >= STALL_S:
                transfer.give_up(Busy() if put else Expired())

    def _reap(self) -> None:
        for transfer in [one for one in self._active if one.done]:
            del self._active[transfer]
            self._count(transfer)
            self.finished.append(transfer)

    def _count(self, transfer: Transfer) -> None:
        stats = self.core.stats
        put = transfer.kind is TransferKind.PUT
        if transfer.kind is TransferKind.PREFETCH:
            return
        for outcome in transfer.outcomes:
            assert not isinstance(outcome, Pending), "a transfer is done while a block is pending"
            if isinstance(outcome, Hit):
                name = "get_dram_blocks" if outcome.tier is Tier.DRAM else "get_ssd_blocks"
            elif put:
                name = f"put_{_PUT_COUNTS[type(outcome)]}_blocks"
            else:
                name = f"get_{_GET_COUNTS[type(outcome)]}_blocks"
            setattr(stats, name, getattr(stats, name) + 1)

    def fail(self, error: Exception) -> None:
        """A bug has shown: say so once, answer nobody any more, let nobody hang."""
        if self.fault is None:
            _log.critical("the store has failed and serves nothing any more; please report this", exc_info=error)
            self.fault = repr(error)
        for transfer in self._active:
            put = transfer.kind is TransferKind.PUT
            transfer.give_up(
                Rejected(f"the store has failed: {error!r}") if put else DeviceFailed("the store", repr(error))
            )
