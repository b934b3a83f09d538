"""What a store tells who records its traffic."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvterrace.engine.transfers import Transfer
from kvterrace.keys import KeyChain
from kvterrace.types import Hint, Tier

__all__ = ["Recorder"]


class Recorder(Protocol):
    """Called under the store's lock, so one call at a time: each must be short, wait for nothing and raise nothing.

    Times are those of the store's monotonic clock.
    """

    def transferred(self, transfer: Transfer, ended_s: float) -> None:
        """A transfer of a caller has ended."""
        ...

    def touched(self, chain: KeyChain, scores: np.ndarray | None, now_s: float) -> None:
        """`Store.touch` was called; `scores` is not changed after."""
        ...

    def hinted(self, sequence: bytes, kind: Hint, seconds: float | None, now_s: float) -> None:
        """`Store.hint` was called."""
        ...

    def invalidated(self, chain: KeyChain, start: int, now_s: float) -> None:
        """`Store.invalidate` was called."""
        ...

    def entered(self, tier: Tier, keys: bytes) -> None:
        """A write has given a tier its copies of the blocks with these keys (32 bytes each)."""
        ...

    def left(self, tier: Tier, keys: bytes) -> None:
        """A tier has given up its copies of these blocks."""
        ...

    def close(self) -> None:
        """The store is closed: nothing more comes."""
        ...
