"""Hits against capacity, as a picture. Needs matplotlib (extra `plot`) only when something is drawn."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

from kvterrace.errors import ConfigError
from kvterrace.sim.run import Run

__all__ = ["plot_runs", "require_matplotlib"]

_SUFFIXES = (".png", ".svg", ".pdf")
#: Of Okabe and Ito, told apart with any colour vision; dashes for the second round.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_DASHES = ("-", "--", ":")


def require_matplotlib(path: Path) -> None:
    """Raises ConfigError: it is not installed, or nothing can be drawn to `path`."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'kvterrace[plot]'") from error
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: give a name that ends in {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: its folder does not exist: make it first")


def plot_runs(runs: list[Run], path: Path) -> None:
    """Draw a panel for each trace, a line for each policy: blocks hit, in % of all, against the room of the ladder, in
    % of the different blocks. Raises ConfigError: `path` cannot be written.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    traces = list(dict.fromkeys(run.trace for run in runs))
    policies = list(dict.fromkeys(run.outcome.policy for run in runs))
    figure, axes = pyplot.subplots(
        1, len(traces), figsize=(1.5 + 5 * len(traces), 4.6), squeeze=False, layout="constrained"
    )
    tiered = any(run.outcome.ssd_blocks for run in runs)
    for axis, trace in zip(axes[0], traces, strict=True):
        ticks: set[float] = set()
        for policy, (dashes, colour) in zip(policies, itertools.product(_DASHES, _COLOURS), strict=False):
            points = sorted(_point(run) for run in runs if run.trace is trace and run.outcome.policy == policy)
            ticks.update(x for x, _ in points)
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.6, "marker": "o", "markersize": 3}
            if policy in ("default", "belady"):
                style |= {"color": "black", "linewidth": 2.4 if policy == "default" else 1.2}
                style["linestyle"] = "-" if policy == "default" else "--"
            axis.plot(*zip(*points, strict=True), label=policy, **style)
        axis.set_xscale("log")
        axis.set_xticks(sorted(ticks), [f"{tick:.3g}" for tick in sorted(ticks)])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, linewidth=0.4, alpha=0.6)
        axis.set_title(trace.path.name.removesuffix(".gz").removesuffix(".jsonl"), fontsize=10)
        axis.set_xlabel(f"{'DRAM and SSD' if tiered else 'DRAM'}, % of the different blocks")
    axes[0][0].set_ylabel("blocks hit, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _point(run: Run) -> tuple[float, float]:
    room = run.outcome.dram_blocks + run.outcome.ssd_blocks
    return 100 * room / run.trace.distinct, 100 * run.outcome.hit_ratio
