"""The identity: bytes as they are. No error."""

from __future__ import annotations

from kvterrace.buffers import Bytes
from kvterrace.codecs.base import BadEncoding

__all__ = ["RawCodec"]


class RawCodec:
    """Codec 0. A caller that knows it may read straight into the part's place and skip `decode`."""

    name = "raw"
    codec_id = 0

    def encoded_nbytes(self, raw_nbytes: int) -> int:
        return raw_nbytes

    def encode(self, raw: Bytes, out: Bytes) -> int:
        out[: raw.nbytes] = raw
        return raw.nbytes

    def decode(self, encoded: Bytes, out: Bytes) -> BadEncoding | None:
        if encoded.nbytes != out.nbytes:
            return BadEncoding(f"raw part of {encoded.nbytes} B, expected {out.nbytes} B")
        out[:] = encoded
        return None
