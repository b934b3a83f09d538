"""What one model caches, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvterrace.errors import LayoutError

__all__ = ["DTYPE_NBYTES", "KVLayout"]

#: Bytes per element of the dtypes a KV cache is kept in.
DTYPE_NBYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

_MAX_PARTS = 4096
_MAX_INT = 2**32 - 1
#: The least that each whole number of a layout can be.
_AT_LEAST = {
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 1,
    "block_tokens": 1,
    "value_head_dim": 0,
    "parts_per_layer": 1,
    "tp_rank": 0,
    "tp_size": 1,
}


# No slots: sizes are asked for once for each block and part, and are kept in the instance's dictionary.
@dataclass(frozen=True)
class KVLayout:
    """The shape of one model's KV cache on one tensor-parallel rank.

    A *block* holds `block_tokens` consecutive tokens of all layers. It is made of *parts* in a fixed order:
    K of layer 0, V of layer 0, K of layer 1, ... (or one fused part per layer where `parts_per_layer` is 1,
    as for the latent of MLA or an engine that keeps K and V interleaved). A part has the shape
    `(kv_heads, block_tokens, head_dim)` in C order, unless `order` says that an engine packs it otherwise;
    kvterrace never looks inside a part.

    Attributes:
        layers: layers that keep KV on this rank (pipeline-parallel ranks hold fewer than the model has).
        kv_heads: KV heads on this rank (after tensor-parallel division or replication).
        head_dim: elements per head of K, or of the fused part.
        dtype: element type, a key of `DTYPE_NBYTES`.
        block_tokens: tokens in a block.
        value_head_dim: elements per head of V where it differs from K; 0 means the same, and is kept for it.
        parts_per_layer: 2 (K and V apart) or 1 (fused).
        attention: kind of attention, e.g. "full". Part of the identity, so that KV of one kind never passes as another.
        order: order of elements inside a part, e.g. "hnd" (heads, tokens, dim). Part of the identity.
        tp_rank, tp_size: tensor-parallel rank and degree. Part of the identity.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    value_head_dim: int = 0
    parts_per_layer: int = 2
    attention: str = "full"
    order: str = "hnd"
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole or not low <= value <= _MAX_INT:
                raise LayoutError(f"layout: {name} must be a whole number in {low}..2**32-1, not {value!r}")
            object.__setattr__(self, name, int(value))
        for name in ("dtype", "attention", "order"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise LayoutError(f"layout: {name} must be text, not {value!r}")
        if self.dtype not in DTYPE_NBYTES:
            raise LayoutError(f"layout: dtype {self.dtype!r} is unknown; known: {', '.join(DTYPE_NBYTES)}")
        if self.parts_per_layer not in (1, 2):
            raise LayoutError(f"layout: parts_per_layer must be 1 or 2, not {self.parts_per_layer!r}")
        if self.value_head_dim and self.parts_per_layer == 1:
            raise LayoutError(f"layout: value_head_dim {self.value_head_dim} needs parts_per_layer 2")
        if self.value_head_dim == self.head_dim:  # one geometry, one identity
            object.__setattr__(self, "value_head_dim", 0)
        if self.tp_rank >= self.tp_size:
            raise LayoutError(f"layout: tp_rank {self.tp_rank} is not in 0..{self.tp_size - 1}")
        if self.parts > _MAX_PARTS:
            raise LayoutError(f"layout: {self.parts} parts a block; at most {_MAX_PARTS} are supported")

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def parts(self) -> int:
        """Parts in a block."""
        return self.layers * self.parts_per_layer

    @property
    def part_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Logical shape `(kv_heads, block_tokens, head_dim)` of the parts of one layer (one or two)."""
        key = (self.kv_heads, self.block_tokens, self.head_dim)
        if self.parts_per_layer == 1:
            return (key,)
        return (key, (self.kv_heads, self.block_tokens, self.value_head_dim or self.head_dim))

    @cached_property
    def part_nbytes(self) -> tuple[int, ...]:
        """Bytes of each part of a block, in order."""
        one = tuple(heads * tokens * dim * self.itemsize for heads, tokens, dim in self.part_shapes)
        return one * self.layers

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of a block: `block_tokens * nbytes_per_token`."""
        return sum(self.part_nbytes)

    @property
    def nbytes_per_token(self) -> int:
        """KV bytes per token: 2 x kv_heads x head_dim x dtype_bytes x layers where K and V have one size (R1)."""
        return self.block_nbytes // self.block_tokens

    def layer_parts(self, layer: int) -> range:
        """Numbers of the parts of `layer`."""
        if not 0 <= layer < self.layers:
            raise LayoutError(f"layout: layer {layer} is not in 0..{self.layers - 1}")
        return range(layer * self.parts_per_layer, (layer + 1) * self.parts_per_layer)
