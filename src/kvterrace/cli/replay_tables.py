"""Tables of `kvterrace replay`."""

from __future__ import annotations

import itertools

from kvterrace.cli.console import human_nbytes
from kvterrace.cli.tables import count, safe, stdout, table
from kvterrace.sim.outcome import CostModel
from kvterrace.sim.run import Run

__all__ = ["show"]


def show(runs: list[Run], costs: CostModel) -> None:
    """Print a table for each trace and ladder, a row for each policy."""
    out = stdout()
    for _, group in itertools.groupby(runs, key=lambda run: (id(run.trace), run.ladder)):
        same = list(group)
        trace, first = same[0].trace, same[0].outcome
        nbytes = costs.nbytes(trace.block_tokens)
        out.print(
            f"{safe(trace.path.name)}: {count(len(trace), 'request')}, {count(len(trace.ids), 'block')} of "
            f"{trace.block_tokens} tokens ({human_nbytes(nbytes)}), {trace.distinct:,} different"
        )
        rooms = [f"DRAM {first.dram_blocks:,} blocks, {human_nbytes(first.dram_blocks * nbytes)}"]
        if first.ssd_blocks:
            rooms.append(f"SSD {first.ssd_blocks:,} blocks, {human_nbytes(first.ssd_blocks * nbytes)}")
        rows = table(
            f"{safe(same[0].ladder.text)}: {'; '.join(rooms)}",
            "policy",
            ">hit %",
            ">DRAM %",
            ">SSD %",
            ">token %",
            ">new %",
            ">dropped %",
            ">behind %",
            ">up",
            ">down",
            ">left",
            ">written",
            ">w/r",
            ">saved s",
            ">saved %",
        )
        rows.columns[0].no_wrap = True
        for run in same:
            rows.add_row(*_cells(run))
        out.print(rows)
    out.print(
        "%: of block accesses; token %: of prompt tokens. Misses: new, dropped before, or behind one that is missing. "
        "In blocks: up, down, left the ladder, written to the SSD; w/r: written for each one read."
    )
    out.print(
        f"saved: accelerator time, at {costs.token_us:g} us a token + {costs.attention_us:g} us for each 1,000 before "
        f"it, DRAM {costs.dram_gb_per_s:g} GB/s, SSD {costs.ssd_gb_per_s:g} GB/s"
    )


def _cells(run: Run) -> list[str]:
    outcome, saving = run.outcome, run.saving
    ratio = outcome.written_per_read

    def share(blocks: int) -> str:
        return f"{100 * blocks / outcome.blocks:.1f}"

    def number(blocks: int | None) -> str:
        return "" if blocks is None else f"{blocks:,}"

    return [
        outcome.policy,
        share(outcome.hits),
        share(outcome.dram_hits),
        share(outcome.ssd_hits) if outcome.ssd_blocks else "",
        f"{100 * outcome.token_hit_ratio:.1f}",
        share(outcome.missed_new),
        share(outcome.missed_dropped),
        share(outcome.missed_behind),
        number(outcome.moved_up) if outcome.ssd_blocks else "",
        number(outcome.moved_down) if outcome.ssd_blocks else "",
        number(outcome.dropped),
        number(outcome.ssd_written) if outcome.ssd_blocks else "",
        "" if ratio is None else f"{ratio:.2f}",
        f"{saving.saved_s:,.0f}",
        f"{100 * saving.saved_share:.1f}",
    ]
