"""CRC32C (Castagnoli: polynomial 0x1EDC6F41, reflected, as in RFC 3720), the only checksum on disk."""

from __future__ import annotations

import crc32c as _package
import numpy as np

from kvterrace.buffers import Bytes

__all__ = ["crc32c", "hardware"]


def crc32c(data: Bytes | bytes | memoryview, value: int = 0) -> int:
    """CRC32C of `data` (C-contiguous), carried on from `value`: `crc32c(b, crc32c(a)) == crc32c(a + b)`.

    Blocks the calling thread; lets go of the GIL for 32 KiB and more. Any thread.
    """
    return _package.crc32c(data.data if isinstance(data, np.ndarray) else data, value)


def hardware() -> bool:
    """Whether the CPU's CRC32C instruction is used; without it a check costs about ten times as much."""
    return bool(_package.hardware_based)
