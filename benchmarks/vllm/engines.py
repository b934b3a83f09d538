"""Real vLLM engines on a small real model, each in a process of its own, so that a restart is one."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from kvterrace.demo.model import converted

#: Where the demo's model is made from its GGUF file, by the tests that need it.
MODEL = converted()
BLOCK = 32
ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KVTerraceConnector",
        "kv_connector_module_path": "kvterrace.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Child:
    """An engine with a pool of about 1,700 tokens, so that two prompts of 1,000 do not fit."""

    module = "benchmarks.vllm.child"

    def __init__(
        self, extra: dict[str, Any] | None, *, model: Path | None = None, environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        spec: dict[str, Any] = {
            "model": str(model or MODEL),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1536,
            "kv_cache_memory_bytes": 80_000_000,
            "disable_log_stats": False,
            "environment": {**ENVIRONMENT, **(environment or {})},
            **options,
        }
        if extra is not None:
            spec["kv_transfer_config"] = transfer_config(extra)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT,
        )  # fmt: skip
        self.said = ""  # its whole log, once it has ended
        self.ready_s = self._answer()["ready_s"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                found: dict[str, Any] = json.loads(line[2:])
                return found
        raise ChildProcessError(f"the engine has ended with {self.process.wait()}:\n{self.log[-6000:]}")

    def order(self, do: str, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def ask(
        self, *prompts: Sequence[int], tokens: int = 8, salt: str | None = None, adapter: Path | None = None
    ) -> dict[str, Any]:
        """Greedy answers to prompts given at once; `adapter` is the folder of a LoRA adapter."""
        name = None if adapter is None else str(adapter)
        return self.order("ask", prompts=[list(one) for one in prompts], tokens=tokens, salt=salt, adapter=name)

    @property
    def metrics(self) -> dict[str, float]:
        return self.order("metrics")

    @property
    def log(self) -> str:
        """What it has said on standard error."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> str:
        """End it; its log."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
        self.said = self.log
        self._log.close()
        return self.said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt(seed: int, tokens: int = 1000) -> list[int]:
    found: list[int] = torch.randint(1000, 40000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found
