"""These tests need vLLM, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

collect_ignore: list[str] = []
try:
    import vllm  # noqa: F401
except ImportError:
    collect_ignore += [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.vllm.machine import model_folder

    return model_folder(tmp_path / "model")


@pytest.fixture(scope="session")
def want() -> list[list[int]]:
    """Answers of a real engine without a connector to `engines.PROMPTS`."""
    from tests.vllm.engines import PROMPTS, Child

    from kvterrace.demo.model import convert

    convert()
    with Child(None) as engine:
        found: list[list[int]] = [engine.ask(one)["tokens"][0] for one in PROMPTS]
        return found


@pytest.fixture
def room(tmp_path: Path) -> dict[str, Any]:
    """For a real engine, with 80 blocks in DRAM."""
    return {"path": str(tmp_path / "kv"), "dram_bytes": "128MiB", "ssd_bytes": "1GiB"}


@pytest.fixture(scope="session")
def two_prompts(tmp_path_factory: pytest.TempPathFactory, want: list[list[int]]) -> Path:
    """A store that a real engine has filled with the first two prompts; only to be copied."""
    from tests.vllm.engines import PROMPTS, Child

    path = tmp_path_factory.mktemp("filled") / "kv"
    with Child({"path": str(path), "dram_bytes": "128MiB", "ssd_bytes": "1GiB"}) as engine:
        assert engine.ask(PROMPTS[0])["tokens"] == [want[0]]
        assert engine.ask(PROMPTS[1])["tokens"] == [want[1]]
    return path


@pytest.fixture
def filled(room: dict[str, Any], two_prompts: Path) -> dict[str, Any]:
    """A copy of that store, of this test."""
    shutil.copytree(two_prompts, room["path"])
    return room


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, object]:
    return {"path": str(tmp_path / "kv"), "dram_bytes": "1MiB", "ssd_bytes": "16MiB"}
