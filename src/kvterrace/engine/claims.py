"""Who may touch the caller's memory of each block of a transfer."""

from __future__ import annotations

import threading
from typing import Protocol

from kvterrace.format import passes

__all__ = ["Claims", "PythonClaims", "new_claims"]

_OPEN, _COPYING, _COPIED, _SETTLED = range(4)


class Claims(Protocol):
    """States of a transfer's blocks, counted from 0: open, then perhaps being copied and copied, then settled. A copy
    that came to nothing leaves its block open; else never back. Any thread.
    """

    def begin_copy(self, at: int, /) -> bool:
        """Claim a block's memory for copying; False if somebody did, or the block is settled, e.g. expired."""
        ...

    def end_copy(self, at: int, /) -> None:
        """The copy has ended. Raises RuntimeError if none was under way: a bug."""
        ...

    def abandon_copy(self, at: int, /) -> None:
        """The copy came to nothing: the block is open again. Raises RuntimeError as `end_copy`."""
        ...

    def settle(self, at: int, /) -> bool:
        """Settle a block; False if it was settled before. Raises RuntimeError while it is being copied: a bug."""
        ...

    def give_up(self) -> list[int]:
        """Settle each block that nobody began to copy; returns these."""
        ...

    def is_open(self, at: int, /) -> bool:
        """Whether the block is not settled."""
        ...


class PythonClaims:
    """`Claims` where there is no native module: the same answers and the same errors."""

    __slots__ = ("_lock", "_states")

    def __init__(self, blocks: int) -> None:
        self._lock = threading.Lock()
        self._states = bytearray(blocks)

    def begin_copy(self, at: int, /) -> bool:
        with self._lock:
            if self._states[at] != _OPEN:
                return False
            self._states[at] = _COPYING
            return True

    def end_copy(self, at: int, /) -> None:
        self._end(at, _COPIED)

    def abandon_copy(self, at: int, /) -> None:
        self._end(at, _OPEN)

    def _end(self, at: int, state: int) -> None:
        with self._lock:
            if self._states[at] != _COPYING:
                raise RuntimeError(f"no copy of block {at} is under way")
            self._states[at] = state

    def settle(self, at: int, /) -> bool:
        with self._lock:
            if self._states[at] == _COPYING:
                raise RuntimeError(f"block {at} cannot be settled while it is copied")
            first = self._states[at] != _SETTLED
            self._states[at] = _SETTLED
            return first

    def give_up(self) -> list[int]:
        with self._lock:
            given_up = [at for at, state in enumerate(self._states) if state == _OPEN]
            for at in given_up:
                self._states[at] = _SETTLED
            return given_up

    def is_open(self, at: int, /) -> bool:
        return self._states[at] != _SETTLED


def new_claims(blocks: int) -> Claims:
    """Claims of `blocks` blocks that are all open."""
    native = passes.native()
    claims: Claims = PythonClaims(blocks) if native is None else native.Claims(blocks)
    return claims
