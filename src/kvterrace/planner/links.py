"""Which links KV crosses on its way up, how often, and how much each of them carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.planner.hardware import Link, Machine, Storage

__all__ = ["LinkLoad", "Path", "Shortfall", "link_loads", "paths", "step_shortfall"]

_BLOCK_READ_NBYTES = 1 << 20  # a store merges neighbouring blocks to reads of 1 to 4 MiB


@dataclass(frozen=True, slots=True)
class Path:
    """The way of KV from a tier into HBM.

    Attributes:
        tier: where from.
        crossings: how often a byte crosses each link; more than once where it is copied on the way, or where several
            ranks take a copy of it.
        usable_bytes_per_s: of each of these links.
        first_byte_s: before anything arrives.
    """

    tier: str
    crossings: Mapping[str, float]
    usable_bytes_per_s: Mapping[str, float]
    first_byte_s: float

    @property
    def bytes_per_s(self) -> float:
        """KV that arrives, with the path to itself: what the tightest link lets through."""
        return min(self.usable_bytes_per_s[name] / times for name, times in self.crossings.items())

    @property
    def bottleneck(self) -> str:
        """That link."""
        return min(self.crossings, key=lambda name: self.usable_bytes_per_s[name] / self.crossings[name])

    def load_s(self, nbytes: float) -> float:
        """To bring `nbytes` up, with the path to itself."""
        return self.first_byte_s + nbytes / self.bytes_per_s if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a link has to carry, and what it can. Bytes a second."""

    link: str
    need_bytes_per_s: float
    usable_bytes_per_s: float

    @property
    def use(self) -> float:
        """Share of what it can; over 1 it breaks, by this factor."""
        return self.need_bytes_per_s / self.usable_bytes_per_s


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A step that reads `nbytes` in `step_s`, against one link."""

    link: str
    need_bytes_per_s: float
    usable_bytes_per_s: float

    @property
    def factor(self) -> float:
        """How many times more than the link carries; up to 1 it holds."""
        return self.need_bytes_per_s / self.usable_bytes_per_s


def _crossings(machine: Machine, tier: Storage, copies: float) -> dict[str, float]:
    """How often a byte of KV crosses each link. `copies`: ranks that take the same byte.

    Without GPUDirect what comes from a drive or the network is written to DRAM and read again, so it crosses the host's
    IO die twice; DRAM moves it twice as well, since its bandwidth is shared by both directions.
    """
    direct = machine.gpudirect and tier.name in {"ssd", "remote"}
    staged = tier.name in {"ssd", "remote"} and not direct
    crossings = {tier.name: 1.0, "accelerator link": copies, "io die": copies + (1.0 if staged else 0.0)}
    if tier.link is not None:
        crossings["network"] = 1.0
    if staged and machine.tier("dram") is not None:
        crossings["dram"] = 1.0 + copies
    elif tier.name == "dram":
        crossings["dram"] = copies
    return crossings


def _crossings_down(machine: Machine, tier: Storage) -> dict[str, float]:
    """How often a byte that is put crosses each link. It comes to DRAM once, and from there goes on to tiers below."""
    if tier.name == "dram" or machine.tier("dram") is None:
        return _crossings(machine, tier, 1.0)
    crossings = {tier.name: 1.0, "io die": 1.0, "dram": 1.0}
    if tier.link is not None:
        crossings["network"] = 1.0
    return crossings


def paths(machine: Machine, *, copies: float = 1.0, ranks: int | None = None) -> list[Path]:
    """The path of each tier, nearest first.

    Args:
        copies: ranks that need the same bytes, each for itself (the replicated latent of MLA).
        ranks: accelerators that one sequence is spread over; all of the machine's by default.
    """
    usable = _usable(machine)
    count = machine.accelerator.count
    usable["accelerator link"] *= (ranks or count) / count
    found = []
    for tier in machine.storage:
        crossings = _crossings(machine, tier, copies)
        found.append(Path(tier.name, crossings, {name: usable[name] for name in crossings}, tier.first_byte_s))
    return found


def link_loads(machine: Machine, up: Mapping[str, float], down: Mapping[str, float], copies: float) -> list[LinkLoad]:
    """What each link carries where `up` bytes a second come from each tier, and `down` go to it.

    A link carries both directions at once, and the fuller one counts; a drive and DRAM share theirs, so both add up
    there, a drive's writes by what it reads in the time of a write.
    """
    usable = _usable(machine)
    upward: dict[str, float] = dict.fromkeys(usable, 0.0)
    downward: dict[str, float] = dict.fromkeys(usable, 0.0)
    for tier in machine.storage:
        crossings = _crossings(machine, tier, copies)
        for name, times in crossings.items():
            upward[name] += up.get(tier.name, 0.0) * times
        for name, times in _crossings_down(machine, tier).items():
            downward[name] += down.get(tier.name, 0.0) * times
    loads = []
    for name, most in usable.items():
        tier_or_none = machine.tier(name)
        if tier_or_none is None:
            need = max(upward[name], downward[name])
        else:
            ratio = tier_or_none.read_bytes_per_s / tier_or_none.write_bytes_per_s
            need = upward[name] + downward[name] * ratio
        loads.append(LinkLoad(name, need, most))
    return loads


def step_shortfall(
    machine: Machine, nbytes: float, step_s: float, copies: float = 1.0, ranks: int | None = None
) -> list[Shortfall]:
    """What becomes of a decoding step that has to read `nbytes` of KV, on all ranks: from HBM, or all of it over the
    path of each tier, which has one copy where ranks have `copies`. The worst comes last. `ranks`: accelerators that
    the sequences lie on; all of the machine's by default.

    Raises:
        ConfigError: the step takes no time.
    """
    if step_s <= 0:
        raise ConfigError(f"a step of {step_s} s: give one above 0")
    need = nbytes / step_s
    accelerator = machine.accelerator
    hbm = (ranks or accelerator.count) * accelerator.memory_bytes_per_s * accelerator.memory_efficiency
    found = [Shortfall("hbm", need, hbm)]
    for path in paths(machine, copies=copies, ranks=ranks):
        by = "" if path.bottleneck == path.tier else f", by its {path.bottleneck}"
        found.append(Shortfall(path.tier + by, need / copies, path.bytes_per_s))
    link = machine.accelerator_link
    found.append(Shortfall(f"accelerator link, one of {link.count}", need, link.usable_bytes_per_s / link.count))
    return sorted(found, key=lambda one: one.factor)


def _usable(machine: Machine) -> dict[str, float]:
    usable = {one.name: _tier_bytes_per_s(one) for one in machine.storage}
    usable["accelerator link"] = machine.accelerator_link.usable_bytes_per_s
    usable["io die"] = machine.io_die.usable_bytes_per_s
    network: Link | None = next((one.link for one in machine.storage if one.link is not None), None)
    if network is not None:
        usable["network"] = network.usable_bytes_per_s
    return usable


def _tier_bytes_per_s(tier: Storage) -> float:
    if tier.read_iops:
        return min(tier.read_bytes_per_s, tier.read_iops * _BLOCK_READ_NBYTES)
    return tier.read_bytes_per_s
