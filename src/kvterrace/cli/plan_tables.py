"""A plan as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvterrace.cli.tables import count, safe, stdout, table
from kvterrace.planner.compare import Side, side_rows
from kvterrace.planner.decode import HotHit
from kvterrace.planner.explain import steps
from kvterrace.planner.ladder import Point
from kvterrace.planner.plan import Plan
from kvterrace.planner.units import bandwidth, duration, gb, gib, share, usd
from kvterrace.planner.verdict import verdict_lines

__all__ = ["show_plan", "show_sides", "show_steps"]


def show_plan(plan: Plan) -> None:
    """The verdict first, then what it rests on."""
    out = stdout()
    for line in verdict_lines(plan):
        out.print(f"- {safe(line)}", soft_wrap=True)
    out.print()
    for made in (_kv_table, _sweep_table, _load_table, _link_table, _decode_table, _wear_table):
        found = made(plan)
        if found is not None and found.row_count:
            out.print(found)
    _print_cost(out, plan)
    for note in plan.notes:
        out.print(f"note: {safe(note)}", soft_wrap=True)
    out.print("GiB, TiB: powers of two; GB, TB: powers of ten. How each figure is made: --explain", soft_wrap=True)


def show_sides(one: Side, other: Side) -> None:
    """Two machines side by side."""
    made = table("two machines, one load", "", f">{safe(one.machine)}", f">{safe(other.machine)}")
    for row in side_rows(one, other):
        made.add_row(*row)
    stdout().print(made)
    if one.price_usd and other.price_usd:
        stdout().print(f"price: {one.price_usd / other.price_usd:.2f} of {safe(other.machine)}'s", soft_wrap=True)


def show_steps(plan: Plan) -> None:
    """Each step of the arithmetic."""
    out = stdout()
    out.print("\nThe arithmetic, step by step (x is times; bytes, seconds and bytes a second unless a unit is named):")
    for number, step in enumerate(steps(plan), 1):
        out.print(f"{number:3}. {safe(step.title)}", soft_wrap=True)
        out.print(f"       = {safe(step.expression)}", soft_wrap=True)
        out.print(f"       = {safe(step.shown)}    ({safe(step.source)})", soft_wrap=True)


def _kv_table(plan: Plan) -> Table:
    setup, budget = plan.setup, plan.budget
    model, load, parallel = setup.model, setup.workload, setup.parallel
    made = table(f"{safe(model.name)} on {safe(setup.machine.name)}", "", ">bytes", ">", "")
    first, later = model.nbytes_per_token(), model.nbytes_per_token(load.context_tokens)
    rows = [(f"KV of a token ({model.kv_dtype})", first, "")]
    if later != first:
        rows.append((f"  of the {load.context_tokens:,}th", later, "layers whose window is full add none"))
    sequence = model.sequence_nbytes(load.context_tokens)
    stages = [model.sequence_nbytes(load.context_tokens, parallel.tp, one) for one in model.stages(parallel.pp)]
    where = f"tp {parallel.tp}, pp {parallel.pp}, {budget.instances} instance{'' if budget.instances == 1 else 's'}"
    part = plan.decoding.read_nbytes / plan.decoding.active_nbytes if plan.decoding.active_nbytes else 1.0
    reads = f"the model reads {share(part)} of it at each step" if part < 1 else "all of it is read at each step"
    rows += [
        (f"KV of a sequence of {load.context_tokens:,} tokens", sequence, "one copy"),
        ("  on a rank", max(stages), where if min(stages) == max(stages) else f"{where}; least {gib(min(stages))}"),
        (f"KV of {count(load.concurrency, 'sequence')}", plan.total_nbytes, "active + idle"),
        ("  active: of those that run", plan.active_nbytes, reads),
        ("  idle", plan.idle_nbytes, "kept for reuse, on any tier"),
    ]
    made_split = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in plan.split.items())
    rows += [
        ("weights", model.weights_nbytes, f"{model.params / 1e9:.1f} billion, {model.active_params / 1e9:.1f} active"),
        (
            "HBM for KV, all accelerators",
            budget.kv_nbytes,
            f"70 % of what weights leave: {count(budget.sequences, 'sequence')}",
        ),
    ]
    for name, nbytes, note in rows:
        made.add_row(name, f"{nbytes:,}", f"{gib(nbytes)} = {gb(nbytes)}", safe(note))
    made.add_section()
    made.add_row("split, if idle or sparsely read", "", made_split, safe(plan.split_source))
    return made


def _sweep_table(plan: Plan) -> Table | None:
    if plan.chosen is None:
        return None
    sets = list(plan.points)
    made = table("operating points: first token, and output tokens a second, by the tiers that serve", ">requests")
    for tiers in sets:
        made.add_column("computed" if not tiers else f"+ {tiers[-1]}", justify="right", overflow="fold")
    made.add_column("each token", justify="right")
    if "ssd" in sets[-1]:
        made.caption, made.caption_justify = (
            "ssd: if all new KV is written to it that links carry; see endurance",
            "left",
        )
    rows = zip(*plan.points.values(), strict=True)
    load = plan.setup.workload
    for row in rows:
        last: Point = row[-1]
        cells = [f"{duration(point.ttft_s)}  {point.output_tokens_per_s:,.0f}/s" for point in row]
        style = "bold" if last.requests == plan.chosen.requests else None
        mark = " *" if last.meets(load) and (load.ttft_s or load.tpot_s) else ""
        asked = f"{last.requests:,}" if last.running == last.requests else f"{last.requests:,} ({last.running:,} run)"
        made.add_row(asked + mark, *cells, duration(last.tpot_s), style=style)
    return made


def _load_table(plan: Plan) -> Table | None:
    if not plan.choices:
        return None
    made = table("load a prefix or compute it, alone", ">tokens", ">bytes", ">computed")
    tiers = list(dict.fromkeys(one.tier for one in plan.choices))
    for tier in tiers:
        made.add_column(f"from {tier}", justify="right")
    made.add_column("break-even", justify="right")
    lengths = sorted({one.tokens for one in plan.choices})
    for length in lengths:
        row = {one.tier: one for one in plan.choices if one.tokens == length}
        any_one = next(iter(row.values()))
        made.add_row(
            f"{length:,}",
            gib(any_one.nbytes),
            duration(any_one.compute_s),
            *(f"{duration(row[tier].load_s)} {'load' if row[tier].load else 'compute'}" for tier in tiers),
            bandwidth(any_one.break_even_bytes_per_s),
        )
    crossing = [
        f"{one.tier}: from {one.tokens:,} tokens on" if one.tokens is not None else f"{one.tier}: never"
        for one in plan.break_evens
    ]
    made.caption = f"loading is always faster - {'; '.join(crossing)}"
    made.caption_justify = "left"
    return made


def _link_table(plan: Plan) -> Table | None:
    if plan.chosen is None:
        return None
    made = table(f"links, with {plan.chosen.requests:,} requests", "link", ">need", ">usable", ">use", "")
    for one in sorted(plan.loads, key=lambda load: -load.use):
        word = f"breaks, by a factor of {one.use:.1f}" if one.use > 1 else "crowded" if one.use > 0.7 else ""
        made.add_row(one.link, bandwidth(one.need_bytes_per_s), bandwidth(one.usable_bytes_per_s), share(one.use), word)
    hot = plan.hot_restore
    if hot is not None:
        made.caption, made.caption_justify = f"restores, out of {hot.tier}: {_hot_words(hot, 'a request')}", "left"
    return made


def _decode_table(plan: Plan) -> Table | None:
    spilled = plan.decoding
    if not spilled.spills:
        return None
    title = (
        f"decoding all {plan.setup.workload.concurrency:,} at once: {gb(spilled.spills[0].overflow_nbytes)} beyond HBM"
    )
    sparse = f">sparse ({spilled.sparse.tokens:,} tokens)"
    made = table(title, "the rest lies in", "narrowest", ">exact, read a step", ">a token", sparse, ">a token")
    for one in spilled.spills:
        name = one.tier if one.fits else f"{one.tier} (too small)"
        exact, sparse = gb(one.exact_read_nbytes), gb(one.sparse_read_nbytes)
        made.add_row(name, one.bottleneck, exact, duration(one.exact_tpot_s), sparse, duration(one.sparse_tpot_s))
    if plan.hot is not None:
        made.caption = f"sparse, out of {plan.hot.tier}: {_hot_words(plan.hot, 'a step')}"
        made.caption_justify = "left"
    return made


def _hot_words(hot: HotHit, each: str) -> str:
    """A point of hot hit rate against twice the bandwidth."""
    worth = "more" if hot.point_is_worth_more else "less"
    point, doubling = duration(hot.point_saves_s), duration(hot.doubling_saves_s)
    return (
        f"at a hot hit rate of {share(hot.hit_rate)} a point more saves {point} {each}, twice the bandwidth {doubling}"
        f"; a point is worth {worth}, and more from {share(hot.break_even_hit_rate)} on"
    )


def _wear_table(plan: Plan) -> Table | None:
    wear = plan.wear
    if wear is None:
        return None
    made = table(f"endurance at {bandwidth(wear.written_bytes_per_s)} written", "", ">days", "")
    rated = f"rated for {wear.rated_days:,.0f} days"
    budget = f"write budget for it: {bandwidth(wear.budget_bytes_per_s)}; needed for all: {wear.needed_dwpd:.1f} DWPD"
    made.add_row("as it is", duration(wear.life_days * 86_400), f"{rated}; {budget}")
    for name, days in wear.remedies.items():
        made.add_row(f"with {name}", duration(days * 86_400), "")
    return made


def _print_cost(out: Console, plan: Plan) -> None:
    machine, only = plan.setup.machine, plan.hbm_only
    if not machine.price_usd:
        return
    words = [f"price about {usd(machine.price_usd)}"]
    if plan.usd_per_million_tokens is not None:
        words.append(f"{usd(plan.usd_per_million_tokens)} for a million output tokens over three years")
    if only.accelerators is not None and only.price_usd is not None:
        needed, held = count(only.accelerators, "accelerator"), count(plan.setup.workload.concurrency, "sequence")
        words.append(f"{held} in HBM: {needed}, about {usd(only.price_usd)}")
    out.print(f"cost: {'; '.join(words)}", soft_wrap=True)
