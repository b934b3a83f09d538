"""One submitted batch of moves, and how each of its blocks ended."""

from __future__ import annotations

import enum
import threading

from kvterrace.buffers import BlockBuffers
from kvterrace.keys import KeyChain
from kvterrace.types import Expired, GetOutcome, Pending, PutOutcome

__all__ = ["Transfer", "TransferKind"]

_OPEN, _COPYING, _SETTLED = 0, 1, 2
_PENDING = Pending()


class TransferKind(enum.Enum):
    """What a transfer was asked to do."""

    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"


class Transfer:
    """Returned by `Store.get`, `put` and `prefetch`. Reading it is safe from any thread.

    `chain` is None only for the store's own moves, which have no caller's buffers.

    The library uses the caller's buffers only between the call and `done`; after an expiry it leaves alone what it
    had not begun to copy, and `done` waits for the copies that it had.
    """

    __slots__ = (
        "_lock",
        "_open",
        "_outcomes",
        "_states",
        "buffers",
        "chain",
        "deadline_s",
        "kind",
        "layers",
        "sequence",
        "start",
        "stop",
        "submitted_s",
    )

    def __init__(
        self,
        kind: TransferKind,
        chain: KeyChain | None,
        start: int,
        stop: int,
        *,
        buffers: BlockBuffers | None,
        submitted_s: float,
        deadline_s: float | None,
        layers: range | None = None,
        sequence: bytes = b"",
    ) -> None:
        self.kind = kind
        self.chain = chain
        self.start = start
        self.stop = stop
        self.buffers = buffers
        self.layers = layers
        self.sequence = sequence
        self.submitted_s = submitted_s
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._states = bytearray(stop - start)
        self._outcomes: list[GetOutcome | PutOutcome] = [_PENDING] * (stop - start)
        self._open = stop - start

    def __repr__(self) -> str:
        span = f"blocks {self.start}..{self.stop - 1}"
        return f"<Transfer {self.kind.value} {span}: {self.done_blocks}/{self.total_blocks} done>"

    @property
    def total_blocks(self) -> int:
        """Blocks asked for."""
        return self.stop - self.start

    @property
    def done_blocks(self) -> int:
        """Blocks whose outcome is known."""
        return self.total_blocks - self._open

    @property
    def done(self) -> bool:
        """Whether every outcome is known and the caller's buffers are free again."""
        return self._open == 0

    @property
    def outcomes(self) -> list[GetOutcome | PutOutcome]:
        """Outcome of each block from `start` on; `Pending` where not known yet."""
        return list(self._outcomes)

    def begin_copy(self, index: int) -> bool:
        """Claim the caller's buffer of block `index` (in the chain) for copying; False if the block is settled, e.g.
        expired.
        """
        with self._lock:
            if self._states[index - self.start] != _OPEN:
                return False
            self._states[index - self.start] = _COPYING
            return True

    def settle(self, index: int, outcome: GetOutcome | PutOutcome) -> None:
        """Record how block `index` ended. The first word counts; whoever copies it must have ended."""
        with self._lock:
            self._settle(index - self.start, outcome)

    def is_open(self, index: int) -> bool:
        """Whether block `index` has no outcome yet."""
        return self._states[index - self.start] != _SETTLED

    def give_up(self, outcome: GetOutcome | PutOutcome = Expired()) -> None:  # noqa: B008 - a frozen value
        """Settle with `outcome` every block that is neither settled nor being copied."""
        with self._lock:
            for at, state in enumerate(self._states):
                if state == _OPEN:
                    self._settle(at, outcome)

    def _settle(self, at: int, outcome: GetOutcome | PutOutcome) -> None:
        if self._states[at] == _SETTLED:
            return
        self._states[at] = _SETTLED
        self._outcomes[at] = outcome
        self._open -= 1
        if not self._open:
            self.buffers = None
