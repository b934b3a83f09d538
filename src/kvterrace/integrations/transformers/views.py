"""Torch tensors seen as the part arrays of `kvterrace.buffers`, without a copy.

A cache layer keeps K (and V) as `[batch, kv_heads, tokens, head_dim]`. The part of one block of one row is
`[kv_heads, block_tokens, head_dim]`, a strided piece of it: contiguous along `block_tokens x head_dim`, one run for
each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

__all__ = ["block_parts"]

# NumPy knows neither bfloat16 nor float8; the store never looks inside an element, so whole numbers of its size do.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def block_parts(
    tensors: Sequence[torch.Tensor], row: int, start: int, stop: int, block_tokens: int
) -> list[npt.NDArray[Any]]:
    """View blocks `start..stop` of `row` as one array `(blocks, kv_heads, block_tokens, head_dim)` for each tensor.

    Args:
        tensors: CPU tensors `[batch, kv_heads, tokens, head_dim]` in the order of the layout's parts, each with at
            least `stop * block_tokens` tokens, any strides. The arrays share their memory and keep it alive.
    """
    arrays = []
    for tensor in tensors:
        blocks = tensor.detach()[row].narrow(1, start * block_tokens, (stop - start) * block_tokens)
        split = blocks.unflatten(1, (stop - start, block_tokens)).permute(1, 0, 2, 3)
        arrays.append(split.view(_WHOLE[tensor.element_size()]).numpy())
    return arrays
