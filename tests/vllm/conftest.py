"""These tests need vLLM, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path

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


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, object]:
    return {"path": str(tmp_path / "kv"), "dram_bytes": "1MiB", "ssd_bytes": "16MiB"}
