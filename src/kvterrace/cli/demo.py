"""`kvterrace demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvterrace.cli.console import human_nbytes, stderr, write_json
from kvterrace.demo.story import tell
from kvterrace.errors import ConfigError

__all__ = ["run"]

_TITLES = {
    "convert": "model",
    "reference": "without kvterrace",
    "first": "with kvterrace",
}


def run(*, tokens: int, store: Path | None, json_file: Path | None) -> bool:
    """Run the demo and show it; whether the answers were those of the run without kvterrace and came from the SSD."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: its folder does not exist: make it first")
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    ) as bar:
        tasks: dict[str, Any] = {}

        def listen(phase: str, stage: str, done: int, total: int) -> None:
            if phase not in tasks:
                for earlier in tasks.values():
                    bar.update(earlier, total=1, completed=1, count="")
                    bar.stop_task(earlier)
                tasks[phase] = bar.add_task("", total=None, count="")
            bar.update(
                tasks[phase],
                description=f"{_TITLES.get(phase, 'a new process')}: {stage}",
                completed=done,
                total=total or None,
                count=f"{done} of {total} tokens" if total else "",
            )

        result = tell(tokens, store, listen)
    good = bool(result["tokens_equal"]) and result["restored_tokens_ssd"] > 0
    _show(result)
    if json_file is not None:
        write_json(json_file, result)
    return good


def _show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['model']}, prefix of {result['prefix_tokens']} tokens, {result['threads']} threads",
        caption=f"of a running server: model in memory, one short pass before the clock starts; computed: best of "
        f"{len(result['ttft_recomputed_chunks_s'] + result['ttft_recomputed_one_pass_s'])}, in chunks and in one pass; "
        f"DRAM: median of {len(result['ttft_dram_all_s'])}; SSD: median of {len(result['ttft_ssd_all_s'])} new "
        "processes",
    )
    table.add_column("prefix comes from")
    table.add_column("time to first token", justify="right")
    table.add_column("faster", justify="right")
    table.add_column("tokens restored", justify="right")
    table.add_row("computed, without kvterrace", f"{result['ttft_recomputed_s']:.2f} s", "", "0")
    table.add_row(
        "DRAM, second question",
        f"{result['ttft_dram_s']:.2f} s",
        f"{result['speedup_dram']:.0f} x",
        str(result["restored_tokens_dram"]),
    )
    table.add_row(
        "SSD, after a restart",
        f"{result['ttft_ssd_s']:.2f} s",
        f"{result['speedup_ssd']:.0f} x",
        str(result["restored_tokens_ssd"]),
    )
    stderr.print(table)
    stderr.print(
        f"tokens {'equal' if result['tokens_equal'] else 'DIFFER'}, logits "
        + ("bit-equal" if result["logits_equal"] else f"within {result['logits_max_abs_diff']:.2g}")
        + f" to the run without kvterrace; {human_nbytes(result['ssd_read_nbytes'])} read from the SSD, "
        f"page cache dropped by {result['page_cache']}; loading the model took {result['model_load_s']:.1f} s more"
    )
