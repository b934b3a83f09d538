"""What the connector adds to each step of vLLM: CPU time of both halves, without an engine.

The scheduler's half: requests of 32,000 tokens in blocks of 16, all running, one new token each a step; and waiting
ones that are looked up again at each step; then a step in which every running request fills a block.

The worker's half: a step that saves one block (small ones, so that copying is nothing), by the length of the chain that
it hangs on. Work is to go by new blocks, not by the chain.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks.vllm.sizes import FULL, Sizes

from kvterrace import open_store
from kvterrace.integrations.vllm.messages import Handshake, SaveJob, StepPlan
from kvterrace.integrations.vllm.pages import Pages
from kvterrace.integrations.vllm.scheduler_side import SchedulerSide
from kvterrace.integrations.vllm.worker_side import WorkerSide
from kvterrace.keys import Namespace
from kvterrace.layout import KVLayout

BLOCK, TOKENS, STEPS = 16, 32_000, 200


class Nothing:
    """A look-up that finds half of every chain, at once."""

    def ask(self, request_id: str, epoch: str, made_in: bytes, keys: bytes) -> tuple[int, int]:  # noqa: ARG002
        return len(keys) // 64, 0

    def forget(self, request_id: str) -> None: ...
    def close(self) -> None: ...


def request(number: int) -> Any:
    tokens = [(number * 7919 + at) % 50_000 for at in range(TOKENS + STEPS)]
    return SimpleNamespace(
        request_id=str(number), lora_request=None, mm_features=[], cache_salt=None, prompt_embeds=None, resumable=False,
        skip_reading_prefix_cache=False, num_tokens=TOKENS, num_computed_tokens=TOKENS - 1, all_token_ids=tokens,
    )  # fmt: skip


def measure(say: Callable[[str], None], sizes: Sizes, running: int = 256, waiting: int = 64) -> dict[str, float]:  # noqa: ARG001
    layout = KVLayout(layers=32, kv_heads=8, head_dim=256, dtype="bfloat16", block_tokens=BLOCK, parts_per_layer=1)
    side = SchedulerSide(BLOCK)
    side.connect({(0, 0): Handshake(Namespace("weights", layout), 0, "", "")}, Nothing())
    rows = list(range(TOKENS // BLOCK + STEPS))
    state = SimpleNamespace(get_block_ids=lambda _: (rows,))
    active, queued = [request(number) for number in range(running)], [request(-1 - number) for number in range(waiting)]
    began_s = time.process_time()
    for one in active + queued:
        side.match(one, 0)
    first_s = (time.process_time() - began_s) / (running + waiting)
    scheduled = {one.request_id: 1 for one in active}
    plain, filling = [], []
    for _ in range(STEPS):
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=running, kv_connector_block_state=state
        )
        began_s = time.process_time()
        for one in queued:
            side.match(one, 0)
        plan = side.plan(output)
        elapsed_s = time.process_time() - began_s
        (filling if plan.saves else plain).append(elapsed_s)
        for one in active:
            one.num_computed_tokens += 1
            one.num_tokens += 1
    return {
        "running": running, "waiting": waiting, "tokens": TOKENS, "block_tokens": BLOCK,
        "first_look_up_ms": 1e3 * first_s,
        "step_ms": 1e3 * statistics.median(plain),
        "step_in_which_all_fill_a_block_ms": 1e3 * statistics.median(filling),
        **{f"save_behind_{chain}_blocks_ms": save_ms(chain) for chain in (1, 500, 2000, 8000)},
    }  # fmt: skip


def save_ms(chain: int) -> float:
    """CPU time of the engine's thread for a step that saves one block behind `chain` others."""
    layout = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK, parts_per_layer=1)
    space = Namespace("weights", layout)
    pool = tuple(np.zeros((chain + STEPS, nbytes), np.uint8) for nbytes in layout.part_nbytes)
    keys = os.urandom(32 * (chain + STEPS))
    with tempfile.TemporaryDirectory() as work:
        side = WorkerSide(open_store(work, dram_bytes="256MiB", ssd_bytes="1GiB"), space, Pages(pool, ""))

        def step(start: int, stop: int) -> float:
            plan = StepPlan("", space.digest, 1, keys={"one": (start, keys[32 * start : 32 * stop])})
            plan.saves.append(SaveJob("one", start, list(range(start, stop))))
            began_s = time.thread_time()
            side.begin(plan)
            side.save()
            side.end()
            assert side.report() is not None
            return time.thread_time() - began_s

        step(0, chain)
        found = [step(chain + at, chain + at + 1) for at in range(STEPS)]
        assert side.counts.blocks["saved"] == chain + STEPS
        side.close(30.0)
    return 1e3 * statistics.median(found)


if __name__ == "__main__":
    import json

    print(json.dumps(measure(print, FULL), indent=1))
