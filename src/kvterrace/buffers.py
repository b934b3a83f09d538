"""The caller's buffers, seen as blocks and parts.

A caller hands over KV in one of two forms, for `n` consecutive blocks:

* one C-contiguous writable buffer of `n * layout.block_nbytes` bytes (blocks end to end, parts in order); or
* one array for each part of the layout (or of the chosen layers), each with a leading dimension of `n` and any strides,
  `array[b]` holding the part of block `b` with `part_nbytes` bytes. An engine's own tensors fit this through a strided view.

The library borrows these buffers until the transfer that uses them is done; it never keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.errors import LayoutError
from kvterrace.layout import KVLayout

__all__ = ["BlockBuffers", "Bytes"]

Bytes = npt.NDArray[np.uint8]


class BlockBuffers:
    """`n` blocks of a caller's memory, part by part. Not thread-safe by itself; distinct blocks may be used at once."""

    __slots__ = ("_arrays", "blocks", "parts")

    def __init__(
        self, layout: KVLayout, source: Any, blocks: int, *, layers: range | None = None, writable: bool = False
    ) -> None:
        """View `source` as `blocks` blocks.

        Args:
            layers: the layers that `source` holds; None means all.
            writable: the blocks will be written to.

        Raises:
            LayoutError: the buffer is too small, not writable where it must be contiguous, or of the wrong shape.
        """
        self.blocks = blocks
        if layers is None:
            layers = range(layout.layers)
        if not len(layers) or layers.step != 1 or layers.start < 0 or layers.stop > layout.layers:
            raise LayoutError(f"layers {layers} are not a consecutive part of 0..{layout.layers - 1}")
        self.parts = range(layers.start * layout.parts_per_layer, layers.stop * layout.parts_per_layer)
        sizes = layout.part_nbytes[self.parts.start : self.parts.stop]
        if isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray, memoryview)):
            self._arrays = _part_arrays(source, blocks, sizes)
        else:
            self._arrays = _split_contiguous(source, blocks, sizes)
        if writable and not all(array.flags.writeable for array in self._arrays):
            raise LayoutError(
                "the buffer to read into is not writable; give a writable one, e.g. a bytearray or an array"
            )

    def copy_in(self, block: int, part: int, slot: Bytes) -> None:
        """Copy the caller's part of `block` into `slot` (exactly the part's bytes). `part` counts from `parts.start`."""
        array = self._arrays[part][block]
        np.copyto(slot.view(array.dtype).reshape(array.shape), array)

    def copy_out(self, block: int, part: int, slot: Bytes) -> None:
        """Copy `slot` (exactly the part's bytes) into the caller's part of `block`."""
        array = self._arrays[part][block]
        np.copyto(array, slot.view(array.dtype).reshape(array.shape))


def _split_contiguous(source: Any, blocks: int, sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    try:
        flat = np.frombuffer(source, dtype=np.uint8)
    except (ValueError, TypeError, BufferError) as error:
        raise LayoutError(f"a block buffer must be C-contiguous and offer the buffer protocol: {error}") from error
    want = blocks * sum(sizes)
    if flat.nbytes != want:
        raise LayoutError(f"{blocks} blocks of {sum(sizes)} B need a buffer of {want} B, not {flat.nbytes} B")
    table = flat.reshape(blocks, sum(sizes)) if blocks else flat.reshape(0, sum(sizes))
    edges = np.cumsum([0, *sizes])
    return [table[:, a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _part_arrays(source: Sequence[Any], blocks: int, sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    if len(source) != len(sizes):
        raise LayoutError(f"{len(source)} part arrays given, the layout asks for {len(sizes)}")
    arrays = []
    for number, (item, nbytes) in enumerate(zip(source, sizes, strict=True)):
        array = np.asarray(item)
        if array.ndim < 2 or array.shape[0] != blocks:
            raise LayoutError(
                f"part array {number} has shape {array.shape}; its first dimension must be {blocks} blocks"
            )
        if blocks and array[0].nbytes != nbytes:
            raise LayoutError(f"part array {number} holds {array[0].nbytes} B a block, the layout asks for {nbytes} B")
        arrays.append(array)
    return arrays
