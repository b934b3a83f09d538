"""A plan as one HTML page with plots, that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvterrace import __version__
from kvterrace.planner.compare import side_of, side_rows
from kvterrace.planner.explain import steps
from kvterrace.planner.plan import Plan
from kvterrace.planner.svg import Series, bars, lines
from kvterrace.planner.units import bandwidth, duration, gb, gib, share
from kvterrace.planner.verdict import verdict_lines

__all__ = ["plan_html"]

_STYLE = """
body{font:15px/1.5 sans-serif;color:#222;max-width:1180px;margin:2em auto;padding:0 1em}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}svg{margin:6px;border:1px solid #eee;max-width:100%;height:auto}
table{border-collapse:collapse}td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}
td.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}code{font-size:13px;overflow-wrap:anywhere}
.first{font-size:1.15em;font-weight:bold}footer{margin-top:3em;color:#666}
"""


def plan_html(plan: Plan, other: Plan | None = None) -> str:
    """The page. `other`: the same load on another machine, to compare with."""
    setup, load = plan.setup, plan.setup.workload
    title = f"{setup.model.name} on {setup.machine.name}"
    first, *more = verdict_lines(plan)
    asked = (
        f"{load.concurrency:,} sequences of {load.context_tokens:,} tokens, of which {load.output_tokens:,} are the "
        f"answer; reuse {share(load.reuse)}"
    )
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(asked)}</p><p class=first>{escape(first)}</p>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in more) + "</ul>",
        "<h2>KV</h2>" + _table(_kv_rows(plan)) + _room(plan),
        "<h2>Operating points</h2>" + _sweep(plan),
        "<h2>Load or compute</h2>" + _loading(plan),
        "<h2>Links and endurance</h2>" + _links(plan) + _wear(plan),
    ]
    if other is not None:
        body.append("<h2>Beside another machine</h2>" + _table(_side_rows(plan, other)))
    body.append("<h2>The arithmetic</h2>" + _arithmetic(plan))
    if plan.notes:
        body.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>")
    footer = f"kvterrace {__version__}. GiB, TiB: powers of two; GB, TB: powers of ten."
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}<footer>{footer}</footer></body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells; the first cell is a name, the others are figures."""
    made = []
    for name, *cells in rows:
        made.append(
            f"<tr><td>{escape(name)}</td>" + "".join(f"<td class=n>{escape(one)}</td>" for one in cells) + "</tr>"
        )
    return f"<table>{''.join(made)}</table>"


def _kv_rows(plan: Plan) -> list[tuple[str, ...]]:
    model, budget = plan.setup.model, plan.budget
    sequence = model.sequence_nbytes(plan.setup.workload.context_tokens)
    rows = [
        ("KV of a token", model.nbytes_per_token()),
        ("KV of a sequence, one copy", sequence),
        ("KV of a sequence, on the fullest accelerator", budget.rank_sequence_nbytes),
        ("KV of all sequences", plan.total_nbytes),
        ("active: of those that run", plan.active_nbytes),
        ("idle", plan.idle_nbytes),
        ("weights", model.weights_nbytes),
        ("HBM for KV, all accelerators", budget.kv_nbytes),
        *((f"split, if idle or sparsely read: {tier}", nbytes) for tier, nbytes in plan.split.items()),
    ]
    return [(name, f"{nbytes:,} B", gib(nbytes), gb(nbytes)) for name, nbytes in rows]


def _room(plan: Plan) -> str:
    """KV that there is, and room for it."""
    rows = [("active KV", float(plan.active_nbytes)), ("idle KV", float(plan.idle_nbytes))]
    rows.append(("room: hbm", plan.budget.kv_nbytes / plan.setup.copies))
    rows += [(f"room: {one.name}", float(one.kv_nbytes)) for one in plan.setup.machine.storage]
    return bars("KV of all sequences, one copy, and room for it", [(name, size, gib(size)) for name, size in rows])


def _sweep(plan: Plan) -> str:
    if plan.chosen is None:
        return "<p>HBM holds not one sequence.</p>"
    names = {tiers: "all computed" if not tiers else f"+ {tiers[-1]}" for tiers in plan.points}
    first, rate = [], []
    for tiers, points in plan.points.items():
        first.append(Series(names[tiers], [(one.requests, one.ttft_s) for one in points]))
        rate.append(Series(names[tiers], [(one.requests, one.output_tokens_per_s) for one in points]))
    axis = "requests at once"
    return lines(
        "Time to first token", axis, "", first, x_shown=_number, y_shown=duration, target=plan.setup.workload.ttft_s
    ) + lines("Output tokens a second", axis, "", rate, x_shown=_number, y_shown=_number, from_zero=True)


def _loading(plan: Plan) -> str:
    if not plan.choices:
        return "<p>No tier below HBM.</p>"
    tiers = list(dict.fromkeys(one.tier for one in plan.choices))
    computed = [(one.tokens, one.compute_s) for one in plan.choices if one.tier == tiers[0]]
    drawn = [Series("computed", computed)]
    drawn += [Series(tier, [(one.tokens, one.load_s) for one in plan.choices if one.tier == tier]) for tier in tiers]
    return lines("One prefix, alone", "tokens of the prefix", "", drawn, x_shown=_tokens, y_shown=duration)


def _links(plan: Plan) -> str:
    rows = [(one.link, one.use, f"{share(one.use)} of {bandwidth(one.usable_bytes_per_s)}") for one in plan.loads]
    return bars("Use of each link at the operating point", rows, mark=1.0, bad=lambda use: use > 1)


def _wear(plan: Plan) -> str:
    wear = plan.wear
    if wear is None:
        return ""
    lives = {"as it is": wear.life_days, **{f"with {name}": days for name, days in wear.remedies.items()}}
    rows = [(name, min(days, 10 * wear.rated_days), duration(days * 86_400)) for name, days in lives.items()]
    return bars(
        f"Life of the drives (line: rated, {wear.rated_days:,.0f} days)",
        rows,
        mark=wear.rated_days,
        bad=lambda days: days < wear.rated_days,
    )


def _side_rows(plan: Plan, other: Plan) -> list[tuple[str, ...]]:
    sides = side_of(plan), side_of(other)
    return [("", *(one.machine for one in sides)), *side_rows(*sides)]


def _arithmetic(plan: Plan) -> str:
    rows = [
        f"<li>{escape(one.title.strip())}<br><code>= {escape(one.expression)}</code><br>= {escape(one.shown)} "
        f"<small>[{escape(one.source)}]</small></li>"
        for one in steps(plan)
    ]
    return f"<ol>{''.join(rows)}</ol>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _tokens(value: float) -> str:
    return f"{value / 1024:,.0f} K" if value >= 1024 else f"{value:,.0f}"
