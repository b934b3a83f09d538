"""Real vLLM engines on a small real model, each in a process of its own, so that a restart is one."""

from __future__ import annotations

from benchmarks.vllm import engines
from benchmarks.vllm.engines import BLOCK, ENVIRONMENT, MODEL, prompt, transfer_config

__all__ = ["BLOCK", "ENVIRONMENT", "MODEL", "PROMPTS", "WHOLE", "Child", "prompt", "transfer_config"]


class Child(engines.Child):
    """One that can also be made to fail, see `engine_child`."""

    module = "tests.vllm.engine_child"


#: 1,000 tokens: 31 whole blocks of 32, and 8 tokens. The last two share 20 blocks.
PROMPTS = [prompt(1), prompt(2), prompt(3), prompt(4), prompt(4)[:640] + prompt(5, 360)]
WHOLE = 31 * BLOCK
