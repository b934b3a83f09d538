"""What one model caches, layer by layer, and what it computes. No reading of configurations here: see `families`.

The unit of caching is a layer on one rank: some elements for each token up to a window, and a state of fixed size for
each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from kvterrace.errors import ConfigError
from kvterrace.layout import DTYPE_NBYTES

__all__ = ["Layer", "Model", "Parallel"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model.

    Attributes:
        kind: in words, for people: `full attention`, `sliding window`, `MLA latent`, `recurrent` ...
        kv_heads: heads whose K and V are cached; divided over tensor-parallel ranks. 0: no KV for each token.
        key_dim, value_dim: elements of K and of V that one head caches for a token. A latent has `key_dim` alone.
        window: tokens kept at most; 0 keeps all. A sliding window, or the chunk of chunked attention.
        replicated: every tensor-parallel rank holds the whole (the latent of MLA has no heads to divide).
        state: elements of a recurrent state for each sequence, divided over tensor-parallel ranks.
        state_nbytes_per_element: of that state.
        conv: elements of a convolution's state for each sequence, in the KV's dtype.
        query_heads, qk_dim, v_dim: of the attention that is computed, for FLOPs; 0 heads: no attention.
        shared: attends over the KV of an earlier layer, and caches none.
        indexer_dim: elements of an index key for each token (sparse attention of DeepSeek-V3.2); replicated.
        index_heads, chosen: heads that compare with index keys, and tokens that attention then reads; 0 reads all.
        params, active_params: weights, and those that one token passes through.
        experts, experts_per_token: routed experts, 0 if there are none.
        expert_params: weights of one routed expert.
    """

    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    replicated: bool = False
    state: int = 0
    state_nbytes_per_element: int = 4
    conv: int = 0
    query_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    shared: bool = False
    indexer_dim: int = 0
    index_heads: int = 0
    chosen: int = 0
    params: int = 0
    active_params: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0

    def kept_tokens(self, tokens: int) -> int:
        """Tokens of a sequence of `tokens` that this layer keeps."""
        return min(tokens, self.window) if self.window else tokens

    def elements_per_token(self, tp: int = 1) -> int:
        """Elements cached for one token on one of `tp` ranks."""
        heads = self.kv_heads if self.replicated else -(-self.kv_heads // tp)
        return heads * (self.key_dim + self.value_dim) + self.indexer_dim

    def read_elements(self, tokens: int, tp: int = 1) -> int:
        """Elements that one rank reads to decode a token behind `tokens`: all that is kept; where tokens are chosen,
        those, and all index keys.
        """
        kept = self.kept_tokens(tokens)
        index = self.indexer_dim * kept
        return (self.elements_per_token(tp) - self.indexer_dim) * min(kept, self.chosen or kept) + index

    def state_nbytes(self, kv_nbytes: int, tp: int = 1) -> int:
        """Bytes of a sequence's state on one of `tp` ranks; `kv_nbytes` for each element of the convolution's."""
        return -(-self.state // tp) * self.state_nbytes_per_element + -(-self.conv // tp) * kv_nbytes

    @property
    def caches(self) -> bool:
        """Whether anything is kept for a sequence."""
        return bool(self.kv_heads or self.state or self.conv or self.indexer_dim)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How one instance of a model lies over accelerators: tensor-parallel ranks times pipeline stages."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Accelerators of one instance."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Model:
    """A model, as far as memory and time depend on it.

    Attributes:
        name, source: what it is called, and where the figures are from.
        layers: in order.
        kv_dtype: element type of the KV, a key of `DTYPE_NBYTES`.
        weights_nbytes: of all weights, as they are loaded.
        experts_nbytes: of the routed experts among them.
        embedding_params: weights outside the layers: embeddings and output.
        output_params: of the output projection, passed through once for each token that is generated.
        max_context: longest sequence in tokens; 0 if it is not known.
        notes: what to know about this model's caching.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    kv_dtype: str
    weights_nbytes: int
    embedding_params: int
    output_params: int
    max_context: int = 0
    notes: tuple[str, ...] = ()
    experts_nbytes: int = 0

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of KV."""
        return DTYPE_NBYTES[self.kv_dtype]

    @cached_property
    def params(self) -> int:
        """All weights, in number."""
        return self.embedding_params + sum(layer.params for layer in self.layers)

    @cached_property
    def active_params(self) -> int:
        """Weights that one token is multiplied with: layers' active ones, and the output projection."""
        return self.output_params + sum(layer.active_params for layer in self.layers)

    @cached_property
    def experts_params(self) -> int:
        """Weights of all routed experts."""
        return sum(layer.experts * layer.expert_params for layer in self.layers)

    def touched_nbytes(self, tokens: int) -> float:
        """Bytes of weights that a step over `tokens` tokens reads: all but the experts that none of them was sent to.

        Tokens choose experts independently and evenly, so an expert is left out with (1 - k/E)^tokens: a
        simplification, real routing is skewed and touches fewer. Of the embeddings only the output projection is read.
        """
        total = float(self.weights_nbytes - self.experts_nbytes)
        if self.params > self.experts_params:
            unread = self.embedding_params - self.output_params
            total *= 1 - unread / (self.params - self.experts_params)
        if self.experts_params:
            for layer in self.layers:
                if layer.experts:
                    chosen = 1 - (1 - layer.experts_per_token / layer.experts) ** tokens
                    share = layer.experts * layer.expert_params / self.experts_params
                    total += chosen * share * self.experts_nbytes
        return total

    @cached_property
    def recurrent(self) -> bool:
        """Whether a sequence has a state that cannot be cut at any token."""
        return any(layer.state or layer.conv for layer in self.layers)

    def check(self, parallel: Parallel) -> None:
        """Refuse ranks over which this model cannot be divided. Raises ConfigError."""
        if parallel.pp > len(self.layers):
            raise ConfigError(f"--pp {parallel.pp}: {self.name} has {len(self.layers)} layers: give fewer stages")
        for layer in self.layers:
            heads, queries = layer.kv_heads, layer.query_heads
            if queries and queries % parallel.tp:
                raise ConfigError(
                    f"--tp {parallel.tp}: {self.name} has {queries} attention heads, no multiple of it: give a divisor"
                )
            if heads and not layer.replicated and heads % parallel.tp and parallel.tp % heads:
                raise ConfigError(
                    f"--tp {parallel.tp}: {self.name} has {heads} KV heads, neither a multiple nor a divisor of it: "
                    "give another"
                )

    def stages(self, pp: int) -> list[tuple[Layer, ...]]:
        """Layers of each pipeline stage: as equal as can be, the first ones larger."""
        size, more = divmod(len(self.layers), pp)
        bounds = [stage * size + min(stage, more) for stage in range(pp + 1)]
        return [self.layers[first:last] for first, last in pairwise(bounds)]

    def nbytes_per_token(self, tokens: int = 1, tp: int = 1) -> int:
        """Bytes that the `tokens`-th token adds, on one of `tp` ranks: layers whose window is full add none."""
        elements = sum(
            layer.elements_per_token(tp) for layer in self.layers if not layer.window or tokens <= layer.window
        )
        return elements * self.element_nbytes

    def sequence_nbytes(self, tokens: int, tp: int = 1, layers: Sequence[Layer] | None = None) -> int:
        """Bytes that a sequence of `tokens` keeps on one of `tp` ranks, in `layers` (all of them by default)."""
        total = 0
        for layer in self.layers if layers is None else layers:
            total += layer.elements_per_token(tp) * layer.kept_tokens(tokens) * self.element_nbytes
            total += layer.state_nbytes(self.element_nbytes, tp)
        return total

    def held_nbytes(self, tokens: int, parallel: Parallel) -> int:
        """Bytes that a sequence takes on all ranks of an instance, replicas counted."""
        return parallel.tp * self.sequence_nbytes(tokens, parallel.tp)

    def read_nbytes(self, tokens: int, tp: int) -> int:
        """Bytes that all ranks read to decode a token of a sequence of `tokens`: what they hold or choose of it."""
        total = 0
        for layer in self.layers:
            total += layer.read_elements(tokens, tp) * self.element_nbytes
            total += layer.state_nbytes(self.element_nbytes, tp)
        return tp * total

    def fullest_rank_nbytes(self, tokens: int, parallel: Parallel) -> int:
        """Bytes that a sequence takes on the rank that holds most of it."""
        return max(self.sequence_nbytes(tokens, parallel.tp, stage) for stage in self.stages(parallel.pp))
