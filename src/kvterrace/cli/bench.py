"""`kvterrace bench store`."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvterrace import __version__
from kvterrace.cli.bench_store import PHASES, BenchResult, Phase, measure, plan_for
from kvterrace.cli.console import human_nbytes, stderr, write_json
from kvterrace.cli.tables import stdout, table
from kvterrace.config import parse_nbytes
from kvterrace.errors import ConfigError
from kvterrace.format import checksum

__all__ = ["SCHEMA", "app"]

#: Name and version of what `--json` writes; see docs/reference/cli.md.
SCHEMA = "kvterrace.bench-store/1"

_WORDS = {
    "put": "put, flush included",
    "raw_write": "  plain pwritev + fdatasync",
    "get_cold": "get from SSD, cold",
    "raw_read": "  plain preadv",
    "get_dram": "get from DRAM",
    "copy": "  plain copy, one thread",
}

app = typer.Typer(help="Measure this machine.", rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Measure this machine."""


@app.command()
def store(
    directory: Annotated[Path, typer.Option("--dir", help="Folder on the drive; left as it was.")] = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.", dir_okay=False)] = None,
    size: Annotated[str, typer.Option(help="KV moved in a round; takes three times as much memory.")] = "512MiB",
    block: Annotated[str, typer.Option(help="Size of a block, a multiple of 64KiB.")] = "2MiB",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds.")] = 3,
) -> None:
    """Put, cold get and DRAM get on a store of its own, each beside the plain drive or a plain copy."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: its folder does not exist: make it first")
    plan = plan_for(parse_nbytes(size, "--size"), parse_nbytes(block, "--block"), rounds, directory)
    with _ended_by_sigterm(), stderr.status("starting") as status:
        result = measure(plan, directory, status.update)
    _show(result)
    if json_file is not None:
        write_json(json_file, _result_json(result))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command by way of every `finally`, so that its files go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(result: BenchResult) -> None:
    plan, out = result.plan, stdout()
    rows = table(
        f"{plan.rounds} rounds of {plan.blocks} blocks of {human_nbytes(plan.block_nbytes)}, "
        f"in batches of {plan.batch_blocks}",
        "",
        ">GB/s",
        ">of plain",
        ">slowest .. fastest",
        ">CPU s/GiB",
        ">batch p50",
        ">batch p99",
    )
    for phase, baseline in PHASES:
        for name in (phase, baseline):
            one = result.phases[name]
            rates = [sample.gb_per_s for sample in one.samples]
            rows.add_row(
                _WORDS[name],
                f"{one.gb_per_s:.2f}",
                f"{100 * result.ratio(phase, baseline):.0f} %" if name == phase else "",
                f"{min(rates):.2f} .. {max(rates):.2f}",
                f"{one.cpu_s_per_gib:.2f}",
                f"{1e3 * one.batch_s(50):.1f} ms",
                f"{1e3 * one.batch_s(99):.1f} ms",
            )
        rows.add_section()
    out.print(rows)
    out.print(
        f"GB/s: 10^9 bytes a second, median of the rounds; p50 and p99: of {result.phases['put'].batches} batches, "
        "without the flush"
    )
    cache = "past the page cache" if result.direct_io else "THROUGH THE PAGE CACHE: this folder refuses O_DIRECT"
    out.print(f"all {human_nbytes(result.verified_nbytes)} that were read equal what was written; drive I/O {cache}")
    if result.other_tier_blocks:
        out.print(f"{result.other_tier_blocks} blocks came from another tier than the one measured")
    if not checksum.hardware():
        out.print("CRC32C runs without the CPU's instruction: about ten times slower")


def _result_json(result: BenchResult) -> dict[str, object]:
    plan = result.plan
    return {
        "schema": SCHEMA,
        "kvterrace": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "crc32c_hardware": checksum.hardware(),
        "direct_io": result.direct_io,
        "block_nbytes": plan.block_nbytes,
        "blocks": plan.blocks,
        "batch_blocks": plan.batch_blocks,
        "rounds": plan.rounds,
        "verified_nbytes": result.verified_nbytes,
        "other_tier_blocks": result.other_tier_blocks,
        "phases": {name: _phase_json(phase) for name, phase in result.phases.items()},
        "ratios": {phase: result.ratio(phase, baseline) for phase, baseline in PHASES},
    }


def _phase_json(phase: Phase) -> dict[str, object]:
    return {
        "gb_per_s": phase.gb_per_s,
        "gb_per_s_by_round": [sample.gb_per_s for sample in phase.samples],
        "elapsed_s_by_round": [sample.elapsed_s for sample in phase.samples],
        "cpu_s_per_gib": phase.cpu_s_per_gib,
        "batches": phase.batches,
        "batch_p50_s": phase.batch_s(50),
        "batch_p99_s": phase.batch_s(99),
    }
