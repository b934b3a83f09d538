"""What reader and writer share: the parts of one partition, and the words for its places. No decisions, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock
from kvterrace.engine.bad_places import BadPlaces
from kvterrace.engine.counters import StoreStats
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.errors import LayoutError
from kvterrace.format.record import PAGE_NBYTES, PartTable, header_nbytes_for, part_table
from kvterrace.io.base import IoEngine, IoResult
from kvterrace.keys import Namespace
from kvterrace.tiers.memory import Arena
from kvterrace.tiers.segments import SegmentFiles

__all__ = ["UNSIZED", "Core", "NamespaceEntry", "OnResult"]

#: Geometry of a namespace of which no record is known.
UNSIZED = Geometry(PAGE_NBYTES, 0)
#: What a request's `tag` is: called with its result by the mover, under the store's lock.
OnResult = Callable[[IoResult], None]


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace that the partition knows. `namespace` is None for one found on the drive and not used in this
    process.
    """

    digest: bytes
    epoch: int
    geometry: Geometry
    parts: PartTable
    namespace: Namespace | None


@dataclass(slots=True)
class Core:
    """The parts of one partition. Whoever touches the ledger, `stats` or the tables here holds the store's lock."""

    ledger: Ledger
    arena: Arena
    engine: IoEngine
    files: SegmentFiles | None
    clock: Clock
    stats: StoreStats = field(default_factory=StoreStats)
    namespaces: list[NamespaceEntry] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)
    #: What must not be read or written again on the drive; None where there is none.
    bad: BadPlaces | None = None

    def namespace_number(self, namespace: Namespace) -> int:
        """Number of a namespace in this process; entered at first sight.

        Raises:
            LayoutError: its blocks are larger than this store can hold.
        """
        number = self.numbers.get(namespace.digest)
        if number is not None and self.namespaces[number].namespace is not None:
            return number
        sizes = namespace.layout.part_nbytes
        geometry = Geometry(header_nbytes_for(len(sizes)), sum(sizes))
        space = self.ledger.space
        if geometry.record_nbytes > self.arena.nbytes:
            raise LayoutError(
                f"a block of {geometry.record_nbytes} B does not fit the DRAM tier of {self.arena.nbytes} B; "
                "give it more with dram_bytes, or use fewer block_tokens"
            )
        if space is not None and geometry.record_nbytes > space.max_record_nbytes:
            raise LayoutError(
                f"a block of {geometry.record_nbytes} B does not fit a segment of {space.segment_nbytes} B; "
                "give the SSD tier more with ssd_bytes, or use fewer block_tokens"
            )
        entry = NamespaceEntry(namespace.digest, namespace.epoch, geometry, part_table(sizes), namespace)
        return self.enter_namespace(entry, number)

    def enter_namespace(self, entry: NamespaceEntry, number: int | None = None) -> int:
        """Add `entry`, or put it in the place of one that was only known from the drive."""
        if number is None:
            number = len(self.namespaces)
            self.namespaces.append(entry)
            self.numbers[entry.digest] = number
        else:
            known = self.namespaces[number].geometry
            assert known in (entry.geometry, UNSIZED), "one digest, two geometries"
            self.namespaces[number] = entry
        self.ledger.add_namespace(number, entry.geometry, entry.digest)
        return number

    def slot(self, block: int) -> Bytes:
        """The slot of `block`: room for one record image."""
        table = self.ledger.table
        return self.arena.view(int(table.slot[block]) * PAGE_NBYTES, self.ledger.geometry_of(block).record_nbytes)

    def entry_of(self, block: int) -> NamespaceEntry:
        """The namespace of `block`."""
        return self.namespaces[self.ledger.run_of(block).namespace]

    def snapshot(self) -> StoreStats:
        """A copy of the counts, with what the tiers hold now."""
        ledger, stats = self.ledger, self.stats
        copy = StoreStats(**{name: getattr(stats, name) for name in StoreStats.__slots__})
        copy.blocks = int(np.count_nonzero((ledger.table.slot >= 0) | (ledger.table.segment >= 0)))
        copy.runs = len(ledger.tree)
        copy.index_nbytes = ledger.table.nbytes
        copy.dram_used_nbytes = ledger.dram.allocator.used_nbytes
        copy.dram_nbytes = ledger.dram.nbytes
        copy.dirty_nbytes = ledger.dirty.nbytes
        copy.dropped_blocks = ledger.dropped_blocks
        if ledger.space is not None and self.files is not None:
            copy.ssd_live_nbytes = ledger.space.live_nbytes
            copy.ssd_file_nbytes = ledger.space.file_nbytes
            copy.ssd_nbytes = ledger.space.cap_nbytes
            copy.ssd_segments = len(ledger.space.segments)
            copy.ssd_writable = ledger.can_write
            copy.ssd_quarantined = 0 if self.bad is None else len(self.bad)
            copy.ssd_direct_io = self.files.direct
        return copy
