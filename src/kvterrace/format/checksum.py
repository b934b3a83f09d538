"""CRC32C (Castagnoli: polynomial 0x1EDC6F41, reflected, as in RFC 3720), the only checksum on disk."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from kvterrace.buffers import Bytes

__all__ = ["crc32c", "hardware"]


def crc32c(data: Bytes | bytes | memoryview, value: int = 0) -> int:
    """CRC32C of `data` (C-contiguous), carried on from `value`: `crc32c(b, crc32c(a)) == crc32c(a + b)`.

    Blocks the calling thread; lets go of the GIL for 32 KiB and more. Any thread.
    """
    result: int = _package().crc32c(data.data if isinstance(data, np.ndarray) else data, value)
    return result


def hardware() -> bool:
    """Whether the CPU's CRC32C instruction is used; without it a check costs about ten times as much."""
    return bool(_package().hardware_based)


@functools.cache
def _package() -> ModuleType:
    # At first use: importing it looks up its own version among the installed packages, a third of our import time.
    import crc32c as package

    return package
