"""`kvterrace plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvterrace.cli.console import stderr
from kvterrace.cli.plan_tables import show_plan, show_sides, show_steps
from kvterrace.cli.tables import print_json
from kvterrace.config import parse_nbytes
from kvterrace.errors import ConfigError
from kvterrace.planner.compare import side_of
from kvterrace.planner.hardware import Machine, load_machine, machine_names, with_bench
from kvterrace.planner.html import plan_html
from kvterrace.planner.layers import Model, Parallel
from kvterrace.planner.models import kv_dtype_of, load_model, shipped_models
from kvterrace.planner.plan import make_plan
from kvterrace.planner.report import plan_json
from kvterrace.planner.sizing import default_parallel
from kvterrace.planner.trace import TraceProfile, profile_trace
from kvterrace.planner.units import parse_duration, parse_share, parse_tokens
from kvterrace.planner.workload import RETURN_S, Workload
from kvterrace.sim.traces import read_trace

__all__ = ["EPILOGUE", "command"]

_DEFAULT_HARDWARE = "8x-h100"
_DEFAULT_OUTPUT = 512

EPILOGUE = (
    "A model is a folder with a Hugging Face config.json, such a file, or a known name; hardware is a TOML file or a "
    "known name. Both, every formula and its source: docs/guide/sizing.md."
)


def _show_names(wanted: bool) -> None:
    if wanted:
        names = sorted({str(one["name"]) for one in shipped_models().values()})
        typer.echo(f"models: {', '.join(names)}\nhardware: {', '.join(machine_names())}")
        raise typer.Exit


def command(
    model: Annotated[str, typer.Option(metavar="CONFIG|NAME", help="A config.json, its folder, or a known name.")],
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="A sequence at its longest, e.g. 128k. Default: the trace's 90th percentile."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", help="Sequences alive at the same time.")] = 16,
    hardware: Annotated[str, typer.Option(metavar="FILE|NAME", help="The machine.")] = _DEFAULT_HARDWARE,
    reuse: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Of a prompt, what was seen before: 0.6 or 60%. Default: 0.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Target for the first token, e.g. 2s.")] = None,
    tpot: Annotated[str | None, typer.Option(metavar="TIME", help="Target for each further token, e.g. 50ms.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A recorded load, file or folder: lengths and reuse from it."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Of an answer, part of the context. Default: 512, or the trace's."),
    ] = None,
    returns: Annotated[
        str | None, typer.Option("--return", metavar="TIME", help="Until a prefix is asked for again. Default: 10min.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(metavar="N", help="Tensor-parallel ranks. Default: those that hold most sequences.")
    ] = None,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help="auto, bf16, fp16, fp8, int8 or fp32.")] = "auto",
    weights: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the weights, where the configuration does not tell.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `kvterrace bench store --json` measured on these drives.")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="FILE|NAME", help="Another machine to compare with.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show each step of the arithmetic.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    names: Annotated[  # noqa: ARG001 - eager: ends the command by itself
        bool, typer.Option("--list", callback=_show_names, is_eager=True, help="Show known models and hardware.")
    ] = False,
) -> None:
    """Say what a ladder of memories would do for a load on a machine: which tiers are worth having, or none."""
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: its folder does not exist: make it first")
    weights_nbytes = parse_nbytes(weights, "--weights") if weights is not None else None
    if weights_nbytes == 0:
        raise ConfigError("--weights 0: give the size of the weights, e.g. 140GB")
    planned = load_model(model, kv_dtype=kv_dtype_of(kv_dtype), weights_nbytes=weights_nbytes)
    machine = load_machine(hardware)
    if bench is not None:
        machine = with_bench(machine, _read_json(bench), str(bench))
    load = _workload(context, concurrency, reuse, ttft, tpot, trace, output, returns)
    plan = make_plan(planned, machine, load, _parallel(machine, planned, load.context_tokens, tp, pp))
    other = None
    if against is not None:
        other = make_plan(planned, load_machine(against, "--against"), load)
    sides = (side_of(plan), side_of(other)) if other is not None else None
    if html is not None:
        _write(html, plan_html(plan, other))
    if as_json:
        print_json(plan_json(plan, against=sides, explain=explain))
        return
    show_plan(plan)
    if sides is not None:
        show_sides(*sides)
    if explain:
        show_steps(plan)


def _parallel(machine: Machine, model: Model, tokens: int, tp: int | None, pp: int) -> Parallel:
    for option, value in (("--tp", tp), ("--pp", pp)):
        if value is not None and not 1 <= value <= 65_536:
            raise ConfigError(f"{option} {value}: give a whole number of at least 1")
    return default_parallel(model, machine, tokens, pp) if tp is None else Parallel(tp, pp)


def _workload(
    context: str | None,
    concurrency: int,
    reuse: str | None,
    ttft: str | None,
    tpot: str | None,
    trace: Path | None,
    output: str | None,
    returns: str | None,
) -> Workload:
    profile: TraceProfile | None = None
    if trace is not None:
        with stderr.status("reading the trace"):
            profile = profile_trace(lambda: read_trace(trace), str(trace))
    answer = parse_tokens(output, "--output") if output is not None else None
    if answer is None:
        answer = max(1, round(profile.output_mean)) if profile is not None else _DEFAULT_OUTPUT
    if context is not None:
        tokens = parse_tokens(context, "--context")
    elif profile is not None:
        tokens = profile.context_p90 + answer
    else:
        raise ConfigError("--context: missing: give the tokens of a sequence at its longest, e.g. 32k, or --trace FILE")
    if output is None:
        answer = min(answer, max(1, tokens // 2))  # a short context has a short answer
    found = parse_share(reuse, "--reuse") if reuse is not None else profile.reuse if profile is not None else 0.0
    return Workload(
        tokens,
        concurrency,
        answer,
        found,
        parse_duration(returns, "--return") if returns is not None else RETURN_S,
        parse_duration(ttft, "--ttft") if ttft is not None else None,
        parse_duration(tpot, "--tpot") if tpot is not None else None,
        profile,
    )


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--bench {path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--bench {path}: no JSON object: give what `kvterrace bench store --json FILE` wrote")
    return data


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}: give another place") from error
