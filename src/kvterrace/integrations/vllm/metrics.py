"""Counts of both halves, and how vLLM logs them and hands them to Prometheus.

vLLM adds up what the workers and the scheduler have counted since it asked last. Names begin with `vllm:`, as
`LLM.get_metrics` shows no others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["PromMetrics", "SchedulerCounts", "Stats", "WorkerCounts"]

#: Fates of a block, as the label `fate` has them.
FATES = {
    "dram": "loaded from DRAM",
    "ssd": "loaded from SSD and verified",
    "saved": "taken by the store",
    "present": "to be saved, and there already",
    "unsaved": "found no room; handed over again while its request runs",
    "stuck": "not copied within seconds, and given up; handed over again",
    "dropped": "made room for others, or the only copy was where no room or no drive was left",
    "lost": "ended with its request before it was taken",
    "miss": "gone between the look-up and the load",
    "corrupt": "read, and not what was written",
    "stale": "read, and of another use of its place",
    "failed": "the drive answered with an error",
    "expired": "not there by the deadline",
    "busy": "no room in DRAM to read it into",
    "rejected": "not taken by the store",
    "match_error": "look-ups that the store could not answer",
    "load_error": "loads that the store did not take",
    "save_error": "saves that the store did not take",
}
_LATENCY_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(slots=True)
class WorkerCounts:
    """What a worker did since it was asked last. `blocks` by fate; `load_s` has the seconds of each load, `save_s`
    those that saving held up each step.
    """

    blocks: Counter[str] = field(default_factory=Counter)
    loaded_nbytes: int = 0
    saved_nbytes: int = 0
    write_failures: int = 0
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def take(self) -> dict[str, Any]:
        """The counts as plain data; they begin anew."""
        data: dict[str, Any] = {f"blocks.{fate}": count for fate, count in self.blocks.items() if count}
        data |= {"loaded_nbytes": self.loaded_nbytes, "saved_nbytes": self.saved_nbytes}
        data["write_failures"] = self.write_failures
        data |= {"save_s": self.save_s, "load_s": self.load_s}
        self.blocks, self.save_s, self.load_s = Counter(), [], []
        self.loaded_nbytes = self.saved_nbytes = self.write_failures = 0
        return {key: value for key, value in data.items() if value}


@dataclass(slots=True)
class SchedulerCounts:
    """What the scheduler's half did since it was asked last, in tokens; and whole blocks that ended with their request
    before they were taken.
    """

    queried: int = 0
    hit_dram: int = 0
    hit_ssd: int = 0
    cheaper_computed: int = 0
    lost_blocks: int = 0

    def take(self) -> dict[str, Any]:
        """The counts as plain data; they begin anew."""
        data: dict[str, int] = {
            "tokens.queried": self.queried,
            "tokens.dram": self.hit_dram,
            "tokens.ssd": self.hit_ssd,
            "tokens.cheaper_computed": self.cheaper_computed,
            "blocks.lost": self.lost_blocks,
        }
        self.queried = self.hit_dram = self.hit_ssd = self.cheaper_computed = self.lost_blocks = 0
        return {key: value for key, value in data.items() if value}


@dataclass
class Stats(KVConnectorStats):
    """Counts on their way to vLLM's loggers: `data` holds numbers, which add up, and lists, which are joined."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: lists by their number and mean."""
        found: dict[str, int | float] = {}
        for key, value in sorted(self.data.items()):
            if isinstance(value, list):
                found[f"{key} (count)"] = len(value)
                found[f"{key} (mean)"] = round(sum(value) / len(value), 4) if value else 0.0
            else:
                found[key] = round(value, 4)
        return found

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = list(labelnames)
        self._labels = {engine: list(values) for engine, values in per_engine_labelvalues.items()}
        self._blocks = self._counter_cls(
            name="vllm:kvterrace_blocks", documentation=f"Blocks by fate: {FATES}", labelnames=[*names, "fate"]
        )
        self._tokens = self._counter_cls(
            name="vllm:kvterrace_tokens",
            documentation="Prompt tokens: queried, hit in dram, hit on ssd, or found but cheaper_computed",
            labelnames=[*names, "kind"],
        )
        self._nbytes = self._counter_cls(
            name="vllm:kvterrace_bytes", documentation="Bytes of KV loaded and saved", labelnames=[*names, "way"]
        )
        self._write_failures = self._counter_cls(
            name="vllm:kvterrace_write_failures", documentation="Writes that a drive has refused", labelnames=names
        )
        self._save_s = self._histogram_cls(
            name="vllm:kvterrace_save_seconds",
            documentation="Seconds that saving has held up a step that filled blocks",
            buckets=_LATENCY_BUCKETS,
            labelnames=names,
        )
        self._load_s = self._histogram_cls(
            name="vllm:kvterrace_load_seconds",
            documentation="Seconds from the start of a load to its end, by request",
            buckets=_LATENCY_BUCKETS,
            labelnames=names,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self._labels[engine_idx]
        for key, value in transfer_stats_data.items():
            kind, _, name = key.partition(".")
            if kind == "blocks":
                self._blocks.labels(*labels, name).inc(value)
            elif kind == "tokens":
                self._tokens.labels(*labels, name).inc(value)
            elif key in ("loaded_nbytes", "saved_nbytes"):
                self._nbytes.labels(*labels, key.removesuffix("_nbytes")).inc(value)
            elif key == "write_failures":
                self._write_failures.labels(*labels).inc(value)
            elif key in ("load_s", "save_s"):
                histogram = self._load_s if key == "load_s" else self._save_s
                for elapsed_s in value:
                    histogram.labels(*labels).observe(elapsed_s)
