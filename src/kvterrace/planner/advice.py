"""Which tiers are worth having, or none (R7): three constraints in order - the latency target, concurrency, reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvterrace.planner.cost import AMORTISED_YEARS
from kvterrace.planner.endurance import Endurance, endurance
from kvterrace.planner.hardware import Machine, Storage
from kvterrace.planner.ladder import Point, Setup, evaluate
from kvterrace.planner.units import bandwidth, duration, gib, share, usd

__all__ = [
    "LEAST_CONTEXT",
    "LEAST_GAIN",
    "LEAST_SERVICE_DAYS",
    "Constraint",
    "TierVerdict",
    "break_even_reuse",
    "judge",
    "least_gain",
    "tier_sets",
    "with_drives",
]

#: Below this a prompt is computed in well under a second, and HBM and DRAM hold thousands of them.
LEAST_CONTEXT = 4096
#: A tier that brings less throughput than this is not worth operating.
LEAST_GAIN = 0.05
#: Drives that are due for replacement sooner than this are not planned for: no more is written than makes them serve so
#: long. A replacement takes hands on the machine, and a tier that starts empty.
LEAST_SERVICE_DAYS = 365.0
_ORDER = ("hbm", "dram", "cxl", "ssd", "remote")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One of the three, and whether it speaks for the tier. `plain`: its no needs no other reason (R7)."""

    name: str
    holds: bool
    reason: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """Whether a tier is worth having, behind those nearer than it.

    Attributes:
        there: whether the machine has it; otherwise a usual one was assumed.
        gain: more output tokens a second, as a share of those without it, if all new KV is written to it.
        gain_in_service: the same if no more is written than lets its drives serve for a year before they are replaced.
        gain_in_budget: the same if no more is written than lets its drives live for their rated years. Both at least,
            since what is written is not chosen.
        constraints: in the order in which they are asked.
    """

    tier: str
    there: bool
    worth: bool
    gain: float
    gain_in_service: float
    gain_in_budget: float
    ttft_without_s: float
    ttft_with_s: float
    constraints: tuple[Constraint, ...]

    @property
    def pays(self) -> bool:
        """Whether it gains enough for what it costs, whatever the other constraints say."""
        return all(one.holds for one in self.constraints if one.name in {"reuse", "endurance"})

    @property
    def reason(self) -> str:
        """A plain no; else the first constraint that speaks against it; else what it gains."""
        against = sorted((one for one in self.constraints if not one.holds), key=lambda one: not one.plain)
        return (against or self.constraints[-1:])[0].reason


def tier_sets(machine: Machine) -> list[tuple[str, ...]]:
    """None at all, HBM, and then one tier more each time."""
    names = ["hbm", *(one.name for one in machine.storage)]
    return [(), *(tuple(names[: count + 1]) for count in range(len(names)))]


def judge(setup: Setup, tier: str, requests: int, *, there: bool) -> TierVerdict | None:
    """Whether `tier` is worth having with `requests` clients. None where HBM holds not one sequence."""
    names = tuple(name for name in _ORDER if name == "hbm" or setup.machine.tier(name) is not None)
    nearer = names[: names.index(tier)]
    without, point = evaluate(setup, requests, nearer), evaluate(setup, requests, (*nearer, tier))
    whole = evaluate(setup, requests, names)
    if without is None or point is None or whole is None:
        return None
    gain = in_service = in_budget = point.output_tokens_per_s / without.output_tokens_per_s - 1
    constraints = [
        _latency(setup, without, point, whole),
        _concurrency(setup, without, point, tier),
        _reuse(setup, point, gain, tier),
    ]
    drive = setup.machine.tier("ssd")
    if tier == "ssd" and drive is not None:
        wear = endurance(drive, point.put_bytes_per_s * point.written)
        if not wear.lasts:

            def gain_of(less: float) -> float:
                """If only that part of what links carry is written."""
                limited = evaluate(setup, requests, (*nearer, tier), written=point.written * less)
                assert limited is not None
                return limited.output_tokens_per_s / without.output_tokens_per_s - 1

            if wear.service_days < LEAST_SERVICE_DAYS:
                in_service = gain_of(wear.service_days / LEAST_SERVICE_DAYS)
            in_budget = gain_of(wear.budget_bytes_per_s / wear.written_bytes_per_s)
            constraints.append(_endurance(setup, wear, point.written, (gain, in_service, in_budget)))
    worth = all(one.holds for one in constraints)
    return TierVerdict(
        tier, there, worth, gain, in_service, in_budget, without.ttft_s, point.ttft_s, tuple(constraints)
    )


def _latency(setup: Setup, without: Point, point: Point, whole: Point) -> Constraint:
    """`whole`: with all tiers. Where these meet the target together, each that brings it nearer has its part in it."""
    target = setup.workload.ttft_s
    numbers = f"time to first token {duration(point.ttft_s)} with it, {duration(without.ttft_s)} without"
    if target is None:
        holds = point.ttft_s <= 1.01 * without.ttft_s
        word = "no latency target given; it does not slow requests down" if holds else "it slows requests down"
        return Constraint("latency target", holds, f"{word}: {numbers}")
    if point.ttft_s <= target:
        return Constraint("latency target", holds=True, reason=f"{duration(target)} is met: {numbers}")
    if whole.ttft_s <= target and point.ttft_s < without.ttft_s:
        reason = f"{duration(target)} is met with the tiers behind it: {numbers}"
        return Constraint("latency target", holds=True, reason=reason)
    either = "either way" if without.ttft_s > target else "with it"
    reason = f"{duration(target)} is missed by a factor of {point.ttft_s / target:,.1f} {either}: {numbers}"
    return Constraint("latency target", holds=False, reason=reason)


def _endurance(setup: Setup, wear: Endurance, part_written: float, gains: tuple[float, float, float]) -> Constraint:
    """Of drives that do not live for their rated years if all new KV is written. Two ways are open: to wear them out,
    but no faster than in a year, and buy new ones, which has to cost less than the gain is worth; or to keep to a write
    budget, and gain less. `gains`: if all is written, if drives serve a year, within the budget.
    """
    gain, in_service, in_budget = gains
    least, price = least_gain(setup.machine, "ssd")
    drives = price * max(1.0, AMORTISED_YEARS * 365 / max(wear.service_days, LEAST_SERVICE_DAYS))
    rest = setup.machine.price_usd - price
    part = drives / rest if rest > 0 else 0.0
    written, budget = bandwidth(wear.written_bytes_per_s), bandwidth(wear.budget_bytes_per_s)
    much = "all new KV is" if part_written == 1 else f"{share(part_written)} of new KV, what links carry, are"
    reason = (
        f"{share(gain)} more throughput if {much} written, at {written} all the time; the drives then last "
        f"{wear.life_days:,.0f} of {wear.rated_days:,.0f} days"
    )
    if wear.service_days < LEAST_SERVICE_DAYS:
        reason += (
            f"; with as much written as lets them serve {LEAST_SERVICE_DAYS:.0f} days, {share(in_service)} at least"
        )
    if drives:
        reason += f"; {usd(drives)} of them in {AMORTISED_YEARS:g} years, {share(part)} of the machine's price"
    reason += f"; within a write budget of {budget} they live, and the gain is {share(in_budget)} at least"
    pays = bool(drives) and in_service >= max(LEAST_GAIN, part)
    if pays or in_budget >= least:
        return Constraint("endurance", holds=True, reason=reason)
    if drives:
        reason += "; neither is worth it"
    else:
        reason += ", too little; whether buying new ones pays is not known without a price: give price_usd"
    reason += f"; drives of {wear.needed_dwpd:.1f} DWPD would live"
    return Constraint("endurance", holds=False, reason=reason)


def _concurrency(setup: Setup, without: Point, point: Point, tier: str) -> Constraint:
    """Whether there is more idle KV than the nearer tiers hold."""
    more = point.found.get(tier, 0.0)
    near = without.found_share
    reuse = setup.workload.reuse
    if reuse and more < 0.01 and near > 0.99 * reuse:
        reason = f"with {point.requests} requests the nearer tiers already find {share(near)} of {share(reuse)}"
        return Constraint("concurrency", holds=False, reason=reason)
    reason = (
        f"with {point.requests} requests the nearer tiers find {share(near)} of a prompt, {tier} {share(more)} more"
    )
    return Constraint("concurrency", holds=True, reason=reason)


def _reuse(setup: Setup, point: Point, gain: float, tier: str) -> Constraint:
    load, model = setup.workload, setup.model
    whole = setup.engine.prefill_s(0, load.prompt_tokens)
    if load.context_tokens <= LEAST_CONTEXT and tier in {"ssd", "remote"}:
        held = setup.budget.kv_nbytes // max(1, setup.budget.sequence_nbytes)
        dram = setup.machine.tier("dram")
        below = dram.kv_nbytes // max(1, model.sequence_nbytes(load.context_tokens)) if dram is not None else 0
        room = gib(model.sequence_nbytes(load.context_tokens))
        reason = (
            f"a context of {load.context_tokens:,} tokens takes {room}, and its prompt of {load.prompt_tokens:,} is "
            f"computed in {duration(whole)}: HBM holds {held:,} of them and DRAM {below:,}; no {tier} tier for "
            f"contexts up to {LEAST_CONTEXT:,} tokens ({duration(whole)} is the most that it saves a request)"
        )
        return Constraint("reuse", holds=False, reason=reason, plain=True)
    if not load.reuse:
        reason = f"no prefix is shared (reuse 0 %), so nothing is ever loaded: all {load.prompt_tokens:,} tokens of a"
        return Constraint(
            "reuse", holds=False, reason=f"{reason} prompt are computed, in {duration(whole)}", plain=True
        )
    least, price = least_gain(setup.machine, tier)
    cost = f", for {usd(price)}" if price else ""
    if gain < least:
        reason = f"reuse of {share(load.reuse)} gains {share(gain)} of throughput behind the nearer tiers{cost}"
        why = "of the machine's price" if least > LEAST_GAIN else "that it should"
        return Constraint("reuse", holds=False, reason=f"{reason}, under the {share(least)} {why}")
    found = share(point.found.get(tier, 0.0))
    reason = f"{share(gain)} more throughput{cost}: {found} of a prompt is found in it"
    if point.written < 1 and tier in {"ssd", "remote"}:
        reason += f"; links carry {share(point.written)} of the new KV to it"
    return Constraint("reuse", holds=True, reason=reason)


def least_gain(machine: Machine, tier: str) -> tuple[float, float]:
    """What a tier has to gain, and its price: 5 %, or its part of the price of the rest where that is more. DRAM is
    there anyway.
    """
    storage = machine.tier(tier)
    price = storage.price_usd if storage is not None and tier != "dram" else 0.0
    rest = machine.price_usd - price
    return max(LEAST_GAIN, price / rest if rest > 0 else 0.0), price


def break_even_reuse(setup: Setup, tier: str, requests: int, reuses: Sequence[float]) -> float | None:
    """The least of `reuses` from which on the tier gains as much as it has to. None: none of them."""
    for reuse in sorted(reuses):
        verdict = judge(replace(setup, workload=replace(setup.workload, reuse=reuse)), tier, requests, there=True)
        if verdict is not None and verdict.pays:
            return reuse
    return None


def with_drives(machine: Machine, drives: Storage) -> Machine:
    """The machine with drives behind its DRAM."""
    kept = [one for one in machine.storage if one.name != drives.name]
    return replace(machine, storage=tuple(sorted([*kept, drives], key=lambda one: _ORDER.index(one.name))))
