"""LMCache as vLLM's connector, to run beside: time to first token as in `first_token`.

On CPUs its connector within vLLM (LMCacheConnectorV1) comes up and restores nothing: "No supported cpu connector
found". Its connector to a server of its own (LMCacheMPConnector) works, if the server is told to let the engine drive
transfers. The server holds KV in DRAM and lives on while the engine is started again. Needs `pip install --no-deps
lmcache==0.5.6` beside vLLM, and what that imports.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Self

from benchmarks.vllm import engines
from benchmarks.vllm.engines import BLOCK
from benchmarks.vllm.first_token import POOL, Case, warm
from benchmarks.vllm.sizes import Sizes

READY_S = 120.0


class Child(engines.Child):
    module = "benchmarks.vllm.lmcache_child"


class Server:
    """LMCache's, on a free port of this host."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `__exit__`
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(self.port)]
        command += ["--chunk-size", str(BLOCK), "--l1-size-gb", "2", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "engine_driven"]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        until_s = time.monotonic() + READY_S
        while "cache server is running..." not in self.log:
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise ChildProcessError(f"LMCache's server does not come up:\n{self.log[-2000:]}")
            time.sleep(0.2)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    if importlib.util.find_spec("lmcache") is None:
        return {"ran": False, "why": "not installed"}
    version = metadata.version("lmcache")
    try:
        return {"version": version, **_measure(say, sizes)}
    except ChildProcessError as error:
        return {"version": version, "ran": False, "why": str(error)[-1000:]}


def _measure(say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    case, times = Case(sizes), dict[str, list[float]]()

    def took(name: str, prefix: int, number: int) -> None:
        times.setdefault(name, []).append(case.ask(engine, prefix, number, name))
        say(f"  {name}: {times[name][-1]:.3f} s")

    with Server() as server:
        place = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": server.port}
        config = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": place}
        with Child(None, kv_transfer_config=config, **POOL) as engine:
            warm(engine)
            for prefix in range(sizes.prefixes):
                took("computed and saved", prefix, 0)
            for number in range(1, sizes.questions):
                for prefix in range(sizes.prefixes):
                    engine.order("reset")
                    took("LMCache DRAM", prefix, number)
        with Child(None, kv_transfer_config=config, **POOL) as engine:
            warm(engine)
            for prefix in range(sizes.prefixes):
                took("LMCache DRAM, another engine", prefix, 1)
            engine.order("reset")
            cached = engine.ask(case.tokens(0, 0))["cached"][0]
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"ran": cached > 0, "seconds": times, "median_s": medians, "tokens_restored": cached, "wrong": case.wrong}
