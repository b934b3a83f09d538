"""What a trace is like: sizes, and how soon its blocks come again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvterrace.sim.traces import TraceRequest
from kvterrace.tracing.chains import IdChains

__all__ = ["TraceInfo", "trace_info"]


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Figures of a trace. Counts in blocks, unless the name says otherwise.

    Attributes:
        hit_ratio: of a cache that keeps everything: the share of accesses to blocks that were touched before.
        once: share of the different blocks that are touched once.
        reuse_distance: of those accesses, at the 50th, 90th and 99th percentile: different blocks touched since the
            last touch of the same block, interpolated between two. Empty if there are none.
        input_tokens, output_tokens: mean of the requests of which it is known; 0 if of none.
    """

    requests: int
    sessions: int
    accesses: int
    different: int
    duration_s: float
    hit_ratio: float
    once: float
    reuse_distance: tuple[int, ...]
    input_tokens: float
    output_tokens: float
    longest: int


class _Sums:
    """Sums over places, of which each changes (a Fenwick tree)."""

    def __init__(self, places: int) -> None:
        self._tree = [0] * (places + 1)
        self.total = 0

    def add(self, place: int, count: int) -> None:
        self.total += count
        at = place + 1
        while at < len(self._tree):
            self._tree[at] += count
            at += at & -at

    def before(self, place: int) -> int:
        """Sum over all places below `place`."""
        found = 0
        while place:
            found += self._tree[place]
            place &= place - 1
        return found


def trace_info(requests: Iterable[TraceRequest]) -> TraceInfo:
    """Figures of a trace. About 150 B for each different block, 100 B for each request.

    Reuse distances are exact, and cost no pass over the blocks in between. A request touches a chain from the root on,
    so of the blocks last touched by one request the rest that no later request has touched is always the end of its
    chain. Those of them that come again in this request are a stretch of this chain, and what was touched since the
    last touch of each is: all blocks whose last touch is a later request's, and all whose last touch is the same
    request's, but for itself. The ones in front of it in the stretch are touched now, the ones behind it were then.

    Raises:
        ConfigError: an id follows on two others.
    """
    chains = IdChains()
    tips: list[int] = []
    sessions: set[int] = set()
    inputs: list[int] = []
    outputs: list[int] = []
    first_s = last_s = 0.0
    hits = accesses = longest = 0
    for request in requests:
        tip, known = chains.enter(request.ids)
        first_s = first_s if tips else request.at_s
        last_s = request.at_s
        tips.append(tip)
        hits += known
        accesses += len(request.ids)
        longest = max(longest, len(request.ids))
        if request.session != -1:
            sessions.add(request.session)
        inputs += [request.input_tokens] if request.input_tokens else []
        outputs += [request.output_tokens] if request.output_tokens else []
    distances, counts, once = _distances(chains, tips)
    return TraceInfo(
        requests=len(tips),
        sessions=len(sessions),
        accesses=accesses,
        different=len(chains),
        duration_s=last_s - first_s,
        hit_ratio=hits / accesses if accesses else 0.0,
        once=once / len(chains) if len(chains) else 0.0,
        reuse_distance=_percentiles(distances, counts),
        input_tokens=sum(inputs) / len(inputs) if inputs else 0.0,
        output_tokens=sum(outputs) / len(outputs) if outputs else 0.0,
        longest=longest,
    )


def _distances(chains: IdChains, tips: list[int]) -> tuple[list[int], list[int], int]:
    """Reuse distances with the number of accesses that have each; and how many blocks were touched once."""
    last = np.full(len(chains), -1, np.int32)
    times = np.zeros(len(chains), np.int32)
    live = _Sums(len(tips))
    distances: list[int] = []
    counts: list[int] = []
    for number, tip in enumerate(tips):
        path = chains.numbers(tip)
        before = last[path]
        before = before[: np.count_nonzero(before >= 0)]
        if len(before):
            ends = np.append(np.flatnonzero(np.diff(before)) + 1, len(before))
            owners = before[ends - 1].tolist()
            sizes = np.diff(ends, prepend=0).tolist()
            distances += [live.total - live.before(owner) - 1 for owner in owners]
            counts += sizes
            for owner, size in zip(owners, sizes, strict=True):
                live.add(owner, -size)
        live.add(number, len(path))
        last[path] = number
        times[path] += 1
    return distances, counts, int(np.count_nonzero(times == 1))


def _percentiles(distances: list[int], counts: list[int]) -> tuple[int, ...]:
    if not distances:
        return ()
    order = np.argsort(distances, kind="stable")
    values: npt.NDArray[np.int64] = np.asarray(distances, np.int64)[order]
    upto = np.cumsum(np.asarray(counts, np.int64)[order])
    found = []
    for share in (0.5, 0.9, 0.99):
        rank = share * (int(upto[-1]) - 1)
        below, above = values[np.searchsorted(upto, [int(rank), math.ceil(rank)], side="right")].tolist()
        found.append(round(below + (above - below) * (rank - int(rank))))
    return tuple(found)
