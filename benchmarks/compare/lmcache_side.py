"""LMCache's storage layers under the faults of `scenarios.py`, on the CPU, without an inference engine.

`lmcache_side.py KIND SCENARIO --dir DIR`; kinds:

    lmcache-disk       in-process StorageManager, LocalDiskBackend; local_cpu off, so that reads are the drive's
    lmcache-fs         multiprocess StorageManager, L2 adapter "fs"
    lmcache-fs-native  the same with "fs_native", max_capacity_gb and LRU eviction
    lmcache-fs-aesgcm  "fs" with the AES-GCM serde, whose tag authenticates what is read
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import numpy as np
import torch
from scenarios import BLOCK_NBYTES, BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, MISS, content_of, main

torch.set_num_threads(1)
SHAPE = torch.Size([2, LAYERS, BLOCK_TOKENS, KV_HEADS * HEAD_DIM])
GIB = 1 << 30


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().copy()


def _fill(tensor: torch.Tensor, number: int) -> None:
    tensor.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(content_of(number).copy()))


class InProcess:
    """LocalDiskBackend behind the in-process StorageManager."""

    def __init__(self, folder: Path, memory_nbytes: int, disk_nbytes: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=memory_nbytes / GIB,
            local_disk=str(folder),
            max_local_disk_size=disk_nbytes / GIB,
        )
        PinMonitor.GetOrCreate(config)
        metadata = LMCacheMetadata(
            "m", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM),
            role="worker", chunk_size=BLOCK_TOKENS,
        )  # fmt: skip
        self.folder = folder
        self.manager = StorageManager(config, metadata, EventManager())
        self.backend = self.manager.storage_backends["LocalDiskBackend"]

    @staticmethod
    def key(number: int) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("m", 1, 0, 0x10_0000 + number, torch.bfloat16)

    def put(self, ids: Sequence[int]) -> list[str]:
        from lmcache.v1.memory_management import MemoryFormat

        told = []
        for number in ids:
            # Waits while memory is short, which is this call's default.
            memory = self.manager.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_2LTD)
            if memory is None:
                told.append("dropped")
                continue
            _fill(memory.tensor, number)
            self.manager.batched_put([self.key(number)], [memory])
            told.append("taken")
        return told

    def settle(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while self.backend.disk_worker.put_tasks and time.monotonic() < end_s:
            time.sleep(0.02)
        time.sleep(0.3)

    def get(self, ids: Sequence[int], deadline_s: float | None) -> list[np.ndarray | str]:  # noqa: ARG002 - has none
        found = self.manager.batched_get([self.key(number) for number in ids], location="LocalDiskBackend")
        answers: list[np.ndarray | str] = []
        for memory in found if found is not None else [None] * len(ids):
            answers.append(MISS if memory is None else _bytes_of(memory.tensor))
            if memory is not None:
                memory.ref_count_down()
        return answers + [MISS] * (len(ids) - len(answers))

    def get_async(self, ids: Sequence[int]) -> list[np.ndarray | str]:
        """The asynchronous path: "returned" blocks in order, as many as there are."""
        keys = [self.key(number) for number in ids]
        call = self.backend.batched_get_non_blocking("request", keys)
        found = asyncio.run_coroutine_threadsafe(call, self.manager.loop).result(10)
        return [_bytes_of(memory.tensor) for memory in found] + [MISS] * (len(ids) - len(found))

    def place(self, number: int) -> tuple[Path, int]:
        name = self.key(number).to_string().replace("/", "-") + ".pt"
        return self.folder / name, BLOCK_NBYTES // 2

    def notes(self) -> dict[str, Any]:
        return {
            "says_drive_mib": round(self.backend.current_cache_size / 2**20, 1),
            "put_tasks_pending": len(self.backend.disk_worker.put_tasks),
        }

    def close(self) -> None:
        self.manager.close()


class MultiProcess:
    """An L2 adapter behind the StorageManager of the multiprocess server."""

    def __init__(self, folder: Path, memory_nbytes: int, disk_nbytes: int, kind: str) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import parse_args
        from lmcache.v1.distributed.storage_manager import StorageManager

        folder.mkdir(parents=True, exist_ok=True)
        adapter: dict[str, Any] = {"type": "fs", "base_path": str(folder)}
        if kind == "lmcache-fs-native":
            adapter |= {
                "type": "fs_native",
                "max_capacity_gb": disk_nbytes / GIB,
                "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2},
            }
        if kind == "lmcache-fs-aesgcm":
            secret = folder.parent / "master.key"
            secret.write_bytes(b"0123456789abcdef0123456789abcdef")
            adapter["serde"] = {"type": "aesgcm", "master_key_path": str(secret)}
        config = parse_args(
            ["--l1-size-gb", str(memory_nbytes / GIB), "--eviction-policy", "LRU", "--no-l1-use-lazy",
             "--l2-adapter", json.dumps(adapter)]
        )  # fmt: skip
        config.l1_manager_config.memory_config.shm_name = ""
        self.folder = folder
        self.manager = StorageManager(config)
        self.layout = MemoryLayoutDesc([SHAPE], [torch.bfloat16])

    @staticmethod
    def key(number: int) -> Any:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(number.to_bytes(32, "big"), "m", ObjectKey.ComputeKVRank(1, 0, 1, 0))

    def put(self, ids: Sequence[int]) -> list[str]:
        told = []
        for number in ids:
            key = self.key(number)
            reserved = self.manager.reserve_write([key], self.layout)
            if key in reserved:
                _fill(reserved[key].tensor, number)
                self.manager.finish_write([key])
            told.append("taken" if key in reserved else "dropped")
        return told

    def settle(self, limit_s: float) -> None:
        end_s, seen = time.monotonic() + limit_s, None
        while time.monotonic() < end_s:  # nothing new on the drive for a while: all is written, or nothing more comes
            now = sorted((each.name, each.stat().st_size) for each in self.folder.glob("*.*") if each.exists())
            if now == seen:
                break
            seen = now
            time.sleep(0.8)
        self.manager.clear()

    def get(self, ids: Sequence[int], deadline_s: float | None) -> list[np.ndarray | str]:
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        keys = [self.key(number) for number in ids]
        task = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self.layout)]))
        if not self.manager.wait_prefetch_status(task, deadline_s or 15.0):
            return ["not loaded in time"] * len(ids)
        hits = self.manager.query_prefetch_status(task).hit_cells[0].popcount()
        answers: list[np.ndarray | str] = []
        if hits:
            with self.manager.read_prefetched_results(keys[:hits]) as objects:
                answers = [_bytes_of(one.tensor) for one in objects]
            self.manager.finish_read_prefetched(keys[:hits])
        return answers + [MISS] * (len(ids) - hits)

    get_async = None

    def place(self, number: int) -> tuple[Path, int]:
        (path,) = self.folder.glob(f"*{self.key(number).chunk_hash.hex()}*.data")
        return path, path.stat().st_size // 2

    def notes(self) -> dict[str, Any]:
        (adapter,) = [one for _, one in self.manager.l2_adapters()]
        return {"says_drive_mib": round(adapter.get_usage().total_bytes_used / 2**20, 1)}

    def close(self) -> None:
        self.manager.close()


class LMCacheSide:
    """One of the four kinds."""

    def __init__(self, kind: str, folder: Path, *, memory_nbytes: int, disk_nbytes: int) -> None:
        self.name, self.folder = kind, folder
        if kind.startswith("lmcache-disk"):
            self._inner: Any = InProcess(folder, memory_nbytes, disk_nbytes)
        else:
            self._inner = MultiProcess(folder, memory_nbytes, disk_nbytes, kind)
        self._asynchronous = kind == "lmcache-disk-async"
        for name in ("put", "settle", "place", "notes", "close"):
            setattr(self, name, getattr(self._inner, name))

    def get(self, ids: Sequence[int], deadline_s: float | None = None) -> list[np.ndarray | str]:
        return self._inner.get_async(ids) if self._asynchronous else self._inner.get(ids, deadline_s)


if __name__ == "__main__":
    main(
        LMCacheSide,
        ["lmcache-disk", "lmcache-disk-async", "lmcache-fs", "lmcache-fs-native", "lmcache-fs-aesgcm"],
    )
