"""`PrefixCache`: restore the KV of a prompt's known prefix into a `DynamicCache`, compute the rest, store what is
new."""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvterrace.errors import ConfigError, KVTerraceError, LayoutError, UnsupportedModelError
from kvterrace.integrations.transformers.memory import HostMemory, carve, carved_nbytes
from kvterrace.integrations.transformers.model import (
    cache_argument,
    check_cache,
    examine,
    layer_tensors,
    new_cache,
)
from kvterrace.integrations.transformers.namespace import namespace_for_model
from kvterrace.integrations.transformers.protocol import PrefixStore
from kvterrace.integrations.transformers.report import BlockFault, RestoreReport, StoreReport, Tally, fault_words
from kvterrace.integrations.transformers.roomy import Room, RoomyLayer
from kvterrace.integrations.transformers.tokens import token_rows
from kvterrace.integrations.transformers.views import block_parts
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.types import Hint, Hit, Present, Stored, Tier

__all__ = ["PrefixCache"]

_log = logging.getLogger("kvterrace.transformers")

# Mistakes of the caller (or of this module); every other fault of the store a request outlives, by computing.
_MISTAKES = (ConfigError, LayoutError, UnsupportedModelError)

# Blocks handed over in one transfer: what is copied from an accelerator at a time.
_PUT_BLOCKS = 32
_SEQUENCE_NBYTES = 16


class PrefixCache:
    """KV of one model's prompts on a store's ladder.

    Exact: a restored block holds the bytes that were stored, and its key stands for all that decides them (see
    `namespace`). Logits after a restore are bit-equal to those of a run that prefilled everything with the same
    `chunk_tokens`, batch size and threads, if the restored length is a multiple of `chunk_tokens` (always so where
    `chunk_tokens == block_tokens`) and the restored blocks came from such a prefill. Otherwise the rest is computed in
    matrix products of another shape, and so were answer
    tokens, which decoding computed one by one: logits then differ by rounding (about 1e-4 seen in float32), as they do
    between any two ways to cut one prompt.

    Not thread-safe: one thread uses it, like the model. The store may be shared.
    """

    def __init__(
        self,
        store: PrefixStore,
        model: Any,
        *,
        block_tokens: int = 64,
        chunk_tokens: int = 512,
        fingerprint: str | None = None,
        epoch: int = 0,
        tenant: str = "",
        salt: bytes = b"",
        reserve_tokens: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Look at `model` (a few short forward passes) and fingerprint its weights. Blocks: seconds for a large model.

        Args:
            store: an open `Store`; stays the caller's to close.
            model: a causal language model in eval mode. Its weights must not change while this object is in use.
            block_tokens: tokens in a block: the grain of reuse.
            chunk_tokens: grid of `prefill`, a multiple of `block_tokens`. Larger is faster, and part of the namespace.
            fingerprint: names the weights, e.g. a hub commit, where the caller knows that they are as published; None
                hashes what is in memory.
            epoch, tenant: see `Namespace`. salt: keeps apart what should not be shared, see `chain_keys`.
            reserve_tokens: take the memory for this many tokens (prompt, answer; of all rows) now, and fault it in, so
                that a restore need not: for a server. One cache at a time uses it. Only for models on the CPU.
            on_progress: called with (bytes hashed, bytes in all).

        Raises:
            UnsupportedModelError: the model's caching is not understood.
            ConfigError: `chunk_tokens` does not fit.
        """
        if chunk_tokens < 1 or block_tokens < 1 or chunk_tokens % block_tokens:
            raise ConfigError(f"chunk_tokens {chunk_tokens} must be a multiple of block_tokens {block_tokens}")
        self.layout: KVLayout
        self.layout, self._in_place = examine(model, block_tokens=block_tokens)
        self.namespace: Namespace = namespace_for_model(
            model,
            self.layout,
            chunk_tokens=chunk_tokens,
            fingerprint=fingerprint,
            epoch=epoch,
            tenant=tenant,
            on_progress=on_progress,
        )
        self.chunk_tokens = chunk_tokens
        self._cache_argument = cache_argument(model)
        self._store = store
        self._model = model
        self._salt = salt
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._dtype: torch.dtype = getattr(torch, self.layout.dtype)
        on_cpu = reserve_tokens and model.device.type == "cpu"
        self._memory = HostMemory(carved_nbytes(self._shapes(1, reserve_tokens), self._dtype) if on_cpu else 0)

    def cache_arguments(self, cache: Any) -> dict[str, Any]:
        """How `model.generate` and `model.forward` take `cache` in this version of Transformers, as keyword arguments.

        `use_cache` among them: with it off (the default of some configs), `generate` feeds all tokens again at every
        step.
        """
        return {self._cache_argument: cache, "use_cache": True}

    def chain(self, tokens: Sequence[int]) -> KeyChain:
        """Keys of the whole blocks of one row."""
        return chain_keys(self.namespace, tokens, salt=self._salt)

    def restore(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        deadline_s: float | None = None,
        spare_tokens: int = 256,
    ) -> tuple[Any, RestoreReport]:
        """Fill a new `DynamicCache` with the longest stored prefix. Blocks until the bytes are there.

        At least the last token is left to compute. Rows of a batch are chains of their own; all get the length of the
        shortest hit. A block that turns out missing, corrupt or late cuts the prefix before it; a failing store
        restores nothing. Neither raises.

        Args:
            input_ids: token ids, `[tokens]` or `[batch, tokens]`, a tensor or nested sequences. No padding.
            attention_mask: only checked to be free of zeros.
            deadline_s: give up on blocks that take longer, see `Store.get`.
            spare_tokens: room in the cache for an answer of so many tokens; a longer one moves it to a larger room.

        Returns:
            (cache, report): pass `cache` to `prefill`, or go on with
            `model.generate(input_ids, **prefix.cache_arguments(cache))`.

        Raises:
            ConfigError: rows of unequal length, padding, or no token.
        """
        began_s = time.monotonic()
        rows = token_rows(input_ids, attention_mask)
        length = len(rows[0])
        limit = (length - 1) // self.layout.block_tokens
        chains = [self.chain(row)[:limit] for row in rows]
        room_tokens = length + max(0, spare_tokens)
        try:
            blocks = min(self._store.match(chain).blocks for chain in chains) if limit else 0
            if not blocks:
                cache = self._cache(len(rows), room_tokens)
                return cache, RestoreReport(length, 0, elapsed_s=time.monotonic() - began_s)
            tensors = self._allocate(len(rows), blocks, room_tokens)
            outcomes = self._read(chains, tensors, blocks, deadline_s)
        except _MISTAKES:
            raise
        except (KVTerraceError, OSError) as error:
            _log.warning("restore of %d tokens failed, they will be computed: %s", length, error)
            cache = self._cache(len(rows), room_tokens)
            return cache, RestoreReport(length, 0, elapsed_s=time.monotonic() - began_s, error=str(error))
        good = min(_leading_hits(row) for row in outcomes)
        faults = tuple(
            BlockFault(row, block, outcome)
            for row, found in enumerate(outcomes)
            for block, outcome in enumerate(found)
            if not isinstance(outcome, Hit)
        )
        if faults:
            _log.warning("%s did not arrive; tokens from block %d on will be computed", fault_words(faults), good)
        cache = self._cache(len(rows), room_tokens, tensors, good * self.layout.block_tokens)
        tiers: Counter[Tier] = Counter()
        for found in outcomes:
            tiers.update(outcome.tier for outcome in found[:good])
        width = self.layout.block_tokens
        return cache, RestoreReport(
            tokens=length,
            restored_tokens=good * width,
            tier_tokens={tier: count * width for tier, count in sorted(tiers.items())},
            nbytes=good * len(rows) * self.layout.block_nbytes,
            elapsed_s=time.monotonic() - began_s,
            faults=faults,
        )

    def prefill(
        self, input_ids: Any, cache: Any, *, on_progress: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """Compute the tokens of `input_ids` that `cache` does not hold yet, in chunks that end at multiples of
        `chunk_tokens`.

        Args:
            input_ids: as for `restore`, longer than what `cache` holds.
            cache: from `restore` for the same tokens, or empty; extended in place.
            on_progress: called with (tokens in the cache, tokens in all) after each chunk.

        Returns:
            Logits of the last token, `[batch, vocabulary]`.
        """
        rows = token_rows(input_ids, None)
        ids = torch.tensor(rows, dtype=torch.long, device=self._model.device)
        length, done = ids.shape[1], int(cache.get_seq_length())
        if done >= length:
            raise ConfigError(
                f"the cache holds {done} tokens of a prompt of {length}: at least the last one must be computed"
            )
        while done < length:
            stop = min(length, (done // self.chunk_tokens + 1) * self.chunk_tokens)
            logits = self.step(ids[:, done:stop], cache)
            done = stop
            if on_progress is not None:
                on_progress(done, length)
        return logits

    def step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """One forward pass over `ids` `[batch, n]` after what `cache` holds; logits of the last token `[batch,
        vocabulary]`."""
        arguments: dict[str, Any] = self.cache_arguments(cache)
        if self._last_only:
            arguments["logits_to_keep"] = 1
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=ids, **arguments).logits
        return logits[:, -1]

    def store(self, input_ids: Any, cache: Any, *, attention_mask: Any = None, sequence: bytes = b"") -> StoreReport:
        """Store the whole blocks of `cache` that the store does not have. Blocks until the store has copied them.

        Args:
            input_ids: the tokens whose KV `cache` holds, prompt and answer; more tokens than the cache holds are
                ignored (the last generated one was never fed).
            cache: a `DynamicCache` of this model.
            sequence: the conversation or document, laid out together on the SSD: its first 16 bytes count; by default
                the first block's key.

        Raises:
            ConfigError: rows of unequal length, padding, or fewer tokens than the cache holds.
            UnsupportedModelError: another kind of cache, or of another shape.
        """
        began_s = time.monotonic()
        rows = token_rows(input_ids, attention_mask)
        check_cache(cache, self._model.config)
        held = int(cache.get_seq_length())
        if held > len(rows[0]):
            raise ConfigError(f"the cache holds {held} tokens, input_ids names only {len(rows[0])} of them")
        whole = held // self.layout.block_tokens
        if not whole:
            return StoreReport(0)
        tensors = layer_tensors(cache)
        self._check_tensors(tensors, len(rows))
        tally = Tally(whole * len(rows), self.layout.block_nbytes)
        try:
            for number, row in enumerate(rows):
                chain = self.chain(row)[:whole]
                first = self._store.match(chain).blocks
                tally.present += first
                self._write(chain, tensors, number, first, (sequence or chain.key(0))[:_SEQUENCE_NBYTES], tally)
        except _MISTAKES:
            raise
        except (KVTerraceError, OSError) as error:
            _log.warning("storing %d tokens failed: %s", held, error)
            tally.error = str(error)
        return tally.report(time.monotonic() - began_s)

    def hint(self, input_ids: Any, kind: Hint, *, seconds: float | None = None, sequence: bytes = b"") -> None:
        """Tell the store what is known of a conversation's future, e.g. `Hint.CLOSED` when a session ends; see
        `Store.hint`. A store that fails is not told, and nothing else happens.

        Args:
            input_ids: tokens that begin as those given to `store` did, one block at least; fewer say nothing.
            sequence: as given to `store`.

        Raises:
            ConfigError: rows of unequal length, padding, or what is no hint.
        """
        for row in token_rows(input_ids, None):
            if len(row) < self.layout.block_tokens:
                continue
            name = (sequence or self.chain(row[: self.layout.block_tokens]).key(0))[:_SEQUENCE_NBYTES]
            try:
                self._store.hint(name, kind, seconds=seconds)
            except _MISTAKES:
                raise
            except (KVTerraceError, OSError) as error:
                _log.warning("the store was not told %s: %s", kind, error)

    def _shapes(self, batch: int, tokens: int) -> list[tuple[int, int, int, int]]:
        """Of the tensors of a cache, one a part: `[batch, kv_heads, tokens, head_dim]`."""
        return [(batch, heads, tokens, dim) for heads, _, dim in self.layout.part_shapes] * self.layout.layers

    def _allocate(self, batch: int, blocks: int, room_tokens: int) -> list[torch.Tensor]:
        """CPU tensors of any content to restore into, in one piece of memory. Where the model is on the CPU, they are
        the cache to be, room and all; else they are pinned, for the way to the accelerator."""
        on_cpu = self._model.device.type == "cpu"
        tokens = room_tokens if on_cpu and self._in_place else blocks * self.layout.block_tokens
        shapes = self._shapes(batch, tokens)
        nbytes = carved_nbytes(shapes, self._dtype)
        pin = self._model.device.type == "cuda"
        flat = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pin else self._memory.take(nbytes)
        return carve(flat, shapes, self._dtype)

    def _read(
        self, chains: Sequence[KeyChain], tensors: Sequence[torch.Tensor], blocks: int, deadline_s: float | None
    ) -> list[list[Any]]:
        """Outcomes of every block of every row. All rows are in flight at once, and none when this returns or
        raises."""
        transfers: list[Any] = []
        try:
            for row, chain in enumerate(chains):
                out = block_parts(tensors, row, 0, blocks, self.layout.block_tokens)
                transfers.append(self._store.get(chain[:blocks], out, start=0, stop=blocks, deadline_s=deadline_s))
        finally:
            outcomes = [list(self._store.wait(transfer)) for transfer in transfers]
        return outcomes

    def _cache(self, batch: int, room_tokens: int, restored: Sequence[torch.Tensor] = (), tokens: int = 0) -> Any:
        """A new `DynamicCache` that holds the first `tokens` of `restored` and has room for `room_tokens` in all."""
        cache, device = new_cache(self._model.config), self._model.device
        if not self._in_place:
            for number, layer in enumerate(cache.layers if tokens else ()):
                key, value = (
                    one[:, :, :tokens].to(device).contiguous() for one in restored[2 * number : 2 * number + 2]
                )
                # `update` would join them to an empty tensor: one more copy of everything.
                layer.lazy_initialization(key, value)
                layer.keys, layer.values = key, value
            return cache
        if device.type == "cpu":
            rooms = [Room(one, tokens) for one in restored or self._allocate(batch, 0, room_tokens)]
        else:
            shapes = self._shapes(batch, room_tokens)
            rooms = [Room(torch.empty(shape, dtype=self._dtype, device=device)) for shape in shapes]
            for room, one in zip(rooms, restored, strict=False):
                room.append(one[:, :, :tokens])
        cache.layers = [RoomyLayer(pair) for pair in zip(rooms[::2], rooms[1::2], strict=True)]
        return cache

    def _check_tensors(self, tensors: Sequence[torch.Tensor], batch: int) -> None:
        shapes = list(self.layout.part_shapes) * self.layout.layers
        if len(tensors) != len(shapes):
            raise UnsupportedModelError(
                f"the cache has {len(tensors) // 2} layers, the model's layout has {self.layout.layers}"
            )
        for number, (tensor, (heads, _, dim)) in enumerate(zip(tensors, shapes, strict=True)):
            found = (tensor.shape[0], tensor.shape[1], tensor.shape[3], str(tensor.dtype).removeprefix("torch."))
            if found != (batch, heads, dim, self.layout.dtype):
                raise UnsupportedModelError(
                    f"layer {number // 2} of the cache holds {tuple(tensor.shape)} {tensor.dtype}; expected "
                    f"[{batch}, {heads}, "
                    f"tokens, {dim}] {self.layout.dtype}"
                )

    def _write(
        self, chain: KeyChain, tensors: Sequence[torch.Tensor], row: int, first: int, sequence: bytes, tally: Tally
    ) -> None:
        """Hand over blocks `first..` of one row, some at a time; stop at the first that is not taken: its heirs hang
        on it."""
        while first < len(chain):
            stop = min(len(chain), first + _PUT_BLOCKS)
            parts = self._host_parts(tensors, row, first, stop)
            outcomes = self._store.wait(self._store.put(chain, parts, start=first, stop=stop, sequence=sequence))
            for outcome in outcomes:
                if not isinstance(outcome, (Stored, Present)):
                    tally.miss(row, first, len(chain) - first, outcome)
                    return
                tally.count(outcome)
                first += 1

    def _host_parts(self, tensors: Sequence[torch.Tensor], row: int, start: int, stop: int) -> list[Any]:
        width = self.layout.block_tokens
        if self._model.device.type == "cpu":
            return block_parts(tensors, row, start, stop, width)
        cut = [tensor[row : row + 1, :, start * width : stop * width].cpu() for tensor in tensors]
        return block_parts(cut, 0, 0, stop - start, width)


def _leading_hits(outcomes: Sequence[Any]) -> int:
    return next((i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Hit)), len(outcomes))
