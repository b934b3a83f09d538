"""What reader and writer share: the parts of one partition, and the words for its places. No decisions, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock
from kvterrace.engine.blocks import Geometry, Ids
from kvterrace.engine.counters import DriveStats, StoreStats
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.space import volume_of
from kvterrace.engine.volume import Volume
from kvterrace.errors import LayoutError
from kvterrace.format.passes import record_shape
from kvterrace.format.record import PAGE_NBYTES, PartTable, header_nbytes_for, part_table
from kvterrace.io.base import IoEngine, IoResult
from kvterrace.keys import Namespace
from kvterrace.tiers.memory import Arena

__all__ = ["UNSIZED", "Core", "NamespaceEntry", "OnResult"]

#: Geometry of a namespace of which no record is known.
UNSIZED = Geometry(PAGE_NBYTES, 0)
#: What a request's `tag` is: called with its result by the mover, under the store's lock.
OnResult = Callable[[IoResult], None]


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace that the partition knows. `namespace` is None for one found on the drive and not used in this
    process. `shape` is the same for the native passes, None without them.
    """

    digest: bytes
    epoch: int
    geometry: Geometry
    parts: PartTable
    namespace: Namespace | None
    shape: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        geometry, sizes = self.geometry, self.part_nbytes or ()
        shape = record_shape(self.digest, self.epoch, geometry.header_nbytes, geometry.payload_nbytes, sizes)
        object.__setattr__(self, "shape", shape)

    @property
    def part_nbytes(self) -> tuple[int, ...] | None:
        """Bytes of each part of a block, in order; None where the layout is not known."""
        return None if self.namespace is None else self.namespace.layout.part_nbytes


@dataclass(slots=True)
class Core:
    """The parts of one partition. Whoever touches the ledger, `stats` or the tables here holds the store's lock.

    `engine` makes copies in memory: no drive can hold these up. `volumes` is empty where there is no SSD tier.
    """

    ledger: Ledger
    arena: Arena
    engine: IoEngine
    volumes: tuple[Volume, ...]
    clock: Clock
    stats: StoreStats = field(default_factory=StoreStats)
    namespaces: list[NamespaceEntry] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)

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
        spaces = self.ledger.spaces
        if geometry.record_nbytes > self.arena.nbytes:
            raise LayoutError(
                f"a block of {geometry.record_nbytes} B does not fit the DRAM tier of {self.arena.nbytes} B; "
                "give it more with dram_bytes, or use fewer block_tokens"
            )
        if spaces and geometry.record_nbytes > min(space.max_record_nbytes for space in spaces):
            raise LayoutError(
                f"a block of {geometry.record_nbytes} B does not fit a segment of {spaces[0].segment_nbytes} B; "
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

    @property
    def engines(self) -> list[IoEngine]:
        """Every engine that requests are submitted to, each once."""
        return list({id(one): one for one in (self.engine, *(volume.engine for volume in self.volumes))}.values())

    def volume_of(self, number: int) -> Volume:
        """The volume of the segment `number`."""
        return self.volumes[volume_of(number) if len(self.volumes) > 1 else 0]

    def slot(self, block: int) -> Bytes:
        """The slot of `block`: room for one record image."""
        table = self.ledger.table
        return self.arena.view(int(table.slot[block]) * PAGE_NBYTES, self.ledger.geometry_of(block).record_nbytes)

    def slots(self, ids: Ids) -> list[Bytes]:
        """As `slot`, of blocks of one namespace."""
        nbytes = self.ledger.geometry_of(int(ids[0])).record_nbytes
        return [self.arena.view(page * PAGE_NBYTES, nbytes) for page in self.ledger.table.slot[ids].tolist()]

    def entry_of(self, block: int) -> NamespaceEntry:
        """The namespace of `block`."""
        return self.namespaces[self.ledger.run_of(block).namespace]

    def snapshot(self) -> StoreStats:
        """A copy of the counts, with what the tiers hold now."""
        ledger, stats = self.ledger, self.stats
        copy = StoreStats(**{name: getattr(stats, name) for name in StoreStats.__slots__})
        copy.blocks = int(np.count_nonzero((ledger.table.slot >= 0) | (ledger.table.segment >= 0)))
        copy.runs = len(ledger.tree)
        copy.index_nbytes = ledger.table.nbytes + ledger.policies_nbytes
        copy.dram_used_nbytes = ledger.dram.allocator.used_nbytes
        copy.dram_nbytes = ledger.dram.nbytes
        copy.dirty_nbytes = ledger.dirty.nbytes
        copy.dropped_blocks = ledger.dropped_blocks
        copy.ssd_refused_blocks = ledger.admitting.refused_blocks
        budget = ledger.admitting.admission.budget
        if budget is not None:
            copy.ssd_daily_write_nbytes = int(budget.daily_nbytes)
            copy.ssd_write_left_nbytes = max(0, int(budget.left_nbytes(self.clock.monotonic_s())))
        if self.volumes:
            copy.drives = drives = tuple(_drive_stats(volume) for volume in self.volumes)
            copy.ssd_live_nbytes = sum(one.live_nbytes for one in drives)
            copy.ssd_file_nbytes = sum(one.file_nbytes for one in drives)
            copy.ssd_nbytes = sum(one.nbytes for one in drives)
            copy.ssd_segments = sum(one.segments for one in drives)
            copy.ssd_writable = ledger.can_write
            copy.ssd_quarantined = sum(len(volume.bad) for volume in self.volumes)
            copy.ssd_direct_io = all(one.direct_io for one in drives if one.segments)
            copy.ssd_direct_io &= any(one.direct_io for one in drives)
        return copy


def _drive_stats(volume: Volume) -> DriveStats:
    space = volume.space
    return DriveStats(
        folder=str(volume.files.folder),
        engine=volume.engine.name,
        live_nbytes=space.live_nbytes,
        file_nbytes=space.file_nbytes,
        nbytes=space.cap_nbytes,
        segments=len(space.segments),
        writable=space.can_write,
        readable=volume.gate.is_open,
        direct_io=volume.files.direct,
    )
