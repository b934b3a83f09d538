"""The way down: whose turn it is to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvterrace.engine.budgeting import BudgetKeeper
from kvterrace.engine.core import Core
from kvterrace.engine.reader import Reader
from kvterrace.engine.writer import Writer

__all__ = ["Writers"]


class Writers:
    """The writers of all volumes. Called under the store's lock. Used only where there is an SSD tier.

    Batches are dealt in turn, each to the next drive that can take it: so a long run lies on all of them, in pieces of
    one batch, and a drive that is busy, full, failing or hanging is passed over.
    """

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self.each = tuple(Writer(core, volume, reader, sync_volumes=self._sync_volumes) for volume in core.volumes)
        self._turn = 0
        #: Flushes under way.
        self.flushing = 0
        #: Writes the budget down, where there is one.
        self.keeper: BudgetKeeper | None = None

    def bury(self, namespace: bytes, keys: list[bytes]) -> None:
        """Write down that these keys are invalid up to now, so that a restart does not bring them back. On every
        volume: which of them hold old records of these keys, nobody knows.
        """
        ledger = self._core.ledger
        for one in self.each:
            one.bury(namespace, keys, ledger.next_put_seq)
        if keys:
            ledger.next_put_seq += 1

    def mend(self, missing: Sequence[Sequence[tuple[bytes, bytes, int]]]) -> None:
        """Write tombstones (namespace digest, key, put-sequence number) that volumes lack, one list for each."""
        for one, tombstones in zip(self.each, missing, strict=True):
            for namespace, key, put_seq in tombstones:
                one.bury(namespace, [key], put_seq)

    def owes(self, put_seq: int) -> bool:
        """Whether a block or an invalidation from before the put-sequence number `put_seq` is still to be written."""
        return any(one.owes(put_seq) for one in self.each) or self._core.ledger.dirty.owes(put_seq)

    def is_stuck(self, put_seq: int) -> bool:
        """Whether something is owed, as `owes` says, by drives that take no writes, or cannot be emptied."""
        if any(one.is_stuck(put_seq) for one in self.each):
            return True
        return not self._core.ledger.can_write and self._core.ledger.dirty.owes(put_seq)

    def sync(self, on_end: Callable[[bool], None]) -> int:
        """Make durable what was written up to now; `on_end` is called as often as the number returned says, each time
        with whether that went well.
        """
        return sum(one.sync(on_end) for one in self.each)

    def _sync_volumes(self, numbers: set[int], on_end: Callable[[bool], None]) -> int:
        return sum(self.each[number].sync(on_end) for number in numbers)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written and, as far as writing is possible, nothing waits to be."""
        ledger = self._core.ledger
        put_seq = ledger.next_put_seq
        if any(one.busy or (one.owes(put_seq) and not one.is_stuck(put_seq)) for one in self.each):
            return False
        return not (ledger.can_write and ledger.dirty.owes(put_seq))

    @property
    def pending(self) -> bool:
        """Whether there is something to write, now or later."""
        return bool(self._core.ledger.dirty.since_s) or any(one.pending for one in self.each)

    def pump(self, now_s: float, *, pressed: bool) -> None:
        """Submit what is due. `pressed`: somebody waits for room."""
        pressed = pressed or self.flushing > 0
        wanted = self.pending
        for one in self.each:
            one.look(now_s, wanted=wanted)
        passed_over = 0
        while passed_over < len(self.each):
            if self.each[self._turn].write_next(now_s, pressed=pressed):
                passed_over = 0
            else:
                passed_over += 1
            self._turn = (self._turn + 1) % len(self.each)
        for one in self.each:
            one.pump(now_s)
        if self.keeper is not None:
            self.keeper.pump(now_s)

    def close(self) -> None:
        """Seal open segments that are worth a file of their own, and begin no reclaim; write the budget down."""
        if self.keeper is not None:
            self.keeper.save(self._core.clock.monotonic_s())
        for one in self.each:
            one.close()
