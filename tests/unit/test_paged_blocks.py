"""Blocks that lie scattered in an engine's pool of pages, through a store: with the native passes and in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvterrace.buffers import PagedBlocks
from kvterrace.keys import Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.opening import open_store
from kvterrace.types import Hit, Stored, Tier

#: Of more than 256 KiB a block, which are copied past the cache, and of less.
LAYOUTS = [
    KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4, parts_per_layer=1, order="pages"),
    KVLayout(layers=2, kv_heads=2, head_dim=1024, dtype="float32", block_tokens=32, parts_per_layer=1, order="pages"),
]
ROWS_OUT, ROWS_IN, POOL = [9, 2, 5, 0], [3, 8, 1, 7], 10


def pools(layout: KVLayout, seed: int | None) -> list[npt.NDArray[np.uint8]]:
    random = np.random.default_rng(seed)
    shapes = [(POOL, nbytes) for nbytes in layout.part_nbytes]
    if seed is None:
        return [np.zeros(shape, np.uint8) for shape in shapes]
    return [random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["small", "large"])
@pytest.mark.parametrize("passes", ["as built", "python"])
def test_what_was_put_from_some_rows_is_read_into_others(
    tmp_path: Any, layout: KVLayout, passes: str, request: pytest.FixtureRequest
) -> None:
    if passes == "python":
        request.getfixturevalue("python_passes")
    chain = chain_keys(Namespace("weights", layout), list(range(4 * layout.block_tokens)))
    source = pools(layout, seed=1)
    with open_store(tmp_path / "kv", dram_bytes="8MiB", ssd_bytes="64MiB") as store:
        put = store.put(chain, PagedBlocks(source, ROWS_OUT))
        assert store.wait(put, 10.0) == [Stored(Tier.DRAM)] * 4
        assert store.flush(10.0)
    with open_store(tmp_path / "kv", dram_bytes="8MiB", ssd_bytes="64MiB") as store:
        for tier in (Tier.SSD, Tier.DRAM):
            target = pools(layout, seed=None)
            get = store.get(chain, PagedBlocks(target, ROWS_IN))
            assert store.wait(get, 10.0) == [Hit(tier)] * 4
            for read, kept in zip(target, source, strict=True):
                want = np.zeros_like(kept)
                want[ROWS_IN] = kept[ROWS_OUT]
                assert np.array_equal(read, want)
