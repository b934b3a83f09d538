"""What `PrefixCache` asks of a store. `kvterrace.store.Store` fits; a test can put a fault in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvterrace.keys import KeyChain
from kvterrace.types import Hint

__all__ = ["PrefixMatch", "PrefixStore"]


class PrefixMatch(Protocol):
    """Answer of `match`."""

    @property
    def blocks(self) -> int:
        """Leading blocks of the chain that some tier holds."""
        ...


class PrefixStore(Protocol):
    """The part of `Store` that restores and stores prefixes. Transfers are handles that only `wait` looks into."""

    def match(self, chain: KeyChain, /) -> PrefixMatch: ...

    def get(
        self, chain: KeyChain, out: Any, /, *, start: int = 0, stop: int | None = None, deadline_s: float | None = None
    ) -> Any: ...

    def put(
        self, chain: KeyChain, blocks: Any, /, *, start: int = 0, stop: int | None = None, sequence: bytes = b""
    ) -> Any: ...

    def hint(self, sequence: bytes, kind: Hint, /, *, seconds: float | None = None) -> None: ...

    def wait(self, transfer: Any, /, timeout_s: float | None = None) -> Sequence[Any]: ...
