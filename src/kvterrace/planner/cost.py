"""What a machine costs, and what else would do the same (R8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvterrace.planner.hardware import Machine
from kvterrace.planner.layers import Model
from kvterrace.planner.sizing import default_parallel, hbm_budget

__all__ = ["AMORTISED_YEARS", "AllInHbm", "all_in_hbm", "usd_per_million_tokens"]

#: Years over which a machine's price is spread. Power and people are not counted.
AMORTISED_YEARS = 3.0
_YEAR_S = 365 * 86_400.0
_MOST_ACCELERATORS = 4096
#: Accelerators that one host takes, unless the machine has more in its own.
_HOST_ACCELERATORS = 8


@dataclass(frozen=True, slots=True)
class AllInHbm:
    """The accelerators that hold all sequences in HBM, and what they cost; None: no number does."""

    accelerators: int | None
    price_usd: float | None


def all_in_hbm(model: Model, machine: Machine, tokens: int, sequences: int) -> AllInHbm:
    """The fewest accelerators, doubled from one, whose HBM holds `sequences` of `tokens` at once, over as many
    ranks as hold most. Each eight of them, or as many as this machine has, need a host with DRAM like this one's; what
    joins hosts is not counted.
    """
    dram = machine.tier("dram")
    host_usd = machine.host_price_usd + (dram.price_usd if dram is not None else 0.0)
    count = 1
    while count <= _MOST_ACCELERATORS:
        bigger = replace(machine, accelerator=replace(machine.accelerator, count=count))
        if hbm_budget(model, bigger, default_parallel(model, bigger, tokens), tokens).sequences >= sequences:
            hosts = -(-count // max(_HOST_ACCELERATORS, machine.accelerator.count))
            return AllInHbm(count, hosts * host_usd + count * machine.accelerator.price_usd)
        count *= 2
    return AllInHbm(None, None)


def usd_per_million_tokens(price_usd: float, output_tokens_per_s: float) -> float | None:
    """Price of the machine for each million output tokens, if it did this all the time for three years."""
    if not output_tokens_per_s or not price_usd:
        return None
    return price_usd / (AMORTISED_YEARS * _YEAR_S * output_tokens_per_s) * 1e6
