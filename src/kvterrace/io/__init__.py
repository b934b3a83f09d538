"""Submit and poll: the protocol (`base`), its always-there engine (`posix`), its fast ones (`native`), which to take
(`probe`), and fakes for tests (`fake`, `faults`).
"""

from __future__ import annotations

from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.posix import PosixEngine

__all__ = [
    "PAGE_NBYTES",
    "FileInfo",
    "IoClass",
    "IoEngine",
    "IoFile",
    "IoKind",
    "IoRequest",
    "IoResult",
    "PosixEngine",
]
