"""vLLM's KV caches seen as a pool of pages: one part for each layer, one row for each block.

A layer's cache is a tensor `[blocks, heads, tokens, content]` in any order of axes in memory. The CPU kernels keep K
transposed inside a page, others interleave K and V: a page is opaque here and moves whole, and how it lies is in the
namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvterrace.errors import UnsupportedModelError

__all__ = ["Pages", "pages_of"]


@dataclass(frozen=True, slots=True)
class Pages:
    """The pool.

    Attributes:
        parts: bytes `(blocks, page_nbytes)` for each layer, views of the engine's memory, in the order of the layers.
        geometry: how a page lies in memory, as text for the namespace.
    """

    parts: tuple[npt.NDArray[np.uint8], ...]
    geometry: str

    @property
    def blocks(self) -> int:
        """Rows of the pool."""
        return len(self.parts[0])


def pages_of(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> Pages:
    """View `kv_caches` (by layer, as vLLM registers them) as pages. Nothing is copied.

    Raises:
        UnsupportedModelError: a layer is missing, lies on a device, or a block of it is not one dense piece of memory.
    """
    names = list(kv_cache_config.kv_cache_groups[0].layer_names)
    missing = sorted(set(names) ^ set(kv_caches))
    if missing:
        raise UnsupportedModelError(
            f"layers without a cache of their own, or in no group: {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    parts, forms = [], []
    for name in names:
        part, form = _page(name, kv_caches[name], kv_cache_config.num_blocks)
        parts.append(part)
        forms.append(form)
    digest = hashlib.sha256(json.dumps([names, forms]).encode()).hexdigest()
    layout = getattr(kv_cache_config, "kv_cache_layout", "")
    return Pages(tuple(parts), f"{layout} {json.dumps(forms[0])} {digest}")


def _page(name: str, cache: Any, blocks: int) -> tuple[npt.NDArray[np.uint8], list[Any]]:
    if not isinstance(cache, torch.Tensor) or cache.device.type != "cpu":
        where = cache.device.type if isinstance(cache, torch.Tensor) else type(cache).__name__
        raise UnsupportedModelError(f"the cache of layer {name} is on or of {where}: not understood")
    rows, *shape = cache.shape
    row_stride, *strides = cache.stride()
    if rows % blocks:
        raise UnsupportedModelError(f"the cache of layer {name} has {rows} rows for {blocks} blocks: not understood")
    split = rows // blocks  # a kernel may see a block as several rows
    shape, strides = [split, *shape], [row_stride, *strides]
    elements = _dense(shape, strides)
    if elements is None:
        raise UnsupportedModelError(
            f"a block of layer {name} is not one piece of memory (shape {tuple(cache.shape)}, strides "
            f"{cache.stride()}): not understood"
        )
    nbytes = elements * cache.element_size()
    flat = torch.as_strided(cache, (blocks, elements), (row_stride * split, 1))
    form = [str(cache.dtype), shape, [0 if length == 1 else step for length, step in zip(shape, strides, strict=True)]]
    # As whole numbers of one byte: NumPy knows neither bfloat16 nor float8.
    return flat.view(torch.uint8).numpy().reshape(blocks, nbytes), form


def _dense(shape: list[int], strides: list[int]) -> int | None:
    """Elements of such an array, if they lie without gaps from the first one on."""
    reached = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != reached:
            return None
        reached *= length
    return reached
