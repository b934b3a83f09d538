"""What the connector costs where nothing is ever found again: two engines live side by side, one without it and one
with; each prompt is answered by one and then by the other, in turn first and second, so that what else the machine does
weighs on both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm.engines import Child, prompt
from benchmarks.vllm.sizes import Sizes

PROMPT_TOKENS, ANSWER_TOKENS = 600, 8
POOL = {"max_model_len": 1024, "kv_cache_memory_bytes": 80_000_000}


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"without": [], "kvterrace": []}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
        extra = {"path": f"{work}/kv", "dram_bytes": "256MiB", "ssd_bytes": "2GiB"}
        with Child(None, **POOL) as without, Child(extra, **POOL) as kvterrace:
            engines = [("without", without), ("kvterrace", kvterrace)]
            for _, engine in engines:
                engine.ask(prompt(99, 64), tokens=2)
            for number in range(sizes.pairs):
                answers = []
                for name, engine in engines if number % 2 else reversed(engines):
                    found = engine.ask(prompt(50_000 + number, PROMPT_TOKENS), tokens=ANSWER_TOKENS)
                    seconds[name].append(found["elapsed_s"])
                    answers.append(found["tokens"])
                if answers[0] != answers[1]:
                    wrong.append(f"prompt {number}: {answers}")
            saving_s = kvterrace.metrics["save_seconds_sum"]
    ratios = [one / other for one, other in zip(seconds["kvterrace"], seconds["without"], strict=True)]
    say(f"  kvterrace / without: median {statistics.median(ratios):.3f} of {len(ratios)} pairs")
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "seconds": seconds,
        "kvterrace / without, by pair": sorted(ratios),
        "kvterrace / without, median": statistics.median(ratios),
        "kvterrace / without, of the sums": sum(seconds["kvterrace"]) / sum(seconds["without"]),
        # Within one run, so that what else the machine does weighs less.
        "share of the time that is saving": saving_s / sum(seconds["kvterrace"]),
        "wrong": wrong,
    }
