"""`kvterrace replay`."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvterrace import __version__
from kvterrace.cli.console import stderr
from kvterrace.cli.plot import plot_runs, require_matplotlib
from kvterrace.cli.replay_tables import show
from kvterrace.cli.tables import print_json
from kvterrace.errors import ConfigError
from kvterrace.sim.columns import TraceColumns, load_trace
from kvterrace.sim.hinted import WRONG_SHARE, said_in
from kvterrace.sim.outcome import CostModel
from kvterrace.sim.replay import POLICIES, PRODUCTION, replay
from kvterrace.sim.run import Run
from kvterrace.sim.sizes import LadderSize, parse_ladder

__all__ = ["SCHEMA", "command"]

#: Name and version of what `--json` prints; see docs/reference/replay.md.
SCHEMA = "kvterrace.replay/1"
_TIERS = ("dram=5%,ssd=30%",)
#: DRAM alone, as far as the published tables go.
_SWEEP = ("dram=1%", "dram=2%", "dram=5%", "dram=10%", "dram=20%", "dram=50%")
_COSTS = CostModel()


class Hints(enum.StrEnum):
    """What a client says."""

    NONE = "none"
    RIGHT = "right"
    WRONG = "wrong"


_WRONG = {Hints.RIGHT: 0.0, Hints.WRONG: WRONG_SHARE}


def command(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Trace files, or folders that stores recorded to.")
    ],
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LADDER",
            help="dram=SIZE[,ssd=SIZE]; SIZE is 5% of the trace's different blocks, 1000 (blocks) or 20GiB. Give it "
            "again for more ladders. dram=5%,ssd=30% if not given; with --plot, DRAM alone from 1% to 50%.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"all, or of: {', '.join(POLICIES)}. Give it again for more. default if not given; with --plot, all.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hits against capacity (.png, .svg, .pdf).", dir_okay=False)
    ] = None,
    hints: Annotated[
        Hints,
        typer.Option(
            help="Tell default and lru what a client could, by why answers ended: right, or wrong three times of ten.",
        ),
    ] = Hints.NONE,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Replay blocks of so many tokens, a multiple of the trace's.", show_default=False
        ),
    ] = None,
    block_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Bytes of a block; 131,072 for each token if not given.", show_default=False
        ),
    ] = None,
    dram_gb_per_s: Annotated[float, typer.Option(metavar="X", help="DRAM to accelerator.")] = _COSTS.dram_gb_per_s,
    ssd_gb_per_s: Annotated[float, typer.Option(metavar="X", help="SSD to accelerator.")] = _COSTS.ssd_gb_per_s,
    token_us: Annotated[
        float, typer.Option(metavar="X", help="Recomputing a token, without attention.")
    ] = _COSTS.token_us,
    attention_us: Annotated[
        float, typer.Option(metavar="X", help="More for each 1,000 tokens before it.")
    ] = _COSTS.attention_us,
) -> None:
    """Replay request traces against ladders and policies, moving no bytes: hits, misses, writes, time saved."""
    if plot is not None:
        require_matplotlib(plot)
    names = _policies(policy or (["all"] if plot is not None else ["default"]))
    ladders = [parse_ladder(text) for text in tiers or (_SWEEP if plot is not None else _TIERS)]
    costs = CostModel(block_bytes, dram_gb_per_s, ssd_gb_per_s, token_us, attention_us)
    if hints is not Hints.NONE and not set(names) <= set(PRODUCTION):
        raise ConfigError(f"--hints: only {' and '.join(PRODUCTION)} take hints; give --policy")
    runs: list[Run] = []
    with _bar() as bar:
        loaded = [_load(path, block_tokens, bar) for path in traces]
        plans = [_plan(trace, ladder, costs) for trace, ladder in itertools.product(loaded, ladders)]
        task = bar.add_task("", total=sum(len(trace) for trace, *_ in plans) * len(names))
        for (trace, ladder, dram, ssd), name in itertools.product(plans, names):
            bar.update(task, description=f"{trace.path.name} {ladder.text} {name}")
            began_s = time.monotonic()
            said = () if hints is Hints.NONE else said_in(trace, wrong_share=_WRONG[hints])
            outcome = replay(trace, name, dram, ssd, on_step=lambda step: bar.advance(task, step), hints=said)
            runs.append(Run(trace, ladder, outcome, outcome.saving(costs), time.monotonic() - began_s))
    if plot is not None:
        plot_runs(runs, plot)
    if as_json:
        print_json(_runs_json(loaded, runs, costs, hints))
    else:
        show(runs, costs)


def _policies(asked: list[str]) -> list[str]:
    names: list[str] = []
    for name in ",".join(asked).split(","):
        if name.strip() not in ("all", *POLICIES):
            raise ConfigError(f"--policy {name}: no such policy; there are all, {', '.join(POLICIES)}")
        names += POLICIES if name.strip() == "all" else [name.strip()]
    return list(dict.fromkeys(names))


@contextmanager
def _bar() -> Iterator[Progress]:
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with bar:
        yield bar


def _load(path: Path, block_tokens: int | None, bar: Progress) -> TraceColumns:
    task = bar.add_task(f"reading {path.name}", total=None)
    trace = load_trace(path, block_tokens=block_tokens, on_read=lambda count: bar.update(task, completed=count))
    bar.remove_task(task)
    return trace


def _plan(trace: TraceColumns, ladder: LadderSize, costs: CostModel) -> tuple[TraceColumns, LadderSize, int, int]:
    return (trace, ladder, *ladder.blocks_of(trace.distinct, costs.nbytes(trace.block_tokens)))


def _runs_json(loaded: list[TraceColumns], runs: list[Run], costs: CostModel, hints: Hints) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "kvterrace": __version__,
        "costs": asdict(costs),
        "hints": hints.value,
        "traces": [_trace_json(trace, costs) for trace in loaded],
        "runs": [_run_json(run, loaded, costs) for run in runs],
    }


def _trace_json(trace: TraceColumns, costs: CostModel) -> dict[str, object]:
    return {
        "path": str(trace.path),
        "requests": len(trace),
        "blocks": len(trace.ids),
        "distinct_blocks": trace.distinct,
        "tokens": int(trace.tokens.sum(dtype="int64")),
        "block_tokens": trace.block_tokens,
        "block_nbytes": costs.nbytes(trace.block_tokens),
        "duration_s": float(trace.at_s[-1] - trace.at_s[0]),
    }


def _run_json(run: Run, loaded: list[TraceColumns], costs: CostModel) -> dict[str, object]:
    outcome, saving = run.outcome, run.saving
    nbytes = costs.nbytes(outcome.block_tokens)
    return {
        "trace": loaded.index(run.trace),
        "tiers": run.ladder.text,
        "policy": outcome.policy,
        "dram_blocks": outcome.dram_blocks,
        "ssd_blocks": outcome.ssd_blocks,
        "hits": {
            "dram_blocks": outcome.dram_hits,
            "ssd_blocks": outcome.ssd_hits,
            "dram_tokens": outcome.dram_hit_tokens,
            "ssd_tokens": outcome.ssd_hit_tokens,
            "block_ratio": outcome.hit_ratio,
            "token_ratio": outcome.token_hit_ratio,
        },
        "misses": {
            "new_blocks": outcome.missed_new,
            "dropped_blocks": outcome.missed_dropped,
            "behind_blocks": outcome.missed_behind,
        },
        "moves": {
            "up_blocks": outcome.moved_up,
            "down_blocks": outcome.moved_down,
            "dropped_blocks": outcome.dropped,
            "ssd_written_nbytes": outcome.ssd_written * nbytes,
            "ssd_read_nbytes": outcome.ssd_hits * nbytes,
            "written_per_read": outcome.written_per_read,
        },
        "time": {**asdict(saving), "saved_s": saving.saved_s, "saved_share": saving.saved_share},
        "elapsed_s": run.elapsed_s,
    }
