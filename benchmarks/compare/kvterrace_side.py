"""kvterrace under the faults of `scenarios.py`: `kvterrace_side.py kvterrace damage --dir DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scenarios import BLOCK_NBYTES, BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, MISS, content_of, main

from kvterrace import Hit, KeyChain, KVLayout, Miss, Namespace, Present, Stored, chain_keys, open_store

LAYOUT = KVLayout(
    layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)  # fmt: skip
NAMESPACE = Namespace(model="m", layout=LAYOUT)
assert LAYOUT.block_nbytes == BLOCK_NBYTES


def _chain(ids: Sequence[int]) -> tuple[KeyChain, int, int]:
    document, start, stop = ids[0] // 1000, ids[0] % 1000, ids[-1] % 1000 + 1
    tokens = np.arange(stop * BLOCK_TOKENS) + document * 1_000_000
    return chain_keys(NAMESPACE, tokens), start, stop


class KvterraceSide:
    """A store with default settings but its sizes."""

    def __init__(self, kind: str, folder: Path, *, memory_nbytes: int, disk_nbytes: int) -> None:
        self.name, self.folder = kind, folder
        self._sizes = {"dram_bytes": memory_nbytes, "ssd_bytes": disk_nbytes}
        self._store = open_store(folder, **self._sizes)

    def put(self, ids: Sequence[int]) -> list[str]:
        chain, start, stop = _chain(ids)
        blocks = np.concatenate([content_of(number) for number in ids])
        outcomes = self._store.wait(self._store.put(chain, blocks, start=start, stop=stop))
        return ["taken" if isinstance(one, (Stored, Present)) else type(one).__name__ for one in outcomes]

    def settle(self, limit_s: float) -> None:
        if self._store.flush(limit_s):  # otherwise what is only in DRAM would be lost by the closing, not by the fault
            self._store.close(limit_s)
            self._store = open_store(self.folder, **self._sizes)

    def get(self, ids: Sequence[int], deadline_s: float | None = None) -> list[np.ndarray | str]:
        chain, start, stop = _chain(ids)
        out = np.full((len(ids), BLOCK_NBYTES), 0xEE, np.uint8)
        outcomes = self._store.wait(self._store.get(chain, out, start=start, stop=stop, deadline_s=deadline_s))
        answers: list[np.ndarray | str] = []
        for block, one in zip(out, outcomes, strict=True):
            if isinstance(one, Hit):
                answers.append(block)
            else:
                assert (block == 0xEE).all(), f"{one}, and the caller's memory was written"
                answers.append(MISS if isinstance(one, Miss) else type(one).__name__)
        return answers

    def place(self, number: int) -> tuple[Path, int]:
        needle = content_of(number)[BLOCK_NBYTES // 2 :][:64].tobytes()
        for path in sorted(self.folder.rglob("*.seg")):
            at = path.read_bytes().find(needle)
            if at >= 0:
                return path, at
        raise AssertionError(f"block {number} is not on the drive")

    def notes(self) -> dict[str, Any]:
        stats = self._store.stats()
        return {
            "says_drive_mib": round(stats.ssd_file_nbytes / 2**20, 1),
            "says_writable": stats.ssd_writable,
            "dropped_blocks": stats.dropped_blocks,
        }

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    main(KvterraceSide, ["kvterrace"])
