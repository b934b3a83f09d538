"""Keys: a chain of SHA-256 hashes over a specified encoding, the same in every process and on every machine.

Encoding, version 1 (all integers little-endian; `u32(x)` is 4 bytes, `lp(b)` is `u32(len(b))` followed by `b`):

    namespace digest = SHA-256("kvterrace/namespace/1" NUL  lp(utf8(canonical JSON of the namespace)))
    root             = SHA-256("kvterrace/root/1" NUL  namespace digest  lp(utf8(tenant))  lp(salt))
    key of block i   = SHA-256("kvterrace/block/1" NUL  parent key  lp(extra of block i)  u32(n)  n x u32(token id))

where the parent of block 0 is the root. The namespace's canonical JSON has sorted keys, no spaces, ASCII only. So a key
stands for its whole prefix, in one namespace, for one tenant and salt; keys of different namespaces never match.
Why SHA-256 and not BLAKE3: see docs/adr/0002.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from kvterrace.errors import ConfigError
from kvterrace.layout import KVLayout

__all__ = ["KEY_NBYTES", "KeyChain", "Namespace", "chain_keys"]

#: Bytes of a key. The whole digest is kept, so that crafted collisions stay out of reach.
KEY_NBYTES = 32

_U32 = struct.Struct("<I")


def _lp(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for one block of KV to stand in for another.

    Attributes:
        model: fingerprint of the weights: a hub commit, or a hash of the weight files. Not a name: names get new weights.
        layout: what the model caches.
        epoch: generation of the weights; raise it when they change in place (training, `update_weights`).
        codec: how payloads are encoded in the slow tiers.
        numerics: whatever else changes the numbers: attention implementation, RoPE scaling override, engine.
        tenant: who may share. Blocks of two tenants never match; use the same tenant to share on purpose.
    """

    model: str
    layout: KVLayout
    epoch: int = 0
    codec: str = "raw"
    numerics: str = ""
    tenant: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("namespace: model must be a fingerprint of the weights, not empty")
        if not 0 <= self.epoch < 2**32:
            raise ConfigError(f"namespace: epoch {self.epoch} is not in 0..2**32-1")
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        hashed = hashlib.sha256(b"kvterrace/namespace/1\0" + _lp(text.encode("ascii"))).digest()
        object.__setattr__(self, "digest", hashed)

    def describe(self) -> dict[str, object]:
        """The namespace as plain data, as it is hashed and as `namespaces/*.json` keeps it."""
        return {
            "model": self.model,
            "layout": asdict(self.layout),
            "epoch": self.epoch,
            "codec": self.codec,
            "numerics": self.numerics,
            "tenant": self.tenant,
        }

    def root_key(self, salt: bytes = b"") -> bytes:
        """Parent of every first block, for `salt`."""
        return hashlib.sha256(b"kvterrace/root/1\0" + self.digest + _lp(self.tenant.encode()) + _lp(salt)).digest()


@dataclass(frozen=True, slots=True)
class KeyChain:
    """Keys of consecutive blocks from the first block on: `len(chain)` keys of 32 bytes, end to end in `data`.

    Immutable; cheap to slice from the front (`chain[:n]`). A chain always starts at block 0, since a block is only
    of use with its whole prefix.
    """

    namespace: Namespace
    root: bytes
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % KEY_NBYTES or len(self.root) != KEY_NBYTES:
            raise ConfigError(f"key chain: {len(self.data)} bytes is no multiple of {KEY_NBYTES}")

    def __len__(self) -> int:
        return len(self.data) // KEY_NBYTES

    def key(self, index: int) -> bytes:
        """Key of block `index`; index -1 is the root."""
        if index == -1:
            return self.root
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} is not in a chain of {len(self)}")
        return self.data[index * KEY_NBYTES : (index + 1) * KEY_NBYTES]

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[i : i + KEY_NBYTES] for i in range(0, len(self.data), KEY_NBYTES))

    def __getitem__(self, cut: slice) -> KeyChain:
        start, stop, step = cut.indices(len(self))
        if start != 0 or step != 1:
            raise IndexError("a key chain can only be cut at its end: chain[:n]")
        return KeyChain(self.namespace, self.root, self.data[: stop * KEY_NBYTES])


def chain_keys(
    namespace: Namespace,
    tokens: Sequence[int] | np.ndarray,
    *,
    salt: bytes = b"",
    extra: bytes | Sequence[bytes] = b"",
) -> KeyChain:
    """Keys of the whole blocks of `tokens`; a trailing partial block has none.

    Args:
        namespace: model, layout and tenant.
        tokens: token ids from position 0, each in 0..2**32-1, shape `(n,)`.
        salt: kept apart from other salts (a `cache_salt`).
        extra: what else decides the KV: one value for all blocks (a LoRA's hash) or one for each whole block
            (hashes of the images behind placeholder tokens).

    Raises:
        ConfigError: a token id out of range, or the wrong number of extras.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"tokens must be whole numbers of shape (n,), not {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise ConfigError(f"token ids must be in 0..2**32-1, found {int(ids.min())}..{int(ids.max())}")
    width = namespace.layout.block_tokens
    count = ids.size // width
    extras = [extra] * count if isinstance(extra, bytes) else list(extra)
    if len(extras) != count:
        raise ConfigError(f"{len(extras)} extras for {count} whole blocks: give one for each, or a single value")
    raw = ids[: count * width].astype("<u4").tobytes()
    root = parent = namespace.root_key(salt)
    keys = []
    for i in range(count):
        body = b"".join(
            (b"kvterrace/block/1\0", parent, _lp(extras[i]), _U32.pack(width), raw[i * width * 4 : (i + 1) * width * 4])
        )
        parent = hashlib.sha256(body).digest()
        keys.append(parent)
    return KeyChain(namespace, root, b"".join(keys))
