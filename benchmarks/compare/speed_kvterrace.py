"""kvterrace's side of the speed comparison: `open_store` with sizes, and defaults otherwise."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from speed_side import BLOCK_NBYTES, BLOCK_TOKENS, GIB, HEAD_DIM, KV_HEADS, LAYERS, Bytes, serve

from kvterrace import Hit, KVLayout, Namespace, Store, Stored, chain_keys, open_store
from kvterrace import __version__ as version
from kvterrace.io.probe import choose

LAYOUT = KVLayout(
    layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)  # fmt: skip
assert LAYOUT.block_nbytes == BLOCK_NBYTES


class Kvterrace:
    """A store of its own for each round. It verifies every block that it reads; that is part of its work."""

    def __init__(self, kind: str, folder: Path, blocks: int) -> None:
        self._path = None if kind == "kvterrace-dram" else folder / "store"
        self._chain = chain_keys(Namespace("m", LAYOUT), np.arange(blocks * BLOCK_TOKENS))
        self._dram_nbytes = blocks * (BLOCK_NBYTES + (64 << 10)) + (64 << 20)
        self._ssd_nbytes = max(4 * GIB, 2 * blocks * BLOCK_NBYTES)
        self._store: Store | None = None
        self.helpers: list[int] = []
        self.facts: dict[str, Any] = {"version": version, "engine": choose().name, "checksums": "CRC32C, every read"}

    def fresh(self) -> None:
        self.close()
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        self._open()

    def _open(self) -> Store:
        self._store = open_store(
            self._path, dram_bytes=self._dram_nbytes, ssd_bytes=self._ssd_nbytes, ssd_daily_write_bytes="1PB"
        )
        return self._store

    def store(self, memory: Bytes) -> None:
        self.dram_put(memory)
        assert self._store is not None
        assert self._store.flush(600.0), "not flushed"

    def cool(self) -> None:
        self.close()
        self._open()

    def restore(self, memory: Bytes) -> None:
        self.dram_get(memory)

    def dram_put(self, memory: Bytes) -> None:
        assert self._store is not None
        _all(self._store.wait(self._store.put(self._chain, memory)), Stored)

    def dram_get(self, memory: Bytes) -> None:
        assert self._store is not None
        _all(self._store.wait(self._store.get(self._chain, memory)), Hit)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.closing(store):
                assert self._path is None or store.flush(600.0), "not flushed"


def _all(outcomes: Sequence[object], wanted: type) -> None:
    odd = [one for one in outcomes if not isinstance(one, wanted)]
    assert not odd, f"{len(odd)} of {len(outcomes)} blocks: {odd[0]}"


if __name__ == "__main__":
    serve(Kvterrace, ["kvterrace", "kvterrace-dram"])
