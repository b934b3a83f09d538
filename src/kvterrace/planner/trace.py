"""What a recorded trace says of a load: lengths, reuse, and how much has to be kept for how many hits.

One pass over the trace as an LRU stack (Mattson et al., 1970): the distance of a block is the number of others that
were touched since; a cache of more blocks than that has it. Where a trace is long, a share of the ids that depends on
the id alone is looked at, and distances are scaled up (SHARDS: Waldspurger et al., FAST 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError

__all__ = ["Request", "TraceProfile", "profile_trace"]

_SAMPLED_ACCESSES = 400_000
_HASH = np.uint64(0x9E3779B97F4A7C15)
_HASH_BITS = 24
_MAX_TOKENS = 1 << 30
#: Tiers take the capacities at which these shares of all hits are served from them or nearer ones.
_SPLIT_AT = {"hbm": 0.5, "dram": 0.9, "ssd": 0.99}

_Ids = npt.NDArray[np.int64]


class Request(Protocol):
    """One request of a trace; see `kvterrace.sim.traces`. Read only."""

    @property
    def at_s(self) -> float: ...

    @property
    def ids(self) -> _Ids: ...

    @property
    def input_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class TraceProfile:
    """A load as recorded.

    Attributes:
        requests, blocks, distinct_blocks: how many; blocks counted each time they are asked for.
        duration_s: from the first request to the last.
        block_tokens: tokens of a block.
        context_p50, context_p90, context_max: tokens of a prompt.
        output_mean: tokens of an answer.
        reuse: share of the prompts' blocks that were asked for before: hits of an endless cache.
        return_p50_s, return_p90_s: since a block that is asked for again was asked for last.
        sampled: share of the ids that distances were taken of.
        distances: of each hit, in blocks, ascending.
        accesses: sampled accesses, hits or not.
    """

    requests: int
    blocks: int
    distinct_blocks: int
    duration_s: float
    block_tokens: int
    context_p50: int
    context_p90: int
    context_max: int
    output_mean: float
    reuse: float
    return_p50_s: float
    return_p90_s: float
    sampled: float
    distances: npt.NDArray[np.float64]
    accesses: int

    def hit_share(self, capacity_tokens: float) -> float:
        """Share of the prompts' tokens that a cache of that many tokens has (LRU, whole prefixes)."""
        if not self.accesses:
            return 0.0
        return float(np.searchsorted(self.distances, capacity_tokens / self.block_tokens)) / self.accesses

    def tokens_for(self, share_of_hits: float) -> float:
        """Tokens to keep for that share of all possible hits."""
        if not len(self.distances):
            return 0.0
        return (float(np.quantile(self.distances, share_of_hits, method="higher")) + 1) * self.block_tokens

    def split(self) -> Mapping[str, float]:
        """Shares of HBM, DRAM and SSD in what is worth keeping (R2): of all hits half from HBM, up to 90 % from HBM and
        DRAM, up to 99 % from all three.
        """
        bounds = {name: self.tokens_for(share) for name, share in _SPLIT_AT.items()}
        whole = bounds["ssd"]
        if not whole:
            raise ConfigError("--trace: nothing in it is asked for twice: there is nothing to keep")
        hbm, dram = bounds["hbm"] / whole, (bounds["dram"] - bounds["hbm"]) / whole
        return {"hbm": hbm, "dram": dram, "ssd": max(0.0, 1 - hbm - dram)}


def profile_trace(
    read: Callable[[], Iterable[Request]], name: str, *, sampled_accesses: int = _SAMPLED_ACCESSES
) -> TraceProfile:
    """Go through a trace, twice: `read` begins anew each time it is called.

    Raises:
        ConfigError: it holds no request, one that cannot be, or none that says how long its prompt is.
    """
    lengths, outputs, times, counts = _first_pass(read(), name)
    blocks = int(counts.sum())
    if not blocks:
        raise ConfigError(f"--trace {name}: no request with a block in it")
    if not lengths.any():
        raise ConfigError(f"--trace {name}: input_length: missing: how many tokens a block has is not known")
    # A prompt's last block may be left out, or be there and not full: long prompts tell best.
    long = counts >= min(16, int(counts.max()))
    block_tokens = max(1, round(float((lengths[long] / counts[long]).max())))
    threshold = min(1.0, sampled_accesses / blocks)
    sampled = [_sample(one.ids, threshold) for one in read()]
    distances, intervals, distinct = _distances(sampled, times)
    accesses = sum(len(one) for one in sampled)
    if threshold < 1:
        distances = distances / threshold
        distinct = round(distinct / threshold)
    return TraceProfile(
        len(lengths),
        blocks,
        distinct,
        float(times.max() - times.min()),
        block_tokens,
        int(np.quantile(lengths, 0.5, method="higher")),
        int(np.quantile(lengths, 0.9, method="higher")),
        int(lengths.max()),
        float(np.mean(outputs)),
        len(distances) / accesses if accesses else 0.0,
        float(np.quantile(intervals, 0.5)) if len(intervals) else 0.0,
        float(np.quantile(intervals, 0.9)) if len(intervals) else 0.0,
        threshold,
        np.sort(distances),
        accesses,
    )


def _first_pass(
    requests: Iterable[Request], name: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Of each request: prompt and answer in tokens, time, blocks."""
    rows = []
    for number, one in enumerate(requests, 1):
        if not (0 <= one.input_tokens < _MAX_TOKENS and 0 <= one.output_tokens < _MAX_TOKENS):
            raise ConfigError(f"--trace {name}: request {number}: input_length or output_length is no length in tokens")
        if not np.isfinite(one.at_s):
            raise ConfigError(f"--trace {name}: request {number}: timestamp: {one.at_s} is no time")
        rows.append((one.input_tokens, one.output_tokens, one.at_s, len(one.ids)))
    table = np.array(rows, np.float64).reshape(-1, 4)
    whole = table.astype(np.int64)
    return whole[:, 0], whole[:, 1], table[:, 2], whole[:, 3]


def _sample(ids: _Ids, threshold: float) -> _Ids:
    if threshold >= 1:
        return ids
    hashed = (ids.astype(np.uint64) * _HASH) >> np.uint64(64 - _HASH_BITS)
    return ids[hashed < np.uint64(threshold * (1 << _HASH_BITS))]


def _distances(
    requests: list[_Ids], times: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int]:
    """Stack distance and interval of each access to a block seen before, and how many blocks there were.

    A request looks all its blocks up, and then touches them tail first, so that its head ends as the most recent.
    """
    size = sum(len(one) for one in requests)
    tree = [0] * (size + 1)  # Fenwick: which positions are the last touch of some block

    def add(position: int, change: int) -> None:
        position += 1
        while position <= size:
            tree[position] += change
            position += position & -position

    def before(position: int) -> int:
        """Marks at positions below."""
        total = 0
        while position > 0:
            total += tree[position]
            position -= position & -position
        return total

    last: dict[int, int] = {}
    last_s: dict[int, float] = {}
    distances: list[int] = []
    intervals: list[float] = []
    position = 0
    for ids, now_s in zip(requests, times.tolist(), strict=True):
        listed = ids.tolist()
        for block in listed:
            at = last.get(block)
            if at is not None:
                distances.append(len(last) - before(at + 1))
                intervals.append(now_s - last_s[block])
        for block in reversed(listed):
            at = last.get(block)
            if at is not None:
                add(at, -1)
            add(position, 1)
            last[block], last_s[block] = position, now_s
            position += 1
    return np.array(distances, np.float64), np.array(intervals, np.float64), len(last)
