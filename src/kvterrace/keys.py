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

import array
import contextlib
import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.layout import KVLayout

__all__ = ["KEY_NBYTES", "KeyChain", "Namespace", "chain_keys", "extend_keys"]

#: Bytes of a key. The whole digest is kept, so that crafted collisions stay out of reach.
KEY_NBYTES = 32

_U32 = struct.Struct("<I")
_BLOCK = b"kvterrace/block/1\0"


def _lp(data: bytes) -> bytes:
    return b"".join((_U32.pack(len(data)), data))  # `+` would be a subclass's, such as np.bytes_


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for one block of KV to stand in for another.

    Attributes:
        model: fingerprint of the weights: a hub commit, or a hash of the weight files. Not a name: names get new
            weights.
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
        for name in ("model", "codec", "numerics", "tenant"):
            _require_text(getattr(self, name), f"namespace: {name}")
        if not self.model:
            raise ConfigError("namespace: model must be a fingerprint of the weights, not empty")
        if not isinstance(self.layout, KVLayout):  # `asdict` would take any dataclass
            raise ConfigError(f"namespace: layout must be a KVLayout, not {self.layout!r}")
        object.__setattr__(self, "epoch", _epoch(self.epoch))
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
        """Parent of every first block, for `salt`.

        Raises:
            ConfigError: `salt` is not `bytes`.
        """
        _require_bytes(salt, "salt")
        return hashlib.sha256(b"kvterrace/root/1\0" + self.digest + _lp(self.tenant.encode()) + _lp(salt)).digest()


def _epoch(value: object) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= value < 2**32:
        return int(value)
    raise ConfigError(f"namespace: epoch must be a whole number in 0..2**32-1, not {value!r}")


def _require_text(value: object, name: str) -> None:
    """Refuse what has no UTF-8: other types, and text with half of a surrogate pair."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} {value!r} is no valid Unicode: {error.reason}") from error


def _require_namespace(value: object, name: str) -> None:
    if not isinstance(value, Namespace):
        raise ConfigError(f"{name} must be a Namespace, not a {type(value).__name__}")


def _require_bytes(value: object, name: str) -> None:
    if not isinstance(value, bytes):
        raise ConfigError(f"{name} must be bytes, not a {type(value).__name__}")


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
        _require_namespace(self.namespace, "key chain: namespace")
        _require_bytes(self.root, "key chain: root")
        _require_bytes(self.data, "key chain: data")
        if len(self.root) != KEY_NBYTES:
            raise ConfigError(f"key chain: root is {len(self.root)} bytes, a key is {KEY_NBYTES}")
        if len(self.data) % KEY_NBYTES:
            raise ConfigError(f"key chain: data is {len(self.data)} bytes, no multiple of {KEY_NBYTES}")

    def __len__(self) -> int:
        return len(self.data) // KEY_NBYTES

    def require_distinct(self) -> None:
        """No key comes twice. A key stands for its whole prefix, so that of a hash chain none does.

        Raises:
            ConfigError: one does.
        """
        firsts = np.sort(np.frombuffer(self.data, "<u8")[:: KEY_NBYTES // 8])  # `np.unique` takes ten times as long
        if (firsts[1:] == firsts[:-1]).any() and len(set(self)) < len(self):
            raise ConfigError("key chain: a key comes twice; each key must stand for its block and all before it")

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
        if not isinstance(cut, slice):
            raise TypeError(f"a key chain is cut, chain[:n]; for a single key, use chain.key({cut!r})")
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
        ConfigError: a token id out of range, the wrong number of extras, or a salt or an extra that is not `bytes`.
    """
    _require_namespace(namespace, "namespace")
    root = namespace.root_key(salt)
    return KeyChain(namespace, root, _hashed(namespace, root, tokens, extra))


def extend_keys(
    chain: KeyChain, tokens: Sequence[int] | np.ndarray, *, extra: bytes | Sequence[bytes] = b""
) -> KeyChain:
    """`chain` and the keys of the whole blocks of `tokens`, which follow on its last block: what `chain_keys` gives for
    all of them, at the cost of the new ones.

    Args:
        tokens: as of `chain_keys`, from the chain's end on.
        extra: as of `chain_keys`, for the new blocks.

    Raises:
        ConfigError: as `chain_keys`.
    """
    parent = chain.key(len(chain) - 1)
    return KeyChain(chain.namespace, chain.root, chain.data + _hashed(chain.namespace, parent, tokens, extra))


def _hashed(
    namespace: Namespace, parent: bytes, tokens: Sequence[int] | np.ndarray, extra: bytes | Sequence[bytes]
) -> bytes:
    """Keys of the whole blocks of `tokens`, the first of which follows on `parent`; end to end."""
    ids = _token_ids(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"tokens must be whole numbers of shape (n,), not {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise ConfigError(f"token ids must be in 0..2**32-1, found {int(ids.min())}..{int(ids.max())}")
    width = namespace.layout.block_tokens
    count = ids.size // width
    number = _U32.pack(width)
    middles: Iterable[bytes]
    if isinstance(extra, bytes):
        middles = itertools.repeat(_lp(extra) + number, count)
    else:
        middles = [_lp(each) + number for each in _extras(extra, count)]
    raw = ids[: count * width].astype("<u4").tobytes()
    # On the scheduler's thread, so one hash call for each block: everything but the parent is made before.
    head, step, sha256, keys = _BLOCK, width * 4, hashlib.sha256, []
    for start, middle in zip(range(0, len(raw), step), middles, strict=True):
        parent = sha256(head + parent + middle + raw[start : start + step]).digest()
        keys.append(parent)
    return b"".join(keys)


def _token_ids(tokens: Sequence[int] | np.ndarray) -> npt.NDArray[Any]:
    if isinstance(tokens, (list, tuple)) and tokens and not isinstance(tokens[0], bool):
        # Four times as fast as NumPy, which is left to say what is wrong.
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array.array("I", tokens), np.uintc)
    try:
        return np.asarray(tokens)
    except (ValueError, TypeError) as error:  # ragged, or of a kind that NumPy cannot read
        raise ConfigError(f"tokens must be whole numbers of shape (n,): {error}") from error


def _extras(extra: object, count: int) -> Sequence[bytes]:
    if not isinstance(extra, Sequence) or isinstance(extra, (str, bytearray, memoryview)):
        raise ConfigError(f"extra must be bytes or a sequence of bytes, not a {type(extra).__name__}")
    if len(extra) != count:
        raise ConfigError(f"{len(extra)} extras for {count} whole blocks: give one for each, or a single value")
    for index, each in enumerate(extra):
        if not isinstance(each, bytes):
            raise ConfigError(f"extra of block {index} must be bytes, not a {type(each).__name__}")
    return extra
