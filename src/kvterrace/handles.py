"""What a store hands out besides transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvterrace.engine.blocks import Ids
from kvterrace.keys import KeyChain
from kvterrace.types import Tier

__all__ = ["Match", "Pin"]


@dataclass(frozen=True, slots=True)
class Match:
    """What the ladder holds of a chain: its first `blocks` blocks, block `i` in `tiers[i]`. A snapshot: pin it to
    keep it.
    """

    chain: KeyChain
    tiers: tuple[Tier, ...]

    @property
    def blocks(self) -> int:
        """Length of the resident prefix, in blocks."""
        return len(self.tiers)

    @property
    def tokens(self) -> int:
        """Length of the resident prefix, in tokens."""
        return len(self.tiers) * self.chain.namespace.layout.block_tokens

    def count(self, tier: Tier) -> int:
        """Blocks of the prefix in `tier`."""
        return self.tiers.count(tier)


class Pin:
    """A held prefix: active KV, neither evicted nor dropped until `release` (or the end of a `with`)."""

    def __init__(self, ids: Ids, let_go: Callable[[Ids], None]) -> None:
        self._held = [ids]  # taken out by the one who lets go: `list.pop` is atomic between threads
        self._let_go = let_go
        #: Blocks held, from the first of the chain on.
        self.blocks = len(ids)

    def release(self) -> None:
        """Let go. Doing it twice does nothing. Thread-safe."""
        try:
            ids = self._held.pop()
        except IndexError:
            return
        self._let_go(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
