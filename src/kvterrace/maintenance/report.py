"""What a purge did, or would do."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Failure", "PartitionPurge", "PurgeReport"]

_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that could not be purged: where, and what to do."""

    where: str
    what: str


@dataclass(slots=True)
class PartitionPurge:
    """What went from one partition.

    Attributes:
        records: block records, live or not. live_records: of them, those that a store would have found.
        copy_records: of them, records of a block of the sequence that bear another label.
        descendant_records: of them, those that only hung on what was asked for, and could never be matched again.
        record_nbytes: of `records`, headers and padding included.
        tombstone_keys: invalidated keys of what was purged that are written down no more.
        segments: files overwritten and removed. copied_records, copied_nbytes: what was carried over from them.
        damaged_records: what should have been carried over and could not be read, or was not right.
        unknown_nbytes: bytes in them that belonged to no record, and could have been anything.
        quarantine_entries: log entries that named a purged block.
    """

    name: str
    records: int = 0
    live_records: int = 0
    copy_records: int = 0
    descendant_records: int = 0
    record_nbytes: int = 0
    tombstone_keys: int = 0
    segments: int = 0
    copied_records: int = 0
    copied_nbytes: int = 0
    damaged_records: int = 0
    unknown_nbytes: int = 0
    overwritten_nbytes: int = 0
    quarantine_entries: int = 0


@dataclass(slots=True)
class PurgeReport:
    """What a purge did; of a dry run, what it would do.

    Attributes:
        digests: the namespaces meant. descriptions: those whose description was removed.
        undescribed: namespaces of which no tenant is known, each with its block records and their bytes.
        finished: files of an earlier, interrupted purge that were overwritten and removed.
        room_nbytes: the most room that was, or would be, taken for a while besides what the store takes.
        damaged: where records were damaged, a thousand at most. failures: what could not be purged.
    """

    partitions: list[PartitionPurge] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    descriptions: list[bytes] = field(default_factory=list)
    undescribed: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    room_nbytes: int = 0
    damaged: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything that was meant is known, and gone."""
        return not self.failures and not self.undescribed

    def damage(self, where: str) -> None:
        """A record that should have stayed was damaged."""
        if len(self.damaged) < _KEPT:
            self.damaged.append(where)
