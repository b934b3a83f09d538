"""Saves: blocks that a step has filled go from vLLM's pool of pages to the store, before the step ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from kvterrace.buffers import PagedBlocks
from kvterrace.engine.counters import StoreStats
from kvterrace.errors import KVTerraceError
from kvterrace.integrations.vllm.messages import SaveJob, WorkerReport
from kvterrace.integrations.vllm.metrics import WorkerCounts
from kvterrace.integrations.vllm.pages import Pages
from kvterrace.integrations.vllm.telling import FAULTS, Teller
from kvterrace.keys import KeyChain
from kvterrace.types import Busy, Present, Rejected, Stored

__all__ = ["Saver", "WorkerStore"]

#: Saving may hold up a step by this share of what computing it took, within these bounds, in seconds.
_SAVE_SHARE, _SAVE_LEAST_S, _SAVE_MOST_S = 0.05, 0.002, 0.5
#: Seconds beyond that after which a save is given up for one that hangs.
_SETTLE_S = 5.0
#: Seconds for which nothing is saved after that: each try would hold up a step as long.
_REST_S = 60.0
_SEQUENCE_NBYTES = 16


class WorkerStore(Protocol):
    """What is used of a `Store`."""

    def match(self, chain: KeyChain) -> Any: ...
    def get(self, chain: KeyChain, out: Any, *, start: int, stop: int, deadline_s: float | None) -> Any: ...
    def put(
        self, chain: KeyChain, blocks: Any, *, start: int, stop: int, sequence: bytes, deadline_s: float | None
    ) -> Any: ...
    def wait(self, transfer: Any, timeout_s: float | None = None) -> list[Any]: ...
    def invalidate(self, chain: KeyChain, *, start: int = 0) -> None: ...
    def take_departed(self) -> bytes: ...
    def stats(self) -> StoreStats: ...
    def close(self, timeout_s: float = 30.0) -> bool: ...


class Saver:
    """The worker's thread only."""

    def __init__(self, store: WorkerStore, pages: Pages, counts: WorkerCounts, teller: Teller) -> None:
        """`store` and `pages` stay the worker's; adds to `counts`."""
        self._store = store
        self._pages = pages
        self._counts = counts
        self._teller = teller
        self._resting_until_s = 0.0

    def save(self, jobs: Sequence[tuple[SaveJob, KeyChain]], step_s: float, report: WorkerReport) -> None:
        """Store the blocks of these jobs, each with its request's chain up to its last block, and say in `report` what
        was not taken. The step took `step_s`. When it returns, nothing reads the pool any more, or nothing of what it
        reads will be found.
        """
        began_s = time.monotonic()
        if began_s < self._resting_until_s:
            self._not_taken([job for job, _ in jobs], report)
            return
        room_s = min(_SAVE_MOST_S, max(_SAVE_LEAST_S, _SAVE_SHARE * step_s))
        until_s = began_s + room_s + _SETTLE_S
        under_way: list[tuple[SaveJob, KeyChain, Any]] = []
        try:
            for job, chain in jobs:
                self._put(job, chain, room_s, under_way)
        except (KVTerraceError, OSError) as error:
            self._teller.fault("save", error)
        finally:
            ended = [one for one in under_way if self._settle(*one, until_s, report)]
        for job, chain, transfer in ended:
            report.unkept.discard(job.request_id)
            self._saved(job, chain, transfer.outcomes, report)
        self._counts.save_s.append(time.monotonic() - began_s)

    def _put(
        self, job: SaveJob, chain: KeyChain, room_s: float, under_way: list[tuple[SaveJob, KeyChain, Any]]
    ) -> None:
        stop = job.start + len(job.rows)
        rows = PagedBlocks(self._pages.parts, job.rows)
        name = chain.key(0)[:_SEQUENCE_NBYTES]
        transfer = self._store.put(chain, rows, start=job.start, stop=stop, sequence=name, deadline_s=room_s)
        under_way.append((job, chain, transfer))

    def _settle(self, job: SaveJob, chain: KeyChain, transfer: Any, until_s: float, report: WorkerReport) -> bool:
        """Wait until nothing of the pool is read any more. A put has a deadline for room, copying does not wait for a
        drive, and a store that has failed gives its puts up: `until_s` is only reached where something hangs. Then the
        blocks are given up, also those that are being copied: their rows may be given to others.
        """
        while not transfer.done and (left_s := until_s - time.monotonic()) > 0:
            self._store.wait(transfer, min(left_s, 1.0))
            if not transfer.done:
                time.sleep(0.001)
        if transfer.done:
            self._store.wait(transfer, 0.0)  # takes it off the store's list of what is finished
            return True
        transfer.give_up(Busy())
        self._resting_until_s = time.monotonic() + _REST_S
        self._not_taken([job], report)
        self._counts.blocks["stuck"] += len(job.rows)
        self._teller.warn("stuck", "saving hangs: blocks were given up after %.1f s, and will be computed", _SETTLE_S)
        try:
            self._store.invalidate(chain, start=job.start)
        except (KVTerraceError, OSError) as error:
            self._teller.fault("save", error)
        return False

    def _not_taken(self, jobs: Sequence[SaveJob], report: WorkerReport) -> None:
        for job in jobs:
            report.unsaved[job.request_id] = job.start
            self._counts.blocks["unsaved"] += len(job.rows)

    def _saved(self, job: SaveJob, chain: KeyChain, outcomes: Sequence[Any], report: WorkerReport) -> None:
        for at, outcome in enumerate(outcomes):
            match outcome:
                case Stored():
                    self._counts.blocks["saved"] += 1
                    self._counts.saved_nbytes += chain.namespace.layout.block_nbytes
                case Present():
                    self._counts.blocks["present"] += 1
                case _:
                    again = report.unsaved[job.request_id] = self._begin_again(job.start + at, chain, outcome)
                    if again < job.start:
                        return
                    self._counts.blocks["unsaved"] += len(outcomes) - at
                    self._teller.warn(
                        f"save {FAULTS.get(type(outcome), '?')}",
                        "blocks find no room in the store and are handed over again (%s); if that stays so: the drive "
                        "takes no writes, or dram_bytes is too small",
                        outcome,
                    )
                    return

    def _begin_again(self, block: int, chain: KeyChain, outcome: Any) -> int:
        """From which block on the scheduler is to hand `chain` over again, after `block` was not taken: one before it
        may have left the ladder since.
        """
        if not isinstance(outcome, Rejected):
            return block
        try:
            return min(block, int(self._store.match(chain).blocks))
        except (KVTerraceError, OSError) as error:
            self._teller.fault("match", error)
            return block
