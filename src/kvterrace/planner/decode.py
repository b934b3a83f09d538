"""Decoding more sequences than HBM holds: exact and sparse, and what a point of hot hit rate is worth (R4, R8, R24)."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.planner.ladder import Setup
from kvterrace.planner.links import Path
from kvterrace.planner.timing import Sparse

__all__ = ["Decoding", "HotHit", "Spill", "decoding", "hot_hit"]


@dataclass(frozen=True, slots=True)
class Spill:
    """All sequences decode, and what HBM does not hold lies in one tier.

    Attributes:
        overflow_nbytes: active KV outside HBM, replicas counted.
        exact_read_nbytes, exact_tpot_s: what a step reads of it; at least, as if that hid the step's work.
        sparse_read_nbytes, sparse_tpot_s: each step reads a few tokens of each sequence, wherever they lie.
        fits: whether the tier has room for it.
    """

    tier: str
    bottleneck: str
    overflow_nbytes: int
    fits: bool
    exact_read_nbytes: float
    exact_tpot_s: float
    sparse_read_nbytes: float
    sparse_tpot_s: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding of all sequences that the load has.

    Attributes:
        active_nbytes: their KV on all ranks.
        read_nbytes: of it, what a step reads: all by dense attention, less where a model chooses tokens itself.
        overflow_nbytes: of it, what HBM does not hold; sequences lie evenly over the instances, each whole in one.
        all_in_hbm_s: of a step if HBM held all of it.
        sparse: tokens that a sparse step reads.
        spills: for each tier, nearest first; none if HBM holds everything.
    """

    active_nbytes: int
    read_nbytes: int
    overflow_nbytes: int
    all_in_hbm_s: float
    sparse: Sparse
    spills: tuple[Spill, ...]

    @property
    def fits(self) -> bool:
        """Whether HBM holds all active KV."""
        return not self.overflow_nbytes


@dataclass(frozen=True, slots=True)
class HotHit:
    """A point of hot hit rate against twice the bandwidth of the tier behind.

    A step waits for the misses: (1 - h) x read bytes / bandwidth. A point more takes 0.01 x read bytes / bandwidth off,
    twice the bandwidth half of what is left, or nothing where another link is the narrow one.

    Attributes:
        hit_rate: share of the read bytes that HBM has.
        point_saves_s, doubling_saves_s: for each step.
        break_even_hit_rate: from here on a point is worth more.
    """

    tier: str
    hit_rate: float
    wait_s: float
    point_saves_s: float
    doubling_saves_s: float
    break_even_hit_rate: float

    @property
    def point_is_worth_more(self) -> bool:
        """Whether a point beats twice the bandwidth."""
        return self.point_saves_s > self.doubling_saves_s


def decoding(setup: Setup, sparse: Sparse | None = None) -> Decoding:
    """What decoding takes if all sequences of the load run at once."""
    few = sparse or Sparse()
    load, engine, budget = setup.workload, setup.engine, setup.budget
    active = load.concurrency * budget.sequence_nbytes
    local = -(-load.concurrency // budget.instances)
    step_s = engine.step_s(local, load.context_tokens)
    read = load.concurrency * setup.model.read_nbytes(load.context_tokens, setup.parallel.tp)
    fuller = load.concurrency % budget.instances  # instances that have one sequence more than the others
    room = budget.kv_nbytes // budget.instances
    overflow = fuller * max(0, local * budget.sequence_nbytes - room)
    overflow += (budget.instances - fuller) * max(
        0, load.concurrency // budget.instances * budget.sequence_nbytes - room
    )
    spills = []
    if overflow:
        sparse_s = engine.sparse_step_s(local, load.context_tokens, few)
        for path in setup.paths(setup.busy_instances):
            storage = setup.machine.tier(path.tier)
            assert storage is not None
            # What lies below is one copy; on its way up it multiplies, which the path's crossings count.
            below = overflow / setup.copies
            exact = below * read / active
            chosen = min(exact, below * min(1.0, few.tokens / load.context_tokens))
            spills.append(
                Spill(
                    path.tier,
                    path.bottleneck,
                    overflow,
                    below <= storage.kv_nbytes,
                    exact,
                    max(step_s, path.load_s(exact)),
                    chosen,
                    max(sparse_s, path.load_s(chosen)),
                )
            )
    return Decoding(active, read, overflow, step_s, few, tuple(spills))


def hot_hit(path: Path, read_nbytes: float, hit_rate: float) -> HotHit:
    """What a point of hit rate saves, and twice the tier's own bandwidth, for steps that read `read_nbytes`."""
    now = path.bytes_per_s
    doubled = {**path.usable_bytes_per_s, path.tier: 2 * path.usable_bytes_per_s[path.tier]}
    faster = Path(path.tier, path.crossings, doubled, path.first_byte_s).bytes_per_s
    missed = (1 - hit_rate) * read_nbytes
    point = min(0.01, 1 - hit_rate) * read_nbytes / now
    gained = 1 - now / faster  # share of the wait that goes
    return HotHit(
        path.tier,
        hit_rate,
        missed / now,
        point,
        missed / now * gained,
        1 - 0.01 / gained if gained > 0.01 else 0.0,
    )
