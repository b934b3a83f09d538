"""LMCache's side of the speed comparison: its storage managers, without an inference engine or a GPU.

In an engine, a connector copies KV between the GPU and the manager's pinned pool. Here the caller's buffer takes the
GPU's place, and `numpy.copyto` the connector's, which is cheaper here than `Tensor.copy_`. kinds:

    lmcache-disk, -disk-direct             in-process manager, LocalDiskBackend; page cache, O_DIRECT
    lmcache-fs, -fs-direct                 multiprocess manager, L2 adapter "fs"
    lmcache-fs-native, -fs-native-direct   the same, "fs_native"
    lmcache-dram                           in-process manager, LocalCPUBackend
    lmcache-l1                             multiprocess manager, L1 alone

A trailing "-tN" is the number of I/O threads (default 4 where there is such an option). LMCache syncs nothing: what
"durable" takes is one syncfs behind the last write.
"""

from __future__ import annotations

import json
import os
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")

import numpy as np
import torch
from speed_side import BLOCK_NBYTES, BLOCK_TOKENS, GIB, HEAD_DIM, KV_HEADS, LAYERS, Bytes, serve, sync_drive

torch.set_num_threads(1)
SHAPE = torch.Size([2, LAYERS, BLOCK_TOKENS, KV_HEADS * HEAD_DIM])
_POLL_S = 0.003


def _flat(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.view(torch.uint8).reshape(-1).numpy()
    return flat


class InProcess:
    """StorageManager of the in-process engine."""

    def __init__(self, kind: str, folder: Path, blocks: int, threads: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self._disk = "disk" in kind
        settings: dict[str, Any] = {
            "chunk_size": BLOCK_TOKENS,
            "local_cpu": not self._disk,
            "max_local_cpu_size": (blocks * BLOCK_NBYTES + (256 << 20)) / GIB,
        }
        if self._disk:
            extra = {"use_odirect": kind.endswith("direct"), "disk_io_threads": threads}
            settings |= {"local_disk": str(folder), "max_local_disk_size": 64.0, "extra_config": extra}
        config = LMCacheEngineConfig.from_defaults(**settings)
        PinMonitor.GetOrCreate(config)
        metadata = LMCacheMetadata(
            "m", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM),
            role="worker", chunk_size=BLOCK_TOKENS,
        )  # fmt: skip
        self._folder, self._blocks, self._round = folder, blocks, 0
        self._manager = StorageManager(config, metadata, EventManager())
        self._backend = self._manager.storage_backends["LocalDiskBackend" if self._disk else "LocalCPUBackend"]
        self._location = "LocalDiskBackend" if self._disk else "LocalCPUBackend"
        self._keys: list[Any] = []
        self.helpers: list[int] = []

    def fresh(self) -> None:
        from lmcache.utils import CacheEngineKey

        if self._keys:
            self._manager.batched_remove(self._keys)
        self._round += 1
        self._keys = [
            CacheEngineKey("m", 1, 0, self._round << 20 | number, torch.bfloat16) for number in range(self._blocks)
        ]

    def store(self, memory: Bytes) -> None:
        self.dram_put(memory)
        while self._backend.disk_worker.put_tasks:
            time.sleep(_POLL_S)
        sync_drive(self._folder)

    def cool(self) -> None:
        pass  # without local_cpu the pool is staging: nothing of a read stays

    def restore(self, memory: Bytes) -> None:
        self.dram_get(memory)

    def dram_put(self, memory: Bytes) -> None:
        from lmcache.v1.memory_management import MemoryFormat

        objects = self._manager.batched_allocate(SHAPE, torch.bfloat16, self._blocks, MemoryFormat.KV_2LTD)
        for source, one in zip(memory, objects, strict=True):
            np.copyto(_flat(one.tensor), source)
        self._manager.batched_put(self._keys, objects)

    def dram_get(self, memory: Bytes) -> None:
        found = self._manager.batched_get(self._keys, location=self._location)
        for target, one in zip(memory, found, strict=True):
            np.copyto(target, _flat(one.tensor))
            one.ref_count_down()

    def close(self) -> None:
        self._manager.close()


class MultiProcess:
    """StorageManager of the multiprocess server, in this process."""

    def __init__(self, kind: str, folder: Path, blocks: int, threads: int) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import parse_args
        from lmcache.v1.distributed.storage_manager import StorageManager

        gib = (blocks * BLOCK_NBYTES * 1.1 + (256 << 20)) / GIB  # it evicts from 95 % on
        arguments = ["--l1-size-gb", str(gib), "--eviction-policy", "LRU", "--no-l1-use-lazy"]
        arguments += ["--eviction-trigger-watermark", "0.95"]
        if kind != "lmcache-l1":
            adapter: dict[str, Any] = {"type": "fs", "base_path": str(folder), "use_odirect": kind.endswith("direct")}
            if "native" in kind:
                adapter |= {"type": "fs_native", "num_workers": threads}
            arguments += ["--l2-adapter", json.dumps(adapter)]
        config = parse_args(arguments)
        config.l1_manager_config.memory_config.shm_name = ""
        self._folder, self._blocks, self._round = folder, blocks, 0
        self._manager = StorageManager(config)
        self._layout = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
        self._keys: list[Any] = []
        self.helpers: list[int] = []

    def fresh(self) -> None:
        from lmcache.v1.distributed.api import ObjectKey

        self._manager.clear()
        for path in self._folder.glob("*.data"):
            path.unlink()
        self._round += 1
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        self._keys = [
            ObjectKey((self._round << 20 | number).to_bytes(32, "big"), "m", rank) for number in range(self._blocks)
        ]

    def store(self, memory: Bytes) -> None:
        self.dram_put(memory)
        # A file gets its name when it is whole.
        while sum(one.name.endswith(".data") for one in os.scandir(self._folder)) < self._blocks:
            time.sleep(_POLL_S)
        sync_drive(self._folder)

    def cool(self) -> None:
        self._manager.clear()

    def restore(self, memory: Bytes) -> None:
        self.dram_get(memory)

    def dram_put(self, memory: Bytes) -> None:
        reserved = self._manager.reserve_write(self._keys, self._layout)
        for source, key in zip(memory, self._keys, strict=True):
            np.copyto(_flat(reserved[key].tensor), source)
        self._manager.finish_write(self._keys)

    def dram_get(self, memory: Bytes) -> None:
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        groups = [GroupedObjectKeys(self._keys, 0, self._layout)]
        task = self._manager.submit_prefetch_task(PrefetchTaskSpec(groups))
        assert self._manager.wait_prefetch_status(task, 120.0), "not loaded in 120 s"
        hits = self._manager.query_prefetch_status(task).hit_cells[0].popcount()
        assert hits == self._blocks, f"{hits} of {self._blocks} blocks"
        with self._manager.read_prefetched_results(self._keys) as objects:
            for target, one in zip(memory, objects, strict=True):
                np.copyto(target, _flat(one.tensor))
        self._manager.finish_read_prefetched(self._keys)

    def close(self) -> None:
        self._manager.close()


def _make(kind: str, folder: Path, blocks: int) -> InProcess | MultiProcess:
    threaded = re.fullmatch(r"(.+)-t(\d+)", kind)
    plain, threads = (threaded[1], int(threaded[2])) if threaded else (kind, 4)
    make = InProcess if plain.startswith(("lmcache-disk", "lmcache-dram")) else MultiProcess
    side = make(plain, folder, blocks, threads)
    side.facts = {"version": version("lmcache"), "torch": torch.__version__, "mode": kind, "checksums": "none"}
    return side


_DRIVE_KINDS = [
    f"lmcache-{how}{direct}{threads}"
    for how in ("disk", "fs", "fs-native")
    for direct in ("", "-direct")
    for threads in ("", *(("-t2", "-t8") if how != "fs" else ()))
]

if __name__ == "__main__":
    serve(_make, [*_DRIVE_KINDS, "lmcache-dram", "lmcache-l1"])
