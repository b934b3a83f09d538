"""The account of one life of a store: what clients saw, what was done to it, and what the store says of itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from tests.soak.inject import COUNTED, MAY_COUNT, STOPS_READS, Shot
from tests.soak.truth import LARGEST_RECORD
from tests.soak.verdict import Verdict
from tests.soak.witness import Segments

from kvterrace import (
    Busy,
    Corrupt,
    DeviceFailed,
    Expired,
    Hit,
    Miss,
    Present,
    Rejected,
    Stale,
    Stored,
    StoreStats,
    Tier,
)
from kvterrace.types import GetOutcome, PutOutcome

#: Counts of the store that must be exactly what its clients saw.
_SAME = (
    *(f"get_{name}_blocks" for name in ("dram", "ssd", "miss", "corrupt", "stale", "failed", "expired", "busy")),
    *(f"put_{name}_blocks" for name in ("stored", "present", "busy", "rejected")),
)
_NAMES: dict[type[object], str] = {
    Miss: "miss",
    Corrupt: "corrupt",
    Stale: "stale",
    DeviceFailed: "failed",
    Expired: "expired",
    Busy: "busy",
}
_PUT_NAMES: dict[type[object], str] = {Stored: "stored", Present: "present", Busy: "busy", Rejected: "rejected"}
#: Reads at a fault's place that may end in these.
_READ_FAULTS = ("read-flip", "read-flip-many", "read-stale", "read-astray", "read-short", "read-eio", "read-eio-burst")


class Seen:
    """What the clients of one life saw. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        #: Outcomes that name a place.
        self.bad: list[Corrupt | Stale | DeviceFailed] = []
        self.stopped = 0

    def get(self, outcomes: Sequence[GetOutcome | PutOutcome], nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            for outcome in outcomes:
                if isinstance(outcome, Hit):
                    self.counts["get_dram_blocks" if outcome.tier is Tier.DRAM else "get_ssd_blocks"] += 1
                    continue
                self.counts[f"get_{_NAMES[type(outcome)]}_blocks"] += 1
                if isinstance(outcome, DeviceFailed) and "reads of this drive are stopped" in outcome.reason:
                    self.stopped += 1
                    self.counts["reads refused for a while"] += 1
                elif isinstance(outcome, Corrupt | Stale | DeviceFailed):
                    self.bad.append(outcome)

    def put(self, outcomes: Sequence[GetOutcome | PutOutcome], nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            for outcome in outcomes:
                self.counts[f"put_{_PUT_NAMES[type(outcome)]}_blocks"] += 1

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.counts[name] += count


def settle(
    seen: Seen,
    stats: StoreStats,
    shots: list[Shot],
    discards: list[str],
    segments: Segments,
    verdict: Verdict,
    *,
    at_rest: bool,
) -> Counter[str]:
    """Compare, after the store was closed; failures go to `verdict`. `at_rest`: nothing was cut off by the close.

    Returns how the faults of reads ended: told (a place was named), healed (read again, or nobody needed that byte).
    """
    for name in _SAME:
        if getattr(stats, name) != seen.counts[name]:
            verdict.fail(
                "count", f"the store says {name} is {getattr(stats, name)}, its clients saw {seen.counts[name]}"
            )
    told = {*discards, *(one.where for one in seen.bad)}
    ended: Counter[str] = Counter()
    for shot in shots:
        if not shot.must:
            continue
        silent = [where for where in shot.must if where not in told]
        ended["told"] += len(shot.must) - len(silent)
        # a file that somebody cut or removed meanwhile answers before the flipped bit is looked at
        excused = any(other.name == shot.name and other.kind in ("truncated", "deleted") for other in shots)
        if silent and not excused and at_rest:
            verdict.fail("silent fault", f"{shot.kind} hit {silent[0]}, and nobody was told")
    for where in sorted(told):
        if not _explained(where, shots, segments):
            outcome = next((one for one in seen.bad if one.where == where), "in the log")
            verdict.fail("unexplained", f"{where}: {outcome}, and no fault was injected there")
    if seen.stopped and not any(shot.kind in STOPS_READS for shot in shots):
        verdict.fail(
            "unexplained", f"{seen.stopped} reads were refused because the drive was left alone, without a fault"
        )
    kinds = Counter(shot.kind for shot in shots)
    least = sum(kinds[kind] for kind in COUNTED)
    most = least + sum(kinds[kind] for kind in MAY_COUNT)
    if at_rest and "drive-full" not in kinds and not least <= stats.ssd_write_failures <= most:
        verdict.fail("count", f"the store counts {stats.ssd_write_failures} failed writes; injected: {least} to {most}")
    return ended


def _explained(where: str, shots: list[Shot], segments: Segments) -> bool:
    path, _, offset = where.rpartition("@")
    name, start = path.rpartition("/")[2], int(offset)
    end = start + LARGEST_RECORD
    if segments.is_damaged(name, start, end):
        return True
    return any(
        shot.name == name and shot.kind in _READ_FAULTS and shot.start < end and start < shot.end for shot in shots
    )
