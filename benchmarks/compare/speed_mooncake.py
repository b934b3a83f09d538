"""Mooncake's side of the speed comparison: a master, and a client in this process that owns memory and an SSD.

Puts and gets go from and into registered buffers. Offload is the client's own: a loop writes buckets of what was put
to its folder, and reads them for gets. kinds:

    mooncake          bucket backend, page cache
    mooncake-uring    bucket backend with MOONCAKE_OFFLOAD_USE_URING
    mooncake-dram     memory alone

It syncs nothing: what "durable" takes is one syncfs behind the last write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from speed_side import BLOCK_NBYTES, Bytes, serve, sync_drive

_POLL_S = 0.003
_BUCKET_BLOCKS = 32
_LEASE_MS = 3000  # a read that takes longer than its lease fails


class Mooncake:
    """One master and one client for the life of the process."""

    def __init__(self, kind: str, folder: Path, blocks: int) -> None:
        self._offload = kind != "mooncake-dram"
        self._folder, self._blocks, self._round = folder / "buckets", blocks, 0
        self._folder.mkdir()
        nbytes = blocks * BLOCK_NBYTES
        os.environ |= {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self._folder),
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(_BUCKET_BLOCKS),  # a bucket waits until it is full
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(2 * nbytes),
            "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS": "3000",
            "MOONCAKE_OFFLOAD_USE_URING": "1" if kind == "mooncake-uring" else "0",
            "GLOG_minloglevel": "2",
        }
        port, other = _free_port(), _free_port()
        log = (folder / "master.log").open("w")
        master = Path(sys.executable).with_name("mooncake_master")  # becomes the server: same process
        command = [str(master), f"--rpc_port={port}", f"--metrics_port={other}"]
        command += [f"--enable_offload={str(self._offload).lower()}", f"--default_kv_lease_ttl={_LEASE_MS}"]
        self._master = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_end_with_parent)
        self.helpers = [self._master.pid]
        time.sleep(2.0)
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        settings = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(nbytes + nbytes // 4 + (256 << 20)),
            "local_buffer_size": str(256 << 20),
            "protocol": "tcp",
            "master_server_addr": f"127.0.0.1:{port}",
            "enable_ssd_offload": str(self._offload).lower(),
            "ssd_offload_path": str(self._folder),
        }
        told = self._client.setup(settings)
        assert told == 0, f"setup: {told}"
        self._registered: set[int] = set()
        self._keys: list[str] = []
        self.facts: dict[str, Any] = {
            "version": version("mooncake-transfer-engine-non-cuda"),
            "mode": kind,
            "checksums": "none (MOONCAKE_STORE_CHECKSUM is off by default)",
        }

    def fresh(self) -> None:
        if self._keys:
            time.sleep(1.1 * _LEASE_MS / 1000)
            self._client.remove_all(force=True)
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._round += 1
        self._keys = [f"{self._round}-{number}" for number in range(self._blocks)]

    def _places(self, memory: Bytes) -> tuple[list[int], list[int]]:
        start = memory.ctypes.data
        if start not in self._registered:
            assert self._client.register_buffer(start, memory.nbytes) == 0
            self._registered.add(start)
        return [start + number * BLOCK_NBYTES for number in range(self._blocks)], [BLOCK_NBYTES] * self._blocks

    def store(self, memory: Bytes) -> None:
        self.dram_put(memory)
        while len(list(self._folder.glob("*.meta"))) * _BUCKET_BLOCKS < self._blocks:  # written behind the bucket
            time.sleep(_POLL_S)
        sync_drive(self._folder)

    def cool(self) -> None:
        while not all(
            any(one.is_local_disk_replica() for one in self._client.get_replica_desc(key)) for key in self._keys
        ):
            time.sleep(0.05)
        time.sleep(1.1 * _LEASE_MS / 1000)  # leases, and the buffers of the last read
        self._client.batch_replica_clear(self._keys, self._client.get_hostname())
        left = sum(any(one.is_memory_replica() for one in self._client.get_replica_desc(key)) for key in self._keys)
        assert not left, f"{left} blocks stay in memory"

    def restore(self, memory: Bytes) -> None:
        self.dram_get(memory)

    def dram_put(self, memory: Bytes) -> None:
        told = self._client.batch_put_from(self._keys, *self._places(memory))
        assert not any(told), f"put: {[one for one in told if one][:3]}"

    def dram_get(self, memory: Bytes) -> None:
        told = self._client.batch_get_into(self._keys, *self._places(memory))
        assert told == [BLOCK_NBYTES] * self._blocks, f"get: {[one for one in told if one != BLOCK_NBYTES][:3]}"

    def close(self) -> None:
        self._client.close()
        self._master.terminate()
        self._master.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also where this process is killed


if __name__ == "__main__":
    serve(Mooncake, ["mooncake", "mooncake-uring", "mooncake-dram"])
