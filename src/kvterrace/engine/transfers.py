"""One submitted batch of moves, and how each of its blocks ended."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from typing import Protocol

from kvterrace.buffers import BlockBuffers
from kvterrace.engine.claims import new_claims
from kvterrace.format import passes
from kvterrace.keys import KeyChain
from kvterrace.types import Expired, GetOutcome, Pending, PutOutcome

__all__ = ["Transfer", "TransferKind"]

_PENDING = Pending()


class TransferKind(enum.Enum):
    """What a transfer was asked to do."""

    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"


class Transfer:
    """Returned by `Store.get`, `put` and `prefetch`. Reading it is safe from any thread.

    `chain` is None only for the store's own moves, which have no caller's buffers. `claims` says who may touch the
    memory of each block (from 0), `places` is that memory for the native passes: None without them, or without buffers.
    `direct`: the caller has all the time, and memory that a drive can read into.

    The library uses the caller's buffers only between the call and `done`; after an expiry it leaves alone what it
    had not begun to copy, and `done` waits for the copies that it had, and for reads straight into them.
    """

    __slots__ = (
        "_lock",
        "_open",
        "_outcomes",
        "buffers",
        "chain",
        "claims",
        "deadline_s",
        "direct",
        "kind",
        "layers",
        "places",
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
        self.claims = new_claims(stop - start)
        self.places = _places(chain, buffers)
        whole = kind is TransferKind.GET and layers is None and deadline_s is None
        self.direct = whole and chain is not None and buffers is not None and buffers.in_pages
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
        expired. Whoever gets True calls `end_copy`, whatever becomes of the copy.
        """
        return self.claims.begin_copy(index - self.start)

    def end_copy(self, index: int) -> None:
        """The copy of block `index` has ended; its outcome is on the way."""
        self.claims.end_copy(index - self.start)

    def abandon_copy(self, index: int) -> None:
        """The copy of block `index` came to nothing: its memory holds anything, and it is open again."""
        self.claims.abandon_copy(index - self.start)

    def settle(self, index: int, outcome: GetOutcome | PutOutcome) -> None:
        """Record how block `index` ended. The first word counts. Raises RuntimeError while it is being copied: a
        bug.
        """
        with self._lock:
            if self.claims.settle(index - self.start):
                self._ended(index - self.start, outcome)

    def settle_all(self, indices: Iterable[int], outcome: GetOutcome | PutOutcome) -> None:
        """As `settle`, for many blocks that ended alike."""
        with self._lock:
            for index in indices:
                if self.claims.settle(index - self.start):
                    self._ended(index - self.start, outcome)

    def is_open(self, index: int) -> bool:
        """Whether block `index` has no outcome yet."""
        return self.claims.is_open(index - self.start)

    def give_up(self, outcome: GetOutcome | PutOutcome = Expired()) -> None:  # noqa: B008 - a frozen value
        """Settle with `outcome` every block that is neither settled, nor being copied, nor copied."""
        with self._lock:
            for at in self.claims.give_up():
                self._ended(at, outcome)

    def _ended(self, at: int, outcome: GetOutcome | PutOutcome) -> None:
        self._outcomes[at] = outcome
        if self._open == 1:  # before anybody can see that it is done: the caller's memory is the caller's again
            if self.places is not None:
                self.places.release()  # a read that hangs may hold them for long
            self.buffers = self.places = None
        self._open -= 1


class _Places(Protocol):
    """A caller's memory, as the native module has it."""

    def release(self) -> None: ...


def _places(chain: KeyChain | None, buffers: BlockBuffers | None) -> _Places | None:
    """Made at once, not when it is needed: an array of the caller's may get another shape by then."""
    native = passes.native()
    if native is None or chain is None or buffers is None or not buffers.blocks:
        return None
    sizes = chain.namespace.layout.part_nbytes[buffers.parts.start : buffers.parts.stop]
    places: _Places = native.Places(buffers.pieces, list(sizes), buffers.parts.start, buffers, buffers.rows)
    return places
