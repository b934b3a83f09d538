"""Host memory that KV is restored into: one piece for all layers, and, on request, taken before it is needed.

Memory that is touched for the first time costs a page fault for each page: 189 MB took 0.1 s, half of what the drive
took for them; in huge pages, which NumPy asks for and torch does not, up to 0.6 s, on a virtual machine whose host had
to back them first. So a reserve, in huge pages, is faulted in when it is made, as serving engines do with the memory of
their KV cache; what it does not cover comes in small pages.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["HostMemory", "carve", "carved_nbytes"]

_ALIGN_NBYTES = 64


class HostMemory:
    """Lends flat memory. Not thread-safe."""

    def __init__(self, reserve_nbytes: int = 0) -> None:
        """Take `reserve_nbytes` and fault them in. Blocks: seconds for some GB."""
        self._reserve = np.empty(reserve_nbytes, np.uint8)
        self._reserve[:: mmap.PAGESIZE] = 0
        self._lent: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of memory with any content, as a tensor of bytes: from the reserve if it is large enough and not
        lent, else from the system. It is given back when the last tensor on it is gone."""
        free = self._lent is None or self._lent() is None
        if not free or nbytes > self._reserve.nbytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        piece = self._reserve[:nbytes]
        self._lent = weakref.ref(piece)
        return torch.from_numpy(piece)


def carve(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of these shapes, one behind the other in `flat` (of at least `carved_nbytes`)."""
    tensors, at = [], 0
    for shape in shapes:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        tensors.append(flat[at : at + nbytes].view(dtype).view(shape))
        at += _aligned(nbytes)
    return tensors


def carved_nbytes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that `carve` takes."""
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape in shapes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
