"""How many bytes there are to keep, and where they fit (R1, R2, R3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.planner.hardware import Machine
from kvterrace.planner.layers import Model, Parallel

__all__ = ["KV_SHARE_OF_FREE", "STARTING_SPLIT", "HbmBudget", "default_parallel", "hbm_budget", "split_nbytes"]

#: Of HBM that is free after the weights, KV gets this much; the rest is for activations and workspace (R3).
KV_SHARE_OF_FREE = 0.7
#: Where the KV of many sequences starts, before a trace says better (R2): idle or sparsely read KV only.
STARTING_SPLIT: Mapping[str, float] = {"hbm": 0.2, "dram": 0.5, "ssd": 0.3}


@dataclass(frozen=True, slots=True)
class HbmBudget:
    """HBM of one machine. Bytes; of the rank that holds most where it says so.

    Attributes:
        instances: copies of the model, each on tp x pp accelerators.
        rank_weights_nbytes, rank_free_nbytes, rank_kv_nbytes: of one accelerator: weights, what they leave, and KV's
            share of that (negative free: the weights do not fit).
        rank_sequence_nbytes: that one sequence takes on the fullest rank.
        sequences: that fit in all instances together.
        kv_nbytes: KV's room in all accelerators together.
        sequence_nbytes: that a sequence takes on all ranks of an instance.
    """

    instances: int
    rank_memory_nbytes: int
    rank_weights_nbytes: int
    rank_free_nbytes: int
    rank_kv_nbytes: int
    rank_sequence_nbytes: int
    sequences: int
    kv_nbytes: int
    sequence_nbytes: int

    @property
    def weights_fit(self) -> bool:
        """Whether anything is left beside the weights."""
        return self.rank_free_nbytes > 0

    @property
    def sequences_per_instance(self) -> int:
        """Sequences that fit in one instance."""
        return self.sequences // self.instances


def hbm_budget(model: Model, machine: Machine, parallel: Parallel, tokens: int) -> HbmBudget:
    """What HBM holds beside the weights, for sequences of `tokens`.

    Weights are taken to lie evenly on an instance's ranks. KV may take 70 % of what they leave.

    Raises:
        ConfigError: there are fewer accelerators than one instance wants.
    """
    model.check(parallel)
    count = machine.accelerator.count
    instances = count // parallel.ranks
    if not instances:
        raise ConfigError(f"--tp {parallel.tp} x --pp {parallel.pp} wants {parallel.ranks} accelerators; {count} there")
    weights = -(-model.weights_nbytes // parallel.ranks)
    free = machine.accelerator.memory_nbytes - weights
    kv = max(0, int(free * KV_SHARE_OF_FREE))
    rank_sequence = model.fullest_rank_nbytes(tokens, parallel)
    per_instance = kv // rank_sequence if rank_sequence else 0
    return HbmBudget(
        instances,
        machine.accelerator.memory_nbytes,
        weights,
        free,
        kv,
        rank_sequence,
        instances * per_instance,
        instances * parallel.ranks * kv,
        model.held_nbytes(tokens, parallel),
    )


def default_parallel(model: Model, machine: Machine, tokens: int, pp: int = 1) -> Parallel:
    """The ranks with which HBM holds most sequences of `tokens`; of equal ones the largest instance.

    More ranks share the weights; more than there are KV heads hold the same KV several times.

    Raises:
        ConfigError: there are fewer accelerators than `pp`, or the model has fewer layers.
    """
    best, most = Parallel(1, pp), -1
    stages = machine.accelerator.count // pp
    hbm_budget(model, machine, best, tokens)  # refuses what no number of ranks makes right
    for tp in range(stages, 0, -1):
        if stages % tp:
            continue
        try:
            held = hbm_budget(model, machine, Parallel(tp, pp), tokens).sequences
        except ConfigError:  # cannot be divided over so many
            continue
        if held > most:
            best, most = Parallel(tp, pp), held
    return best


def split_nbytes(total_nbytes: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Bytes for each tier, by share; they add up to `total_nbytes`, the last tier takes the rest.

    Raises:
        ConfigError: shares that are negative or do not add up to 1.
    """
    if not shares or min(shares.values()) < 0 or abs(sum(shares.values()) - 1) > 1e-9:
        raise ConfigError(f"split: shares {dict(shares)} must not be negative, and add up to 1")
    parts: dict[str, int] = {}
    *most, last = shares
    for name in most:
        parts[name] = min(round(total_nbytes * shares[name]), total_nbytes - sum(parts.values()))
    parts[last] = total_nbytes - sum(parts.values())
    return parts
