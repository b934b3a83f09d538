"""LoRA adapters, by what is in their files: a name and a path may stand for other weights after a restart."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvterrace.integrations.vllm.weights import files_digest

__all__ = ["Adapters", "Unknown", "Wait"]

_log = logging.getLogger("kvterrace.vllm")


class Wait:
    """The digest is being made: ask again."""


class Unknown:
    """The adapter's weights cannot be told: KV computed with it is neither kept nor served."""


@dataclass(slots=True)
class _Known:
    signature: tuple[Any, ...]
    digest: Future[str]


class Adapters:
    """Digests of adapters, made on a thread: nothing here waits for a file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], _Known] = {}
        self._bad: set[tuple[int, str]] = set()
        self._pool: ThreadPoolExecutor | None = None

    def digest(self, lora_request: Any) -> bytes | Wait | Unknown:
        """What tells the adapter of a request from others; b"" for no adapter."""
        if lora_request is None:
            return b""
        name = (lora_request.lora_int_id, lora_request.lora_path)
        with self._lock:
            if name in self._bad:
                return Unknown()
            signature = _signature(Path(lora_request.lora_path))
            known = self._known.get(name)
            if not signature:
                return self._give_up(name, "its path is no folder with files")
            if known is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvterrace-adapters")
                files = [Path(each[0]) for each in signature]
                known = self._known[name] = _Known(signature, self._pool.submit(files_digest, files))
            if known.signature != signature or lora_request.load_inplace:
                # vLLM may have either in memory; it does not say which.
                return self._give_up(name, "its files have changed, or are loaded anew, while the engine runs")
            if not known.digest.done():
                return Wait()
            if known.digest.exception() is not None:
                return self._give_up(name, f"its files cannot be read: {known.digest.exception()}")
            return known.digest.result().encode()

    def _give_up(self, name: tuple[int, str], reason: str) -> Unknown:
        self._bad.add(name)
        _log.warning("LoRA adapter %s: %s; its KV is not kept until the engine is started again", name[1], reason)
        return Unknown()

    def close(self) -> None:
        """End the thread; what it hashes is not waited for."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)


def _signature(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Names, sizes, times and inodes of the adapter's files; empty where there are none."""
    try:
        found = [(each, each.stat()) for each in sorted(folder.iterdir()) if each.is_file()]
    except OSError:
        return ()
    return tuple((str(path), info.st_size, info.st_mtime_ns, info.st_ino) for path, info in found)
