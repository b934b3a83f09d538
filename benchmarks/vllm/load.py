"""Throughput and time to first token at concurrency 1, 4, 8 and 16, with and without kvterrace.

Prompts are documents of skewed lengths and skewed popularity, with a question each. The documents together are several
times the engine's pool of KV. Every engine answers the same prompts in the same order. Answers that differ are counted:
where several run at once, a batch of another shape may round the other way near a tie.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm.engines import Child, prompt
from benchmarks.vllm.sizes import Sizes

DOCUMENTS, QUESTION_TOKENS, ANSWER_TOKENS = 12, 24, 8
POOL = {"max_model_len": 1280, "kv_cache_memory_bytes": 110_000_000, "max_num_seqs": 16}  # 2,400 tokens


def prompts(requests: int, seed: int) -> list[list[int]]:
    """Documents of 200 to 1,100 tokens (twelve of them, 6,500 in all), the first ones asked for most."""
    chance = random.Random(seed)
    lengths = [round(1100 * (1 - number / DOCUMENTS) ** 1.5) + 200 for number in range(DOCUMENTS)]
    chance.shuffle(lengths)
    weights = [1 / (number + 1) for number in range(DOCUMENTS)]
    picked = chance.choices(range(DOCUMENTS), weights, k=requests)
    return [
        prompt(500 + document, min(1100, lengths[document])) + prompt(10_000 * seed + number, QUESTION_TOKENS)
        for number, document in enumerate(picked)
    ]


def summary(found: dict[str, Any], asked: list[list[int]]) -> dict[str, float]:
    times = sorted(found["first_s"])
    return {
        "seconds": found["elapsed_s"],
        "prompt_tokens_s": sum(map(len, asked)) / found["elapsed_s"],
        "ttft_p50_s": statistics.median(times),
        "ttft_p99_s": times[min(len(times) - 1, round(0.99 * len(times)))],
    }


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    differ: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
        extra = {"path": f"{work}/kv", "dram_bytes": "128MiB", "ssd_bytes": "2GiB"}
        answers: dict[int, list[list[int]]] = {}
        for name, connector in (("without", None), ("kvterrace", extra)):
            with Child(connector, **POOL) as engine:
                engine.ask(prompt(99, 64), tokens=2)
                for concurrency in sizes.concurrency:
                    asked = prompts(sizes.requests, seed=concurrency)
                    found = engine.order("load", prompts=asked, tokens=ANSWER_TOKENS, concurrency=concurrency)
                    figures[f"{name}, {concurrency} at once"] = summary(found, asked)
                    say(f"  {name}, {concurrency} at once: {figures[f'{name}, {concurrency} at once']}")
                    pairs = zip(answers.setdefault(concurrency, found["tokens"]), found["tokens"], strict=True)
                    differ[f"{concurrency} at once"] = sum(one != other for one, other in pairs)
                if connector is not None:
                    figures["counts"] = engine.metrics
    return {
        "figures": figures,
        "answers that differ": differ,
    }
