"""From drives to a mover: what lies on them is in the index, and what a crash left undone is owed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvterrace.clock import Clock
from kvterrace.engine.budgeting import BudgetKeeper, recover_budget
from kvterrace.engine.core import Core
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.following import Follower, shared_volumes
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.mending import missing_tombstones
from kvterrace.engine.mover import Mover
from kvterrace.engine.rebuild import rebuild
from kvterrace.engine.shared_ledger import SharedLedger
from kvterrace.engine.space import segment_nbytes_for
from kvterrace.engine.volume import make_volumes
from kvterrace.errors import ConfigError
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.format.segment import MAX_SEGMENT_NBYTES
from kvterrace.io.base import IoEngine, RegistersMemory
from kvterrace.policy.eviction import EvictionPolicy
from kvterrace.tiers.budget import BudgetFile
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.memory import Arena

__all__ = ["follow", "lead"]


def lead(
    drives: Sequence[tuple[StoreDirectory, IoEngine]],
    engine: IoEngine,
    clock: Clock,
    *,
    dram_nbytes: int,
    ssd_nbytes: int,
    segment_nbytes: int | None,
    writes: WritePolicy | None,
    busy_after_s: float,
    make_policy: Callable[[], EvictionPolicy] | None = None,
    daily_write_nbytes: int | None = None,
) -> Mover:
    """The mover of a partition that this process writes. Arguments as for `Store`. Blocks; makes the file of the write
    budget where it is missing, and changes nothing else yet.

    Raises:
        StoreUnusableError: or one of its kinds: a drive cannot be read.
        ConfigError: segments larger than the format has.
    """
    cap_nbytes = ssd_nbytes // max(1, len(drives))
    if segment_nbytes is None:
        segment_nbytes = segment_nbytes_for(cap_nbytes)
    if segment_nbytes > MAX_SEGMENT_NBYTES:
        raise ConfigError(f"segment_nbytes: no segment may be larger than {MAX_SEGMENT_NBYTES} B, not {segment_nbytes}")
    volumes = make_volumes(drives, cap_nbytes, segment_nbytes // PAGE_NBYTES * PAGE_NBYTES, clock)
    policy, ssd_policy = (make_policy(), make_policy()) if make_policy else (None, None)
    files = [BudgetFile(directory.partition) for directory, _ in drives if daily_write_nbytes is not None]
    budget = recover_budget(files, daily_write_nbytes, clock) if daily_write_nbytes is not None and files else None
    ledger = Ledger(
        dram_nbytes,
        [volume.space for volume in volumes],
        policy=policy,
        ssd_policy=ssd_policy,
        writes=writes,
        budget=budget,
    )
    core = Core(ledger, Arena(dram_nbytes), engine, volumes, clock)
    for volume in volumes:
        if isinstance(volume.engine, RegistersMemory):
            volume.engine.register_memory(core.arena.view(0, core.arena.nbytes))
    found = [volume.recover() for volume in volumes]
    for file, volume in zip(files, volumes, strict=False):  # not before a store of a newer format was refused
        volume.space.other_nbytes += file.make()
    if volumes:
        rebuild(core, [segment for segments in found for segment in segments], clock.monotonic_s())
    mover = Mover(core, busy_after_s=busy_after_s)
    if mover.writers is not None and budget is not None:
        places = [(file, engine) for file, (_, engine) in zip(files, drives, strict=True)]
        mover.writers.keeper = BudgetKeeper(budget, places, clock)
    if mover.writers is not None and len(volumes) > 1:
        mover.writers.mend(missing_tombstones(core, found))
    return mover


def follow(
    drives: Sequence[tuple[StoreDirectory, IoEngine]],
    engine: IoEngine,
    clock: Clock,
    *,
    dram_nbytes: int,
    busy_after_s: float,
    make_policy: Callable[[], EvictionPolicy] | None = None,
) -> Mover:
    """The mover of a partition that another process writes. Blocks.

    Raises:
        StoreUnusableError: or one of its kinds: a drive cannot be read, or is not the store's.
    """
    volumes = shared_volumes(drives, clock)
    policy = make_policy() if make_policy else None
    ledger = SharedLedger(dram_nbytes, [volume.space for volume in volumes], policy=policy)
    core = Core(ledger, Arena(dram_nbytes), engine, volumes, clock)
    follower = Follower(core, ledger, [directory for directory, _ in drives])
    follower.open()
    return Mover(core, busy_after_s=busy_after_s, follower=follower)
