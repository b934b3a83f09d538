"""Twenty prompts with one answer each: computed without a connector, computed and saved, from DRAM, and from SSD after
a restart. Greedy, float32; the answers must be the same tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm.engines import BLOCK, Child, prompt
from benchmarks.vllm.sizes import Sizes

from kvterrace.demo.story import drop_page_cache

ANSWER_TOKENS = 16
POOL = {"max_model_len": 1024, "kv_cache_memory_bytes": 80_000_000}  # 1,700 tokens: no more than two or three prompts


def prompts(sizes: Sizes) -> list[list[int]]:
    """Of 400 to 780 tokens; half of them begin as the one before does."""
    found: list[list[int]] = []
    for number in range(sizes.same_prompts):
        own = prompt(700 + number, 400 + 20 * number % 400)
        found.append(found[-1][:320] + own[:160] if number % 2 else own)
    return found


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    asked, wrong = prompts(sizes), list[str]()
    loaded: dict[str, int] = {}

    def compare(name: str, engine: Child) -> None:
        cached = 0
        for number, (tokens, right) in enumerate(zip(asked, want, strict=True)):
            found = engine.ask(tokens, tokens=ANSWER_TOKENS)
            cached += found["cached"][0]
            if found["tokens"][0] != right:
                wrong.append(f"{name}: prompt {number}: {found['tokens'][0]} after {right}")
        loaded[name] = cached
        say(f"  {name}: {len(asked)} answers, {cached} tokens not computed")

    with Child(None, **POOL) as engine:
        want = [engine.ask(tokens, tokens=ANSWER_TOKENS)["tokens"][0] for tokens in asked]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
        extra = {"path": f"{work}/kv", "dram_bytes": "1GiB", "ssd_bytes": "2GiB"}
        with Child(extra, **POOL) as engine:
            compare("computed and saved", engine)
            engine.order("reset")
            compare("DRAM", engine)
        drop_page_cache(Path(work))
        with Child(extra, **POOL) as engine:
            compare("SSD after a restart", engine)
    whole = sum((len(tokens) - 1) // BLOCK * BLOCK for tokens in asked)
    if loaded["SSD after a restart"] != whole:
        wrong.append(f"{loaded['SSD after a restart']} of {whole} tokens came from the store after a restart")
    return {"prompts": len(asked), "tokens_not_computed": loaded, "whole_blocks_tokens": whole, "wrong": wrong}
