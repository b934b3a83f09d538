"""A whole plan: from a model, a load and a machine to a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvterrace.planner.advice import TierVerdict, break_even_reuse, judge, tier_sets, with_drives
from kvterrace.planner.cost import AllInHbm, all_in_hbm, usd_per_million_tokens
from kvterrace.planner.decode import Decoding, HotHit, decoding, hot_hit
from kvterrace.planner.endurance import Endurance, endurance, what_would_help
from kvterrace.planner.hardware import Machine, usual_drives
from kvterrace.planner.ladder import Point, Setup, evaluate, loads_of
from kvterrace.planner.layers import Model, Parallel
from kvterrace.planner.links import LinkLoad, Shortfall, step_shortfall
from kvterrace.planner.restore import BreakEven, Choice, break_even, choose
from kvterrace.planner.sizing import STARTING_SPLIT, HbmBudget, default_parallel, hbm_budget, split_nbytes
from kvterrace.planner.workload import Workload

__all__ = ["Plan", "make_plan"]

_LENGTHS = (1024, 4096, 16_384, 65_536, 131_072, 524_288, 1_048_576)
_LONGEST_TRIED = 1 << 20
_REUSES = tuple(step / 20 for step in range(1, 21))
_MOST_POINTS = 12


@dataclass(frozen=True)
class Plan:
    """Everything that was worked out. Bytes, seconds, bytes a second, US dollars.

    Attributes:
        total_nbytes: KV of all sequences, one copy; of it `active_nbytes` are of those that run at once.
        split: where `total_nbytes` may lie, if it is idle or sparsely read; `split_source`: where the shares are from.
        points: operating points, by the tiers that serve and then by the number of requests.
        chosen: the point that is planned for: with all tiers, at the largest concurrency up to the one asked for that
            HBM holds and that meets the target; a single request if none does. None where HBM holds not one sequence.
        loads: of each link at that point.
        shortfalls: a step that reads the KV of all sequences in `step_s`, against HBM and each path.
        step_s: the target's time for an output token; without one, what a step takes if HBM held everything.
        hot: of sparse decoding out of the farthest tier; None if HBM holds everything.
        hot_restore: of restores at the chosen point, out of the farthest tier that has hits; None without such hits.
        verdicts: tiers in order; an SSD is judged even where the machine has none.
        needed_reuse: the least reuse from which on an SSD would gain enough; None: none does.
    """

    setup: Setup
    total_nbytes: int
    active_nbytes: int
    split: Mapping[str, int]
    split_source: str
    points: Mapping[tuple[str, ...], tuple[Point, ...]]
    chosen: Point | None
    loads: tuple[LinkLoad, ...]
    decoding: Decoding
    hot: HotHit | None
    hot_restore: HotHit | None
    shortfalls: tuple[Shortfall, ...]
    step_s: float
    choices: tuple[Choice, ...]
    break_evens: tuple[BreakEven, ...]
    wear: Endurance | None
    verdicts: tuple[TierVerdict, ...]
    needed_reuse: float | None
    hbm_only: AllInHbm
    usd_per_million_tokens: float | None
    notes: tuple[str, ...]

    @property
    def idle_nbytes(self) -> int:
        """KV of sequences that do not run, one copy."""
        return self.total_nbytes - self.active_nbytes

    @property
    def budget(self) -> HbmBudget:
        """HBM."""
        return self.setup.budget

    @property
    def worth(self) -> tuple[str, ...]:
        """Tiers of the machine, below HBM, that are worth having."""
        return tuple(one.tier for one in self.verdicts if one.worth and one.there)


def make_plan(model: Model, machine: Machine, load: Workload, parallel: Parallel | None = None) -> Plan:
    """Work everything out. Raises ConfigError where model, machine and ranks do not go together."""
    given, parallel = parallel, parallel or default_parallel(model, machine, load.context_tokens)
    budget = hbm_budget(model, machine, parallel, load.context_tokens)
    setup = Setup(model, machine, parallel, budget, load)
    sequence = model.sequence_nbytes(load.context_tokens)
    total = load.concurrency * sequence
    points = {tiers: _sweep(setup, tiers) for tiers in tier_sets(machine)}
    chosen = _chosen(setup, points)
    spilled = decoding(setup)
    step_s = load.tpot_s or setup.engine.step_s(max(1, -(-load.concurrency // budget.instances)), load.context_tokens)
    wear = _wear(setup, chosen)
    busy = setup.busy_instances * parallel.ranks
    shares, source = _split_shares(load)
    return Plan(
        setup,
        total,
        min(load.concurrency, budget.sequences) * sequence,
        split_nbytes(total, shares),
        source,
        points,
        chosen,
        tuple(loads_of(setup, chosen)) if chosen is not None else (),
        spilled,
        _hot(setup, spilled),
        _hot_restore(setup, chosen),
        tuple(step_shortfall(machine, float(spilled.read_nbytes), step_s, setup.copies, busy)),
        step_s,
        tuple(_choices(setup)),
        tuple(break_even(setup.engine, path, max(_LONGEST_TRIED, load.context_tokens)) for path in setup.paths()),
        wear,
        tuple(_verdicts(setup, chosen)),
        _needed_reuse(setup, chosen),
        all_in_hbm(model, machine, load.context_tokens, load.concurrency),
        usd_per_million_tokens(machine.price_usd, chosen.output_tokens_per_s) if chosen is not None else None,
        tuple(_notes(setup, ranks_given=given is not None)),
    )


def _sweep(setup: Setup, tiers: tuple[str, ...]) -> tuple[Point, ...]:
    asked, fits = setup.workload.concurrency, setup.budget.sequences
    counts = {asked, *(1 << power for power in range(21) if 1 << power <= 2 * asked)}
    if 0 < fits <= 2 * asked:
        counts.add(fits)
    ordered = sorted(counts)
    while len(ordered) > _MOST_POINTS:  # the largest matter, the smallest are all alike
        ordered.pop(1)
    points = (evaluate(setup, count, tiers) for count in ordered)
    return tuple(point for point in points if point is not None)


def _chosen(setup: Setup, points: Mapping[tuple[str, ...], tuple[Point, ...]]) -> Point | None:
    every = list(points.values())[-1]
    asked = setup.workload.concurrency
    held = [one for one in every if one.requests <= asked and one.running == one.requests]
    meeting = [one for one in held if one.meets(setup.workload)]
    if meeting:
        return meeting[-1]
    return held[0] if held else None  # the one that comes closest


def _split_shares(load: Workload) -> tuple[Mapping[str, float], str]:
    if load.trace is not None and len(load.trace.distances):
        return load.trace.split(), "the trace: 50, 90 and 99 % of its hits"
    return STARTING_SPLIT, "where to start without a trace"


def _wear(setup: Setup, point: Point | None) -> Endurance | None:
    drive = setup.machine.tier("ssd")
    if drive is None or point is None:
        return None
    full = max(setup.model.layers, key=lambda one: one.kv_heads)
    factors = what_would_help(
        1.0, kv_element_nbytes=setup.model.element_nbytes, query_heads=full.query_heads, kv_heads=full.kv_heads
    )
    return endurance(drive, point.put_bytes_per_s * point.written, factors)


def _hot(setup: Setup, spilled: Decoding) -> HotHit | None:
    """For sparse decoding out of the farthest tier: HBM has its even share of what a step reads."""
    if not spilled.spills:
        return None
    path = setup.paths(setup.busy_instances)[-1]
    read = spilled.active_nbytes / setup.copies * min(1.0, spilled.sparse.tokens / setup.workload.context_tokens)
    return hot_hit(path, read, 1 - spilled.overflow_nbytes / spilled.active_nbytes)


def _hot_restore(setup: Setup, point: Point | None) -> HotHit | None:
    """For what a request finds: HBM has its share of it, the rest is taken to come from the farthest tier."""
    if point is None:
        return None
    path = next((one for one in reversed(setup.paths()) if point.found.get(one.tier)), None)
    if path is None:
        return None
    cached = int(point.found_share * setup.workload.prompt_tokens)
    return hot_hit(path, float(setup.model.sequence_nbytes(cached)), point.found["hbm"] / point.found_share)


def _choices(setup: Setup) -> list[Choice]:
    longest = setup.model.max_context or max(_LENGTHS)
    lengths = sorted({*(one for one in _LENGTHS if one <= longest), setup.workload.context_tokens})
    return [choose(setup.engine, path, length) for path in setup.paths() for length in lengths]


def _verdicts(setup: Setup, point: Point | None) -> list[TierVerdict]:
    if point is None:
        return []
    found = [judge(setup, storage.name, point.requests, there=True) for storage in setup.machine.storage]
    if setup.machine.tier("ssd") is None:
        found.append(judge(_with_usual_drives(setup), "ssd", point.requests, there=False))
    return [one for one in found if one is not None]


def _with_usual_drives(setup: Setup) -> Setup:
    if setup.machine.tier("ssd") is not None:
        return setup
    drives = usual_drives(setup.machine.accelerator.count)
    return replace(setup, machine=with_drives(setup.machine.without("remote"), drives))


def _needed_reuse(setup: Setup, point: Point | None) -> float | None:
    if point is None or setup.workload.trace is not None:
        return None
    return break_even_reuse(_with_usual_drives(setup), "ssd", point.requests, _REUSES)


def _notes(setup: Setup, *, ranks_given: bool) -> list[str]:
    model, load, budget = setup.model, setup.workload, setup.budget
    notes = list(model.notes)
    if model.max_context and load.context_tokens > model.max_context:
        notes.append(
            f"the configuration allows {model.max_context:,} tokens of context, {load.context_tokens:,} are planned for"
        )
    if setup.copies > 1.001:
        notes.append(f"ranks hold the same KV {setup.copies:.3g} times over; tiers below are taken to keep one copy")
        if any(layer.replicated for layer in model.layers):
            notes.append(
                "data-parallel attention would keep each latent once; it is not planned for: docs/guide/sizing.md"
            )
    if setup.parallel.tp > 1 and not ranks_given and model.weights_nbytes < budget.rank_memory_nbytes / 2:
        notes.append(
            f"tp {setup.parallel.tp} holds most sequences, but what ranks say to each other is not counted: a model "
            "that fits one accelerator is often run with --tp 1"
        )
    parts = {"accelerators": setup.machine.accelerator.price_usd}
    parts.update({one.name: one.price_usd for one in setup.machine.storage})
    free = [name for name, price in parts.items() if not price]
    if free:
        notes.append(f"no price_usd is given for {', '.join(free)}: prices are without them")
    unused = setup.machine.accelerator.count - budget.instances * setup.parallel.ranks
    if unused:
        notes.append(f"{unused} accelerators are left over")
    if budget.instances > 1:
        notes.append(f"{budget.instances} instances share the load evenly; a sequence runs on one of them")
    return notes
