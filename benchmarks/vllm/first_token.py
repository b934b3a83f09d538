"""Time to first token of a shared prefix of 4,000 tokens: recomputed, from DRAM, from SSD after a restart of the
engine, and beside it vLLM's own prefix hit and its tiers of CPU memory and files.

Each engine is a process of its own. The prefix is asked for with another question each time, of 40 tokens; before each
restart the page cache is dropped. All answers of one question must be the same tokens.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm.engines import Child, prompt
from benchmarks.vllm.sizes import Sizes

from kvterrace.demo.story import drop_page_cache

QUESTION_TOKENS, ANSWER_TOKENS = 40, 8
POOL = {"max_model_len": 4224, "kv_cache_memory_bytes": 440_000_000}  # 9,500 tokens: two such prompts


def question(prefix: int, number: int, tokens: int) -> list[int]:
    return prompt(prefix, tokens) + prompt(1000 * prefix + number, QUESTION_TOKENS)


class Case:
    """Answers and times by (prefix, question)."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.wrong: list[str] = []

    def tokens(self, prefix: int, number: int) -> list[int]:
        return question(prefix, number, self.sizes.prefix_tokens)

    def ask(self, engine: Child, prefix: int, number: int, name: str) -> float:
        """Seconds to the first token; then the whole answer, from the KV that is in the pool now, is compared with that
        of others.
        """
        tokens = self.tokens(prefix, number)
        first = engine.ask(tokens, tokens=1)
        key = (prefix, number)
        found = engine.ask(tokens, tokens=ANSWER_TOKENS)["tokens"][0]
        if self.answers.setdefault(key, found) != found:
            self.wrong.append(f"{name}: prefix {prefix}, question {number}: {found} after {self.answers[key]}")
        return float(first["elapsed_s"])


def warm(engine: Child) -> None:
    """What an engine does once is not the prefix's."""
    engine.ask(prompt(99, 64), tokens=2)


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    prefixes = sizes.prefixes
    case, times = Case(sizes), dict[str, list[float]]()

    def took(name: str, elapsed_s: float) -> None:
        times.setdefault(name, []).append(elapsed_s)
        say(f"  {name}: {elapsed_s:.3f} s")

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
        say("without a connector")
        with Child(None, **POOL) as engine:
            warm(engine)
            for prefix in range(prefixes):
                took("recomputed", case.ask(engine, prefix, 0, "recomputed"))
                for number in range(1, sizes.questions):
                    took("in-engine hit", case.ask(engine, prefix, number, "in-engine hit"))
        extra = {"path": f"{work}/kv", "dram_bytes": "768MiB", "ssd_bytes": "4GiB"}
        say("kvterrace, first engine")
        with Child(extra, **POOL) as engine:
            warm(engine)
            for prefix in range(prefixes):
                took("computed and saved", case.ask(engine, prefix, 0, "computed and saved"))
            for number in range(1, sizes.questions):
                for prefix in range(prefixes):
                    engine.order("reset")
                    took("kvterrace DRAM", case.ask(engine, prefix, number, "kvterrace DRAM"))
            first_counts = engine.metrics
        say("kvterrace, restarted")
        dropped = drop_page_cache(Path(work))
        with Child(extra, **POOL) as engine:
            warm(engine)
            for prefix in range(prefixes):
                took("kvterrace SSD", case.ask(engine, prefix, 1, "kvterrace SSD"))
            counts = engine.metrics
        say("vLLM's tiers")
        with tiers(work) as engine:
            warm(engine)
            for prefix in range(prefixes):
                took("tiers: computed and saved", case.ask(engine, prefix, 0, "tiers: computed and saved"))
            engine.ask(prompt(98, 64), tokens=64)  # steps in which what was stored is written on
        drop_page_cache(Path(work))
        with tiers(work) as engine:
            warm(engine)
            for prefix in range(prefixes):
                took("tiers: files", case.ask(engine, prefix, 1, "tiers: files"))
                engine.order("reset")
                took("tiers: CPU memory", case.ask(engine, prefix, 2, "tiers: CPU memory"))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "prefix_tokens": sizes.prefix_tokens,
        "page_cache": dropped,
        "seconds": times,
        "median_s": medians,
        "ratios": {
            "recomputed / kvterrace SSD": medians["recomputed"] / medians["kvterrace SSD"],
            "kvterrace SSD / in-engine hit": medians["kvterrace SSD"] / medians["in-engine hit"],
            "kvterrace SSD / tiers: files": medians["kvterrace SSD"] / medians["tiers: files"],
        },
        "counts": {"first": first_counts, "restarted": counts},
        "wrong": case.wrong,
    }


def tiers(work: str) -> Child:
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpuSpec",
            "spec_module_path": "benchmarks.vllm.tiering_on_cpu",
            "cpu_bytes_to_use": 768 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": f"{work}/tiers"}],
        },
    }
    return Child(None, kv_transfer_config=config, **POOL)
