"""What a codec is: bytes of one part in, bytes out, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvterrace.buffers import Bytes

__all__ = ["BadEncoding", "Codec"]


@dataclass(frozen=True, slots=True)
class BadEncoding:
    """Bytes that this codec did not write, or not for this size."""

    reason: str


class Codec(Protocol):
    """Encodes one part at a time. Stateless; any thread; blocks on no I/O. Never keeps a view."""

    @property
    def name(self) -> str:
        """As in `Namespace.codec`."""
        ...

    @property
    def codec_id(self) -> int:
        """As in a record's header: 0..65535, never used again for another encoding."""
        ...

    def encoded_nbytes(self, raw_nbytes: int) -> int:
        """Most bytes that a part of `raw_nbytes` bytes can take encoded."""
        ...

    def encode(self, raw: Bytes, out: Bytes) -> int:
        """Write `raw` encoded to the front of `out` (at least `encoded_nbytes` long); returns the bytes written."""
        ...

    def decode(self, encoded: Bytes, out: Bytes) -> BadEncoding | None:
        """Fill `out`, exactly the part's raw bytes, from `encoded`; None if filled. Never raises on any bytes."""
        ...
