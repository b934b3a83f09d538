"""`kvterrace trace`: what a trace is like, and from one format to another."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvterrace.cli.tables import count, print_json, safe, stdout, table
from kvterrace.sim.converting import convert_trace, format_of
from kvterrace.sim.trace_info import TraceInfo, trace_info
from kvterrace.sim.traces import read_trace

__all__ = ["SCHEMA", "app"]

#: Name and version of what `--json` prints; see docs/reference/cli.md.
SCHEMA = "kvterrace.trace-info/1"

app = typer.Typer(
    help="Look at traces of requests, and convert them.", rich_markup_mode=None, pretty_exceptions_enable=False
)


class _To(StrEnum):
    KVTERRACE = "kvterrace"
    MOONCAKE = "mooncake"


@app.command("info")
def info(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace file, or the folder that a store recorded to.")
    ],
    coarsen: Annotated[int, typer.Option(min=1, metavar="N", help="Take blocks of N of the trace's blocks.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Requests, blocks, and how soon blocks come again."""
    kind = format_of(trace)
    found = trace_info(read_trace(trace, coarsen=coarsen))
    if as_json:
        distance = dict(zip(("p50", "p90", "p99"), found.reuse_distance, strict=False))
        print_json(
            {"schema": SCHEMA, "path": str(trace), "format": kind, **asdict(found), "reuse_distance": distance or None}
        )
    else:
        _show(trace, kind, found)


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A trace file, or the folder that a store recorded to.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; gzipped if it ends in .gz.")],
    to: Annotated[
        _To | None, typer.Option("--to", help="By default the other one: Mooncake's for a kvterrace trace.")
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of a block of IN; by default what fits its input_length (hash_ids), or 64 (hash_runs).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Between the formats of kvterrace and Mooncake; also from run-length coded ids (hash_runs). IN says what it is."""
    if to is None:
        to = _To.MOONCAKE if format_of(source) == "kvterrace" else _To.KVTERRACE
    requests = convert_trace(source, target, to.value, block_tokens=block_tokens)
    stdout().print(f"{count(requests, 'request')} written to {safe(str(target))} in {to.value}'s format")


def _show(path: Path, kind: str, found: TraceInfo) -> None:
    rows = table(f"{safe(str(path))} ({kind})", "what", ">figure")
    rows.add_row("requests", f"{found.requests:,}")
    rows.add_row("sessions", f"{found.sessions:,}" if found.sessions else "not known")
    rows.add_row("block accesses", f"{found.accesses:,}")
    rows.add_row("different blocks", f"{found.different:,}")
    rows.add_row("blocks of the longest request", f"{found.longest:,}")
    rows.add_row("duration", f"{found.duration_s:,.0f} s")
    rows.add_row("input tokens, mean", f"{found.input_tokens:,.0f}" if found.input_tokens else "not known")
    rows.add_row("output tokens, mean", f"{found.output_tokens:,.0f}" if found.output_tokens else "not known")
    rows.add_row("hit ratio of an endless cache", f"{100 * found.hit_ratio:.1f} %")
    rows.add_row("blocks touched once", f"{100 * found.once:.1f} %")
    for name, distance in zip(("p50", "p90", "p99"), found.reuse_distance, strict=False):
        rows.add_row(f"reuse distance {name}, blocks", f"{distance:,}")
    stdout().print(rows)
