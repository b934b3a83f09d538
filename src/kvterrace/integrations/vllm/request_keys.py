"""The chain of keys of one request: its tokens, and all else that vLLM takes for part of a prefix.

vLLM's own block hashes are not used: they are salted by PYTHONHASHSEED where that is set, pickle what they hash, and
know neither weights nor layout. What goes into them does go into these keys, in an encoding of its own. An adapter's
files are hashed besides: its name and path stay while what they stand for may not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvterrace.keys import KeyChain, Namespace, chain_keys, extend_keys

__all__ = ["RequestKeys", "encode_extra"]

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


class RequestKeys:
    """Grows with the tokens of one request. Not thread-safe: the scheduler's."""

    def __init__(
        self,
        request: Any,
        namespace: Namespace,
        adapter: bytes,
        extra_keys: Callable[..., Any] = generate_block_hash_extra_keys,
    ) -> None:
        """`adapter`: digest of the LoRA adapter's files, b"" without one."""
        self._request = request
        self._width = namespace.layout.block_tokens
        self._adapter = adapter
        self._plain = not (
            request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None
        )
        self._extra_keys = extra_keys
        self._next_image = 0
        self.chain: KeyChain = chain_keys(namespace, [])

    def upto(self, blocks: int) -> KeyChain:
        """The first `blocks` blocks of the chain; fewer if the request does not know all their tokens.

        Raises:
            TypeError: vLLM hashes something of a kind that this encoding does not know.
        """
        known = min(blocks, self._request.num_tokens // self._width)
        have = len(self.chain)
        if known > have:
            tokens = self._request.all_token_ids[have * self._width : known * self._width]
            extras = b"" if self._plain else [self._extra(block) for block in range(have, known)]
            self.chain = extend_keys(self.chain, list(tokens), extra=extras)
        return self.chain if len(self.chain) <= blocks else self.chain[:blocks]

    def _extra(self, block: int) -> bytes:
        start = block * self._width
        found, self._next_image = self._extra_keys(self._request, start, start + self._width, self._next_image)
        if found is None and not self._adapter:
            return b""
        return encode_extra((self._adapter, *(found or ())))


def encode_extra(value: Any) -> bytes:
    """Bytes, text, whole numbers and None, and tuples or lists of these, so that no two values have one encoding.

    Raises:
        TypeError: another kind.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"o" + bytes([value])
        case int():
            return b"i" + _I64.pack(value)
        case bytes():
            return b"b" + _U32.pack(len(value)) + value
        case str():
            text = value.encode()
            return b"s" + _U32.pack(len(text)) + text
        case tuple() | list():
            return b"t" + _U32.pack(len(value)) + b"".join(map(encode_extra, value))
        case _:
            raise TypeError(f"part of a block's hash of an unknown kind: {type(value).__name__}")
