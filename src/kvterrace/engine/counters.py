"""Counts of what happened, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DriveStats", "StoreStats"]


@dataclass(frozen=True, slots=True)
class DriveStats:
    """What one drive of a store holds at this moment.

    Attributes:
        folder: of the partition on this drive.
        engine: name of its I/O engine: uring, native-posix or posix, and a number if there are several drives.
        live_nbytes: bytes of records that the index points to.
        file_nbytes: what the partition's files take: the sum of what is larger of each, its length or what is allocated
            to it. A file counts from before it is made until it is gone; others' as they were at open.
        nbytes: what they may take.
        segments: how many there are.
        writable: False while writing pauses because the drive takes none.
        readable: False while reads are stopped because the drive fails, hangs, or is much slower than itself.
        direct_io: whether I/O on every open segment bypasses the page cache.
    """

    folder: str
    engine: str
    live_nbytes: int
    file_nbytes: int
    nbytes: int
    segments: int
    writable: bool
    readable: bool
    direct_io: bool


@dataclass(slots=True)
class StoreStats:
    """What a store has done since it was opened, and what it holds. Blocks and bytes; a copy, safe to keep.

    Every block asked for by `get` ends in exactly one of the `get_*` counts, every block given to `put` in one of
    `put_*`. The `ssd_*` figures are sums over the drives; `drives` has those of each.

    Of records that a prefetch brought: `prefetch_useful_nbytes` were used from DRAM later, `prefetch_late_nbytes` were
    waited for when they came, `prefetch_wasted_nbytes` left DRAM unused. What is still there unused is in none.

    `ssd_refused_blocks` were not worth a write: they leave with their slot, and count as dropped then.
    `ssd_write_left_nbytes` is what may be written for now of `ssd_daily_write_nbytes`; both are 0 without a budget.
    """

    get_dram_blocks: int = 0
    get_ssd_blocks: int = 0
    get_miss_blocks: int = 0
    get_corrupt_blocks: int = 0
    get_stale_blocks: int = 0
    get_failed_blocks: int = 0
    get_expired_blocks: int = 0
    get_busy_blocks: int = 0
    put_stored_blocks: int = 0
    put_present_blocks: int = 0
    put_busy_blocks: int = 0
    put_rejected_blocks: int = 0
    prefetched_blocks: int = 0
    prefetch_useful_nbytes: int = 0
    prefetch_late_nbytes: int = 0
    prefetch_wasted_nbytes: int = 0
    dropped_blocks: int = 0
    dram_read_nbytes: int = 0
    dram_written_nbytes: int = 0
    ssd_read_nbytes: int = 0
    ssd_read_requests: int = 0
    ssd_written_nbytes: int = 0
    ssd_write_requests: int = 0
    ssd_write_failures: int = 0
    ssd_refused_blocks: int = 0
    ssd_daily_write_nbytes: int = 0
    ssd_write_left_nbytes: int = 0
    carried_blocks: int = 0
    reclaimed_segments: int = 0
    blocks: int = 0
    runs: int = 0
    index_nbytes: int = 0
    dram_used_nbytes: int = 0
    dram_nbytes: int = 0
    dirty_nbytes: int = 0
    ssd_live_nbytes: int = 0
    ssd_file_nbytes: int = 0
    ssd_nbytes: int = 0
    ssd_segments: int = 0
    ssd_quarantined: int = 0
    ssd_writable: bool = False
    ssd_direct_io: bool = False
    drives: tuple[DriveStats, ...] = ()
