"""What one machine does for a load with some tiers of its ladder: hits, time to first token, throughput.

A closed test: as many clients as the concurrency says, each asks again as soon as it was answered, all at the same
time. So requests meet at every stage, as they do in published tests of such stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvterrace.planner.hardware import Machine
from kvterrace.planner.layers import Model, Parallel
from kvterrace.planner.links import LinkLoad, Path, link_loads, paths
from kvterrace.planner.restore import first_token_s
from kvterrace.planner.sizing import HbmBudget
from kvterrace.planner.timing import Engine
from kvterrace.planner.workload import Workload

__all__ = ["Point", "Setup", "evaluate", "loads_of"]

#: Tiers that new KV has to be written to, rather than staying where it came to.
_FAR = frozenset({"ssd", "remote"})
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a machine, with a load."""

    model: Model
    machine: Machine
    parallel: Parallel
    budget: HbmBudget
    workload: Workload

    @property
    def engine(self) -> Engine:
        """One instance."""
        return Engine(self.model, self.machine.accelerator, self.parallel)

    @property
    def copies(self) -> float:
        """Bytes that the ranks take for each byte that a tier below keeps: over 1 where ranks hold the same KV."""
        tokens = self.workload.context_tokens
        return self.model.held_nbytes(tokens, self.parallel) / max(1, self.model.sequence_nbytes(tokens))

    @property
    def token_nbytes(self) -> float:
        """Bytes that a token of a sequence takes in a tier, one copy: what is put of it, so every layer's KV, also
        where a window forgets it later. A tier is passed through in its capacity / bytes put a second.
        """
        state = self.model.sequence_nbytes(0) / self.workload.context_tokens
        return self.model.nbytes_per_token() + state

    @property
    def busy_instances(self) -> int:
        """Instances that have a sequence, with all of the load's alive."""
        return min(self.budget.instances, self.workload.concurrency)

    def paths(self, instances: int = 1) -> list[Path]:
        """The way up from each tier to that many instances. A sequence is spread over the ranks of one, so it has the
        links of these accelerators alone.
        """
        return paths(self.machine, copies=self.copies, ranks=instances * self.parallel.ranks)


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point.

    Attributes:
        tiers: those that serve, HBM first; without any, every prompt is computed.
        requests, running: clients, and how many of them HBM holds at once; the others wait.
        found: share of the prompts' tokens by the tier that it is found in.
        ttft_s: median time to first token, waiting for room in HBM included.
        tpot_s: time per output token.
        output_tokens_per_s, requests_per_s: of the whole machine.
        restored_bytes_per_s: by tier.
        put_bytes_per_s: KV that is new, one copy.
        written: share of it that SSD and remote storage take: as much as their links carry beside the restores.
        first_byte_s, restore_s, own_link_s, compute_s: of one request: the tier's delay, the fullest link that all
            share, the links of its instance's accelerators, and these.
    """

    tiers: tuple[str, ...]
    requests: int
    running: int
    found: Mapping[str, float]
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    requests_per_s: float
    restored_bytes_per_s: Mapping[str, float]
    put_bytes_per_s: float
    written: float
    first_byte_s: float
    restore_s: float
    own_link_s: float
    compute_s: float

    @property
    def found_share(self) -> float:
        """Share of the prompts' tokens that is found anywhere."""
        return sum(self.found.values())

    def meets(self, workload: Workload) -> bool:
        """Whether the latency target is met and no request waits for HBM."""
        in_time = workload.ttft_s is None or self.ttft_s <= workload.ttft_s
        in_step = workload.tpot_s is None or self.tpot_s <= workload.tpot_s
        return in_time and in_step and self.running == self.requests


def evaluate(setup: Setup, requests: int, tiers: tuple[str, ...], *, written: float = 1.0) -> Point | None:
    """The operating point with `requests` clients, if only `tiers` keep idle KV. None: HBM holds not one sequence.

    `written`: share of the new KV that SSD and remote storage are to take; of what would be found there, the same share
    is. They take less where a link does not carry it: the share is then the largest that it does, found by halving.
    """
    point = _with_share(setup, requests, tiers, written)
    if point is None or not _overloaded(setup, point):
        return point
    low, high = 0.0, written
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _with_share(setup, requests, tiers, middle)
        assert tried is not None
        low, high = (low, middle) if _overloaded(setup, tried) else (middle, high)
    return _with_share(setup, requests, tiers, low)


def loads_of(setup: Setup, point: Point) -> list[LinkLoad]:
    """What each link carries at a point: restores up, and new KV down to the tiers that serve."""
    shares = {"dram": 1.0, "ssd": point.written, "remote": point.written}
    down = {tier: point.put_bytes_per_s * shares[tier] for tier in point.tiers if tier in shares}
    return link_loads(setup.machine, point.restored_bytes_per_s, down, setup.copies)


def _overloaded(setup: Setup, point: Point) -> bool:
    if not point.written or not _FAR.intersection(point.tiers):
        return False
    return any(one.use > 1 for one in loads_of(setup, point))


def _with_share(setup: Setup, requests: int, tiers: tuple[str, ...], written: float) -> Point | None:
    """The point with that share written, whether links carry it or not."""
    running = min(requests, setup.budget.sequences)
    if not running:
        return None
    engine, load, budget = setup.engine, setup.workload, setup.budget
    local = -(-running // budget.instances)  # on the fullest instance
    tpot_s = engine.step_s(local, load.context_tokens)
    decode_s = load.output_tokens * tpot_s
    found = _found(setup, running, tiers, local * _least_prefill_s(setup) + decode_s)
    for tier in _FAR.intersection(found):
        found[tier] *= written
    cached = int(sum(found.values()) * load.prompt_tokens)
    compute_s = engine.prefill_s(cached, load.prompt_tokens - cached)
    nbytes = _restored(setup, found, cached)
    restore_s, own_link_s, first_byte_s = _restore(setup, nbytes)
    ttft_s = first_token_s(running, restore_s, compute_s, local=local, own_link_s=own_link_s, first_byte_s=first_byte_s)
    rate = running / (ttft_s + decode_s)
    # Every layer's KV of every new token is made and put, also what a window forgets later.
    new = (load.context_tokens - cached) * setup.model.nbytes_per_token() + setup.model.sequence_nbytes(0)
    return Point(
        tiers,
        requests,
        running,
        found,
        ttft_s + (requests - running) / rate,
        tpot_s,
        rate * load.output_tokens,
        rate,
        {tier: rate * moved for tier, moved in nbytes.items()},
        rate * new,
        written,
        first_byte_s,
        restore_s,
        own_link_s,
        compute_s,
    )


def _least_prefill_s(setup: Setup) -> float:
    """Of a prompt that finds all that is reused."""
    load = setup.workload
    cached = int(load.reuse * load.prompt_tokens)
    return setup.engine.prefill_s(cached, load.prompt_tokens - cached)


def _found(setup: Setup, running: int, tiers: tuple[str, ...], cycle_s: float) -> dict[str, float]:
    """Where the reused tokens are found. `cycle_s`: the least time between a client's requests, so that as many tokens
    pass through the ladder as can, and it forgets as fast as it can: the careful side.
    """
    load, found = setup.workload, {}
    tokens_per_s = running / cycle_s * load.context_tokens if cycle_s > 0 else 0.0
    capacity, share = 0.0, 0.0
    for tier in tiers:
        capacity += _idle_nbytes(setup, running, tier) / setup.token_nbytes
        reached = load.found_share(capacity, tokens_per_s)
        found[tier] = max(0.0, reached - share)
        share = max(share, reached)
    return found


def _idle_nbytes(setup: Setup, running: int, tier: str) -> float:
    """Room for idle KV, in bytes of one copy."""
    if tier == "hbm":
        free = setup.budget.kv_nbytes - running * setup.budget.sequence_nbytes
        return max(0.0, free / setup.copies)
    storage = setup.machine.tier(tier)
    return float(storage.kv_nbytes) if storage is not None else 0.0


def _restored(setup: Setup, found: Mapping[str, float], cached: int) -> dict[str, float]:
    """Bytes that a request brings up from each tier below HBM."""
    share = sum(found.values())
    if not share or not cached:
        return {}
    whole = setup.model.sequence_nbytes(cached)
    return {tier: whole * part / share for tier, part in found.items() if tier != "hbm" and part}


def _restore(setup: Setup, nbytes: Mapping[str, float]) -> tuple[float, float, float]:
    """Seconds that the fullest shared link works for one request, those of its own accelerators' links, and the first
    byte's delay.
    """
    busy: dict[str, float] = {}
    delay = 0.0
    for path in setup.paths():
        moved = nbytes.get(path.tier, 0.0)
        if moved:
            delay = max(delay, path.first_byte_s)
            for link, times in path.crossings.items():
                busy[link] = busy.get(link, 0.0) + moved * times / path.usable_bytes_per_s[link]
    own_s = busy.pop("accelerator link", 0.0)
    return max(busy.values(), default=0.0), own_s, delay
