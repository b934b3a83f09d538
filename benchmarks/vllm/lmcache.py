"""LMCache as vLLM's connector, if it runs here: whether it restores anything, and if not, what it says."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks.vllm.engines import BLOCK, Child, prompt
from benchmarks.vllm.sizes import Sizes

ENVIRONMENT = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": str(BLOCK), "LMCACHE_MAX_LOCAL_CPU_SIZE": "1.0"}


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    if importlib.util.find_spec("lmcache") is None:
        return {"ran": False, "why": "not installed; pip install --no-deps lmcache==0.5.6 beside vLLM to try"}
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    tokens = prompt(1, sizes.prefix_tokens // 4)
    try:
        with Child(None, kv_transfer_config=config, environment=ENVIRONMENT) as engine:
            first = engine.ask(tokens)
            engine.order("reset")
            again = engine.ask(tokens)
        said = engine.said
    except ChildProcessError as error:
        return {"version": metadata.version("lmcache"), "ran": False, "why": str(error)[-600:]}
    errors = re.findall(r"(?:RuntimeError|Error:).*", said)
    ran = again["cached"][0] > 0
    say(f"  restored {again['cached'][0]} tokens; {errors[:1]}")
    return {
        "version": metadata.version("lmcache"),
        "ran": ran,
        "why": "" if ran else "; ".join(sorted(set(errors)))[:600],
        "seconds": [first["elapsed_s"], again["elapsed_s"]],
    }
