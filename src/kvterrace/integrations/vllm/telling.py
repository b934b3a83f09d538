"""Counts each fault, and says each kind once."""

from __future__ import annotations

import logging

from kvterrace.integrations.vllm.metrics import WorkerCounts
from kvterrace.types import Busy, Corrupt, DeviceFailed, Expired, Miss, Rejected, Stale

__all__ = ["FAULTS", "Teller"]

_log = logging.getLogger("kvterrace.vllm")

#: Names of outcomes that are none of the wanted ones, as fates of blocks.
FAULTS: dict[type[object], str] = {
    Miss: "miss",
    Corrupt: "corrupt",
    Stale: "stale",
    DeviceFailed: "failed",
    Expired: "expired",
    Busy: "busy",
    Rejected: "rejected",
}


class Teller:
    """The worker's thread; `fault` also others."""

    def __init__(self, counts: WorkerCounts) -> None:
        """Adds to `counts`."""
        self._counts = counts
        self._said: set[str] = set()

    def fault(self, what: str, error: Exception) -> None:
        """The store could not be used for `what`: match, load or save."""
        self._counts.blocks[f"{what}_error"] += 1
        self.warn(what, "the store cannot be used (%s), everything is computed: %s", what, error)

    def warn(self, kind: str, text: str, *values: object) -> None:
        """Say it once; the counts go on."""
        if kind not in self._said:
            self._said.add(kind)
            _log.warning(text, *values)
