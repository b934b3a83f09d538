"""One pass over a partition: every segment that holds something to be purged is written anew without it.

What stays is copied to a new segment and made durable; then the old file is taken out of use by giving it another name,
overwritten, and removed. So at any moment every block that stays lies whole in a segment, and what is gone from the
index does not come back: a crash leaves copies of one put, of which a store takes the later, or a file that is no
segment any more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvterrace.format.record import RecordKind, tombstone_nbytes_for
from kvterrace.maintenance.census import Dropped, FoundSegment
from kvterrace.maintenance.drive import Drive
from kvterrace.maintenance.output import Need, OutputSegment, identity, tombstone_groups
from kvterrace.maintenance.partition import Partition, Rows
from kvterrace.maintenance.report import Failure, PartitionPurge, PurgeReport
from kvterrace.maintenance.selection import Selection
from kvterrace.maintenance.stores import Place
from kvterrace.observe.medium import MediumFile

__all__ = ["Pass"]

_NO_ROWS: Rows = np.zeros(0, bool)


@dataclass(slots=True, eq=False)
class _Plan:
    """What becomes of one segment. `chosen`, `staying`: rows of its entries; what is in neither is dead."""

    chosen: Rows = field(default_factory=lambda: _NO_ROWS)
    staying: Rows = field(default_factory=lambda: _NO_ROWS)
    buried: list[Dropped] = field(default_factory=list)
    freed: int = 0
    need: Need = field(default_factory=Need)
    touched: bool = False


class Pass:
    """One pass over one drive, whose segments are `found`; those of all drives are in `partition`. `selection` is what
    has to go; what happens is added to `report` and `done`.
    """

    def __init__(
        self,
        place: Place,
        found: list[FoundSegment],
        partition: Partition,
        selection: Selection,
        *,
        report: PurgeReport,
        done: PartitionPurge,
        on_done: Callable[[int], object],
    ) -> None:
        self._place, self._partition, self._selection = place, partition, selection
        self._report, self._done, self._on_done = report, done, on_done
        self._segments = {one.number: one for one in found}
        self._next_number = max(self._segments, default=0) + 1
        self._used = [one for one in found if not one.foreign and not one.unknown_why]
        self._capacity = max((one.header.capacity for one in self._used if one.header is not None), default=0)
        self._output: OutputSegment | None = None
        self._output_counts = False  # whether something was removed because of what it holds

    # -- looking -------------------------------------------------------------------------------------------------------

    def failures(self) -> list[Failure]:
        """Segments that are not ours to change, or of which nothing is known."""
        found = []
        for one in self._segments.values():
            where = self._where(one)
            if one.unknown_why:
                found.append(Failure(where, f"{one.unknown_why}; what it holds is not known"))
            elif one.foreign and self._plan(one).touched:
                found.append(Failure(where, f"{one.foreign}, and holds what is to be purged: remove the file"))
        return found

    def count(self) -> None:
        """Add what would go to `done`, and the room that it would take to `report`; changes nothing."""
        for one in self._used:
            plan = self._plan(one)
            if plan.touched:
                self._removed(one, plan)
                self._done.copied_records += plan.need.records
                self._done.copied_nbytes += plan.need.record_nbytes
                if plan.need.records:
                    self._report.room_nbytes = max(self._report.room_nbytes, plan.need.file_nbytes)

    @property
    def touched_nbytes(self) -> int:
        """Bytes of the files that have to be written anew."""
        return sum(one.file.nbytes for one in self._used if self._plan(one).touched)

    def _plan(self, one: FoundSegment) -> _Plan:
        plan = _Plan(touched=one.unknown_nbytes > 0 and not one.foreign)
        plan.touched |= any(self._selection.holds(stray.header) for stray in one.strays)
        if one.contents is None:
            return plan
        entries = one.contents.entries
        plan.chosen, plan.staying = self._partition.chosen[one], self._partition.staying[one]
        for dropped in one.dropped:
            if self._partition.is_needed(dropped, one):
                plan.buried.append(dropped)
            else:
                plan.freed += self._selection.names(dropped.namespace, dropped.key)
        plan.touched |= bool(plan.chosen.any()) or plan.freed > 0
        records = int(plan.staying.sum())
        plan.need = Need(int(entries["record_nbytes"][plan.staying].sum()), records, records)
        for group in tombstone_groups(plan.buried):
            plan.need += Need(tombstone_nbytes_for(len(group)), 1, 1, len(group))
        return plan

    # -- changing ------------------------------------------------------------------------------------------------------

    def run(self, drive: Drive) -> int:
        """Write anew what has to be; returns how many segments went. What could not be done is in the report."""
        removed = 0
        failed: set[int] = set()
        # First what leaves nothing behind: it makes room, and takes none.
        for with_rest in (False, True):
            for one in self._used:
                if one.number not in self._segments or one.number in failed:
                    continue
                plan = self._plan(one)
                if not plan.touched or (plan.need.records and not with_rest):
                    continue
                try:
                    self._write_anew(drive, one, plan)
                    removed += 1
                except OSError as error:
                    failed.add(one.number)
                    self._give_up_output(drive)
                    self._report.failures.append(self._why(drive, one, plan, error))
        try:
            self._seal_output()
        except OSError as error:
            self._report.notes.append(f"{self._place.label}: a new segment was not sealed ({error}): the store will")
        return removed

    def _write_anew(self, drive: Drive, one: FoundSegment, plan: _Plan) -> None:
        kept = self._copy(drive, one, plan) if plan.need.records else []
        gone = drive.retire(one.file.path)
        del self._segments[one.number]
        self._partition.left(one)
        self._output_counts = self._output is not None
        self._done.overwritten_nbytes += drive.erase(gone, kept)
        self._removed(one, plan)
        self._on_done(one.file.nbytes)

    def _copy(self, drive: Drive, one: FoundSegment, plan: _Plan) -> list[tuple[int, int]]:
        """Copy what stays, durably; returns where it lay."""
        assert one.contents is not None
        output = self._output_for(drive, plan.need)
        kept = []
        with MediumFile(one.file.path) as source:
            for entry in one.contents.entries[plan.staying]:
                offset, nbytes = int(entry["offset"]), int(entry["record_nbytes"])
                digest = one.contents.namespaces[int(entry["namespace"])]
                if output.copy(source, identity(entry, digest, one.contents.header.nonce), offset):
                    kept.append((offset, offset + nbytes))
                    self._done.copied_records += 1
                    self._done.copied_nbytes += nbytes
                else:
                    self._done.damaged_records += 1
                    self._report.damage(f"{self._where(one)}@{offset}")
        for group in tombstone_groups(plan.buried):
            output.bury(group)
        output.sync()
        return kept

    def _output_for(self, drive: Drive, need: Need) -> OutputSegment:
        """A segment with room for `need`: the one being filled, or a new one: as large as segments are here and as all
        that is still to come asks for, or, where the drive has no room for that, as small as can be.
        """
        if self._output is not None and not self._output.fits(need):
            self._seal_output()
        if self._output is None:
            rest = Need()
            for one in self._used:
                if one.number in self._segments and (plan := self._plan(one)).touched:
                    rest += plan.need
            least = need.file_nbytes
            sizes = dict.fromkeys((max(least, min(self._capacity, rest.file_nbytes)), least))
            for size in sizes:
                try:
                    self._output = self._create(drive, size)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or size == least:
                        raise
            assert self._output is not None
            self._report.room_nbytes = max(self._report.room_nbytes, self._output.capacity)
        return self._output

    def _create(self, drive: Drive, nbytes: int) -> OutputSegment:
        number = self._next_number
        path = self._place.path / f"{number:08x}.seg"
        output = OutputSegment(drive, path, number, nbytes, self._place.store_uuid)
        self._next_number += 1
        self._output_counts = False
        return output

    def _seal_output(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.seal()

    def _give_up_output(self, drive: Drive) -> None:
        """Fill the output no further: something could not be written. What counts in it stays, as a crash leaves it."""
        output, self._output = self._output, None
        if output is None:
            return
        output.close()
        if not self._output_counts:
            try:
                drive.remove(output.path)
            except OSError as error:
                self._report.notes.append(f"{output.path} cannot be removed: {error.strerror or error}")

    def _removed(self, one: FoundSegment, plan: _Plan) -> None:
        done, selection = self._done, self._selection
        done.segments += 1
        done.unknown_nbytes += one.unknown_nbytes
        done.tombstone_keys += plan.freed
        for stray in one.strays:
            if selection.holds(stray.header) and stray.header.kind is RecordKind.BLOCK:
                header = stray.header
                self._count(header.namespace, header.key, header.sequence, header.record_nbytes)
        if one.contents is None:
            return
        done.live_records += int((plan.chosen & self._partition.live[one]).sum())
        for entry in one.contents.entries[plan.chosen]:
            digest = one.contents.namespaces[int(entry["namespace"])]
            nbytes = int(entry["record_nbytes"])
            self._count(digest, entry["key"].tobytes(), entry["sequence"].tobytes(), nbytes)

    def _count(self, namespace: bytes, key: bytes, sequence: bytes, nbytes: int) -> None:
        done, selection = self._done, self._selection
        done.records += 1
        done.record_nbytes += nbytes
        if namespace in selection.digests or (selection.label and sequence == selection.label):
            return
        if namespace + key in selection.matched:
            done.copy_records += 1
        else:
            done.descendant_records += 1

    def _where(self, one: FoundSegment) -> str:
        return f"{self._place.label}/{one.file.path.name}"

    def _why(self, drive: Drive, one: FoundSegment, plan: _Plan, error: OSError) -> Failure:
        where = self._where(one)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need, free = plan.need.file_nbytes, drive.engine.free_nbytes(self._place.path)
            return Failure(
                where,
                f"no room to copy what stays: it takes {need} B for a while, {free} B are free: free some and purge "
                "again; nothing is lost",
            )
        return Failure(where, f"{error.strerror or error}: purge again when that is mended")
