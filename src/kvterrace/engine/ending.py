"""Bringing a store to rest: what is only in DRAM goes to the SSD, what is under way ends."""

from __future__ import annotations

import logging

from kvterrace.engine.driver import Driver
from kvterrace.engine.mover import Mover
from kvterrace.io.base import IoClass, IoKind, IoRequest

__all__ = ["flush", "settle"]

_log = logging.getLogger(__name__)


def flush(mover: Mover, driver: Driver, timeout_s: float | None) -> bool:
    """Write all that has no copy on the SSD and make it durable; whether that was done within `timeout_s`."""
    writer = mover.writer
    if writer is None:
        return False
    with driver.lock:
        writer.flushing = True
        mover.pump()
    try:
        if not driver.wait_for(lambda: writer.idle and not mover.active, timeout_s):
            return False
        return _sync(mover, driver, timeout_s) and not mover.core.ledger.has_dirty
    finally:
        writer.flushing = False


def _sync(mover: Mover, driver: Driver, timeout_s: float | None) -> bool:
    core = mover.core
    assert core.files is not None and core.ledger.space is not None
    ended: list[bool] = []
    with driver.lock:
        segment = core.ledger.space.open
        if segment is None:
            return True  # whatever was written is in a sealed segment, and sealing makes durable
        request = IoRequest(IoKind.SYNC, IoClass.DEMOTION, core.files.file(segment.number))
        request.tag = lambda result: ended.append(result.complete)
        core.engine.submit([request])
    return driver.wait_for(lambda: bool(ended), timeout_s) and all(ended)


def settle(mover: Mover, driver: Driver, timeout_s: float) -> bool:
    """End transfers, write what is left, seal, stop the driver; whether all that was done within about `timeout_s`.

    Callers' memory is not touched after this returns, unless a copy into it hangs.
    """
    core, writer = mover.core, mover.writer
    limit_s = core.clock.monotonic_s() + timeout_s

    def left_s() -> float:
        return max(0.1, limit_s - core.clock.monotonic_s())

    fine = driver.wait_for(lambda: not mover.active, timeout_s)
    with driver.lock:
        for transfer in mover.abandon():
            _log.warning("%r did not end before the store was closed", transfer)
    if writer is not None:
        with driver.lock:
            writer.flushing = True
            mover.pump()
        fine &= driver.wait_for(lambda: writer.idle, left_s())
        with driver.lock:
            writer.closing = True
            writer.seal_open()
            mover.pump()
        fine &= driver.wait_for(lambda: writer.idle, left_s())
        fine &= not core.ledger.has_dirty
    driver.stop(left_s())
    with driver.lock:
        if core.files is not None:
            core.files.close()
    if not core.engine.close(left_s()):
        return False
    core.arena.close()
    return fine
