"""Bringing a store to rest: what is only in DRAM goes to the SSD, what is under way ends."""

from __future__ import annotations

import logging

from kvterrace.engine.driver import Driver
from kvterrace.engine.mover import Mover
from kvterrace.engine.transfers import TransferKind
from kvterrace.io.base import IoEngine

__all__ = ["flush", "settle"]

_log = logging.getLogger(__name__)


def flush(mover: Mover, driver: Driver, timeout_s: float | None) -> bool:
    """Write all that has no copy on the SSD by now and make it durable; whether that was done within `timeout_s`.

    What is put while it runs does not hold it up. Who only reads the partition owes it nothing: there, the puts under
    way are waited for.
    """
    core, writers = mover.core, mover.writers
    if writers is None and mover.follower is None:
        return False
    limit_s = None if timeout_s is None else core.clock.monotonic_s() + timeout_s

    def left_s() -> float | None:
        return None if limit_s is None else limit_s - core.clock.monotonic_s()

    with driver.lock:
        puts = [one for one in mover.active if one.kind is TransferKind.PUT]
        if writers is not None:
            writers.flushing += 1
        mover.pump()
    if writers is None:
        return driver.wait_for(lambda: all(one.done for one in puts), left_s())
    try:
        if not driver.wait_for(lambda: all(one.done for one in puts), left_s()):
            return False
        with driver.lock:
            mark = core.ledger.next_put_seq
        written = False

        def over() -> bool:
            # decided in one go: what reclaim carries over a moment later is owed anew, but was written once
            nonlocal written
            written = not writers.owes(mark)
            return written or writers.is_stuck(mark)

        if not driver.wait_for(over, left_s()) or not written:
            return False
        return _sync(mover, driver, left_s())
    finally:
        with driver.lock:
            writers.flushing -= 1


def _sync(mover: Mover, driver: Driver, timeout_s: float | None) -> bool:
    """Make durable what was written up to now."""
    writers = mover.writers
    assert writers is not None
    ended: list[bool] = []
    with driver.lock:
        wanted = writers.sync(ended.append)
        mover.pump()
    return driver.wait_for(lambda: len(ended) == wanted, timeout_s) and all(ended)


def settle(mover: Mover, driver: Driver, timeout_s: float) -> tuple[bool, list[IoEngine]]:
    """End transfers, write what is left, seal, stop the driver, within about `timeout_s`.

    Returns whether all was written and ended, and the engines at rest: nothing can reach their drives any more.
    Callers' memory is not touched after this returns, unless a copy into it hangs.
    """
    core, writers = mover.core, mover.writers
    limit_s = core.clock.monotonic_s() + timeout_s

    def left_s() -> float:
        return max(0.1, limit_s - core.clock.monotonic_s())

    fine = driver.wait_for(lambda: not mover.active, timeout_s)
    with driver.lock:
        for transfer in mover.abandon():
            _log.warning("%r did not end before the store was closed", transfer)
    if writers is not None:
        with driver.lock:
            writers.flushing += 1
            mover.pump()
        fine &= driver.wait_for(lambda: writers.idle, left_s())
        with driver.lock:
            writers.close()
            mover.pump()
        fine &= driver.wait_for(lambda: writers.idle, left_s())
        fine &= _sync(mover, driver, left_s()) and not writers.owes(core.ledger.next_put_seq)
        with driver.lock:
            core.ledger.end()
    if (follower := mover.follower) is not None:
        with driver.lock:
            follower.close()
        fine &= driver.wait_for(lambda: follower.idle, left_s())
    driver.stop(left_s())
    with driver.lock:
        for volume in core.volumes:
            volume.bad.close()
            volume.files.close()
    ended = driver.close_engines(left_s())
    for engine in core.engines:
        engine.poll(0.0)  # results that came too late for anybody
    if not ended:
        return False, [engine for engine in core.engines if not engine.in_flight]
    core.arena.close()
    return fine and mover.fault is None, core.engines
