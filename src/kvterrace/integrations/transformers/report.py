"""What a restore or a store did, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvterrace.types import (
    Busy,
    Corrupt,
    DeviceFailed,
    Expired,
    GetOutcome,
    Miss,
    Present,
    PutOutcome,
    Stale,
    Stored,
    Tier,
)

_MAX_REPORTED_FAULTS = 8

__all__ = ["BlockFault", "RestoreReport", "StoreReport", "Tally", "fault_words"]


@dataclass(frozen=True, slots=True)
class BlockFault:
    """One block that did not go as planned: `block` of `row`, and how it ended."""

    row: int
    block: int
    outcome: GetOutcome | PutOutcome


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `PrefixCache.restore` found.

    Attributes:
        tokens: length of the prompt, of every row.
        restored_tokens: leading tokens whose KV is in the returned cache, of every row. The rest is to be computed.
        tier_tokens: restored tokens by the tier they came from, summed over rows.
        nbytes: bytes of restored KV, over all rows.
        elapsed_s: seconds that the restore took.
        faults: blocks that `match` promised and that did not arrive; the prefix was cut before the first of each row.
        error: what the store raised, if it did (then nothing was restored); "" otherwise.
    """

    tokens: int
    restored_tokens: int
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    nbytes: int = 0
    elapsed_s: float = 0.0
    faults: tuple[BlockFault, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What `PrefixCache.store` did.

    Attributes:
        blocks: whole blocks in the cache, over all rows.
        stored_blocks: blocks that the store took now.
        present_blocks: blocks that it had already.
        nbytes: bytes handed over.
        elapsed_s: seconds that it took.
        faults: blocks that were not taken (busy, rejected), first ones only (at most 8).
        missed_blocks: how many were not taken.
        error: what the store raised, if it did; "" otherwise.
    """

    blocks: int
    stored_blocks: int = 0
    present_blocks: int = 0
    nbytes: int = 0
    elapsed_s: float = 0.0
    faults: tuple[BlockFault, ...] = ()
    missed_blocks: int = 0
    error: str = ""


class Tally:
    """The counts of a `StoreReport` while blocks are handed over."""

    def __init__(self, blocks: int, block_nbytes: int) -> None:
        self.blocks, self.block_nbytes = blocks, block_nbytes
        self.stored = self.present = self.missed = 0
        self.faults: list[BlockFault] = []
        self.error = ""

    def count(self, outcome: Stored | Present) -> None:
        if isinstance(outcome, Stored):
            self.stored += 1
        else:
            self.present += 1

    def miss(self, row: int, block: int, blocks: int, outcome: Any) -> None:
        self.missed += blocks
        if len(self.faults) < _MAX_REPORTED_FAULTS:
            self.faults.append(BlockFault(row, block, outcome))

    def report(self, elapsed_s: float) -> StoreReport:
        missed = self.missed if not self.error else self.blocks - self.stored - self.present
        return StoreReport(
            blocks=self.blocks,
            stored_blocks=self.stored,
            present_blocks=self.present,
            nbytes=self.stored * self.block_nbytes,
            elapsed_s=elapsed_s,
            faults=tuple(self.faults),
            missed_blocks=missed,
            error=self.error,
        )


_WORDS = (
    (Corrupt, "corrupt"),
    (DeviceFailed, "failed"),
    (Stale, "stale"),
    (Miss, "missing"),
    (Expired, "late"),
    (Busy, "busy"),
)


def fault_words(faults: Sequence[BlockFault]) -> str:
    """`"5 blocks (corrupt: 4, failed: 1)"`."""
    kinds = Counter(type(fault.outcome) for fault in faults)
    told = ", ".join(f"{word}: {kinds[kind]}" for kind, word in _WORDS if kinds[kind])
    return f"{len(faults)} block{'' if len(faults) == 1 else 's'}" + (f" ({told})" if told else "")
