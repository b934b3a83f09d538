"""The way down to one drive: idle blocks that have no copy below, into its segments."""

from __future__ import annotations

from collections.abc import Callable

from kvterrace.engine.blocks import DramState
from kvterrace.engine.core import Core
from kvterrace.engine.dirty import WriteBatch
from kvterrace.engine.emptying import Emptying
from kvterrace.engine.missing import MissingFiles
from kvterrace.engine.reader import Reader
from kvterrace.engine.reclaimer import Reclaimer
from kvterrace.engine.resuming import Resumer, is_worth_sealing
from kvterrace.engine.sealing import SegmentMaker
from kvterrace.engine.space import Segment
from kvterrace.engine.syncing import Syncing
from kvterrace.engine.tombstones import Tombstones
from kvterrace.engine.volume import Volume
from kvterrace.engine.write_gate import WriteGate
from kvterrace.format.record import place
from kvterrace.format.segment import footer_row
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult

__all__ = ["Writer"]

#: Write batches in flight at once: one being written, one queued behind it.
_DEPTH = 2


class Writer:
    """Writes to one volume, and turns the crank of all that keeps its segments going. Called under the store's lock."""

    def __init__(
        self,
        core: Core,
        volume: Volume,
        reader: Reader,
        *,
        sync_volumes: Callable[[set[int], Callable[[bool], None]], int],
    ) -> None:
        """`sync_volumes`: as `sync`, for volumes by number."""
        self._core = core
        self._files = volume.files
        self._space = volume.space
        self._bad = volume.bad
        self._batches = 0
        self._gate = gate = WriteGate(core, volume)
        self._syncing = Syncing(core, volume, gate, lost=self._lost, over=lambda one: self._reclaimer.is_done_with(one))
        self._tombstones = Tombstones(core, volume, gate, self._syncing.wrote)
        self._maker = SegmentMaker(core, volume, gate, self._syncing)
        self._resumer = Resumer(volume, gate, self._syncing)
        self._reclaimer = Reclaimer(
            core, volume, reader, self._maker, self._syncing, self._tombstones, sync_volumes=sync_volumes
        )
        self._missing = MissingFiles(core, volume, self._maker, self._tombstones, reader.condemn)
        self._emptying = Emptying(core, volume, self._maker, self._tombstones, self._missing)
        reader.suspects[volume.number] = self._missing.suspect

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def bury(self, namespace: bytes, keys: list[bytes], put_seq: int) -> None:
        """Write down that these keys are invalid up to the put-sequence number `put_seq`. Nothing older is here if
        nothing is here.
        """
        if self._space.segments:
            self._tombstones.add(namespace, keys, put_seq)

    def owes(self, put_seq: int) -> bool:
        """Whether an invalidation from before the put-sequence number `put_seq` is still to be written here."""
        return self._tombstones.owes(put_seq) or self._emptying.owes(put_seq)

    def is_stuck(self, put_seq: int) -> bool:
        """Whether something is owed, as `owes` says, and nothing can be done about it for now."""
        if self._tombstones.owes(put_seq) and not self._space.can_write:
            return True
        return self._emptying.owes(put_seq) and self._emptying.is_stuck

    def sync(self, on_end: Callable[[bool], None]) -> int:
        """Make durable what was written up to now; `on_end` is called as often as the number returned says, each time
        with whether that went well.
        """
        return self._syncing.sync(on_end)

    @property
    def busy(self) -> bool:
        """Whether anything is being written, made, sealed, removed or looked at."""
        noting = self._space.can_write and self._bad.busy
        return bool(self._in_flight or self._maker.busy or self._missing.busy or noting)

    @property
    def pending(self) -> bool:
        """Whether there is something to do, now or later, besides writing blocks."""
        return self._tombstones.wait or self._reclaimer.busy or self._bad.busy or self._emptying.busy

    @property
    def _in_flight(self) -> int:
        return self._batches + self._tombstones.writes

    def look(self, now_s: float, *, wanted: bool) -> None:
        """Find out whether the drive takes writes by now, or hangs. `wanted`: something waits to be written."""
        self._gate.pump(now_s, wanted=wanted)
        self._maker.pump(now_s)
        if self._space.can_write:
            self._bad.pump(now_s)  # before a segment takes the room

    def write_next(self, now_s: float, *, pressed: bool) -> bool:
        """Submit the next batch of blocks, if this drive can take one and one is due. `pressed`: somebody waits for
        room, or for a flush.
        """
        if not self._space.can_write or not self._gate.is_open or self._in_flight - self._gate.hung >= _DEPTH:
            return False
        if self._gate.hung and len(self._core.volumes) > 1:
            return False  # what it is given is in no other drive's reach
        batch = self._core.ledger.next_write(now_s, pressed=pressed, space=self._space)
        if batch is None:
            return False
        self._write(batch)
        return True

    def pump(self, now_s: float) -> None:
        """Submit what else is due: tombstones, new segments, seals, reclaim."""
        if self._space.can_write:
            self._tombstones.write()
            if self._core.ledger.needs_segment(self._space) or (self._tombstones.wait and self._space.open is None):
                self._next_segment(now_s)
        self._missing.pump(now_s)
        self._emptying.pump(now_s)
        if self._space.can_write:
            self._maker.seal_shut()
            self._resumer.go_on()
        self._syncing.pump()
        if not self._space.room_for_carried() or (self._space.can_write and self._bad.wants_room):
            # opened with less room than it takes, what went was a short file, or the log wants some
            self._reclaimer.start(now_s)
        if self._space.can_write:
            self._reclaimer.ahead(now_s)
        self._reclaimer.go_on(now_s)

    def seal_open(self) -> None:
        """Append no more to the open segment: it is sealed once its writes have ended."""
        self._space.shut()

    def close(self) -> None:
        """Seal the open segment if it is worth a file of its own, and begin no reclaim."""
        self._reclaimer.close()
        if self._space.open is not None and is_worth_sealing(self._space.open):
            self.seal_open()

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, batch: WriteBatch) -> None:
        core, number = self._core, batch.segment.number
        buffers, rows = [], []
        offset = batch.offset
        for block in batch.ids.tolist():
            slot = core.slot(block)
            place(slot, self._files.nonce(number), offset)
            rows.append(row := footer_row(slot))
            assert row[0] == core.ledger.key_of(block), f"the slot of block {block} holds the record of another"
            buffers.append(slot)
            offset += slot.nbytes

        def on_result(result: IoResult) -> None:
            self._batches -= 1
            core.stats.ssd_written_nbytes += result.nbytes
            if result.complete:
                for row in rows:
                    self._files.footers[number].add_row(row)
                self._syncing.wrote(batch.segment)
                core.ledger.written(batch)
            else:
                self._bad.not_written(batch.segment, result)
                core.ledger.write_failed(batch)
                core.ledger.dirty.hurry(batch.ids)
                self._gate.failed(batch.segment, result)
                if isinstance(result.error, FileNotFoundError):
                    self._missing.suspect(batch.segment)

        self._batches += 1
        core.stats.ssd_write_requests += 1
        request = IoRequest(IoKind.WRITE, IoClass.DEMOTION, self._files.file(number), batch.offset, buffers)
        sent = self._gate.submit(request, on_result, excuse=self._maker.helps)
        assert sent, "the gate was open"

    def _lost(self, segment: Segment) -> None:
        """What was written to `segment` may be gone: what DRAM still holds of it is written anew."""
        ledger = self._core.ledger
        now_s = self._core.clock.monotonic_s()
        ids = segment.live_ids(ledger.table)
        for block in ids[ledger.table.state[ids] == DramState.READY].tolist():
            ledger.lost(block, now_s)
        self._tombstones.again(segment)

    def _next_segment(self, now_s: float) -> None:
        self._space.shut()
        if self._maker.creating:
            return
        if self._space.used_up:
            self._gate.stop()
        elif self._space.room_for_segment() or (self._reclaimer.is_writing and self._space.room_for_small()):
            self._maker.make()
        else:
            self._reclaimer.start(now_s)
