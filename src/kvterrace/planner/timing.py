"""How long prefill and decoding take, from a count of FLOPs and bytes (the roofline model: Williams, Waterman and
Patterson, CACM 52(4), 2009). What is left out: communication between accelerators, kernel launches, scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.planner.hardware import Accelerator
from kvterrace.planner.layers import Layer, Model, Parallel

__all__ = ["Engine", "Sparse", "attended_tokens", "prefill_flops"]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sparse decoding: each step reads the KV of `tokens` tokens of a sequence, not of all (Quest, arXiv 2406.10774;
    DeepSeek-V3.2 takes 2,048). Digests to choose them by take `digest` of the KV.
    """

    tokens: int = 2048
    digest: float = 1 / 32


def attended_tokens(cached: int, new: int, window: int) -> int:
    """Tokens that `new` tokens attend to, added up, behind `cached` ones: the i-th attends to cached + i, itself
    included, or to `window` of them at most.
    """
    if not window:
        return new * cached + new * (new + 1) // 2
    growing = min(new, max(0, window - cached))  # tokens whose window is not full yet
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def _attention_flops(layer: Layer, cached: int, new: int) -> int:
    """Q K^T and its product with V: 2 FLOPs for each element (FlashAttention, arXiv 2205.14135, counts the same). Where
    tokens are chosen, attention over these, and the choice over all (DeepSeek-V3.2, arXiv 2512.02556).
    """
    pairs = attended_tokens(cached, new, layer.chosen or layer.window)
    choice = 2 * layer.index_heads * layer.indexer_dim * attended_tokens(cached, new, 0)
    return 2 * layer.query_heads * (layer.qk_dim + layer.v_dim) * pairs + choice


def prefill_flops(model: Model, cached: int, new: int) -> tuple[int, int]:
    """FLOPs of the matrices and of attention, to compute `new` tokens behind `cached` ones.

    Matrices: 2 for each weight and token (Kaplan et al., arXiv 2001.08361, section 2.1), the output projection for the
    last token alone. Attention: causal, see `attended_tokens`.
    """
    matrices = 2 * new * (model.active_params - model.output_params) + 2 * model.output_params
    return matrices, sum(_attention_flops(layer, cached, new) for layer in model.layers)


@dataclass(frozen=True, slots=True)
class Engine:
    """One instance of a model on some of a machine's accelerators. Times in seconds, bandwidths in bytes a second."""

    model: Model
    accelerator: Accelerator
    parallel: Parallel

    @property
    def memory_bytes_per_s(self) -> float:
        """Of the ranks of a stage, as far as decoding reaches it: a token passes the stages one after the other."""
        one = self.accelerator
        return self.parallel.tp * one.memory_bytes_per_s * one.memory_efficiency

    @property
    def matrix_flops(self) -> float:
        """FLOP/s on the weights: 8-bit ones where the weights have about 8 bits and the accelerator is faster there."""
        one = self.accelerator
        eight = 0.9 < self.model.weights_nbytes / self.model.params < 1.3
        peak = max(one.flops, one.flops_8bit) if eight else one.flops
        return self.parallel.ranks * peak * one.compute_efficiency

    @property
    def attention_flops(self) -> float:
        """FLOP/s in attention: 16 bit."""
        return self.parallel.ranks * self.accelerator.flops * self.accelerator.compute_efficiency

    def prefill_s(self, cached: int, new: int) -> float:
        """To compute `new` tokens of one prompt behind `cached` ones: arithmetic or reading weights, the longer. With
        pipeline stages in chunks, on which all stages work at a time; filling the pipeline is not counted.
        """
        if new <= 0:
            return 0.0
        matrices, attention = prefill_flops(self.model, cached, new)
        compute = matrices / self.matrix_flops + attention / self.attention_flops
        return max(compute, self.model.touched_nbytes(new) / self.memory_bytes_per_s)

    def step_s(self, running: int, tokens: int) -> float:
        """Of one decoding step over `running` sequences of `tokens` each, exact, all KV in HBM: every weight that is
        used and every byte of active KV is read once; of models that choose tokens themselves, what they choose. Each
        pipeline stage has its part of the sequences at a time, and a token is there when all stages were passed.
        """
        group = self._group(running)
        kv = group * self.model.read_nbytes(tokens, self.parallel.tp)
        read = (self.model.touched_nbytes(group) + kv) / self.memory_bytes_per_s
        return max(read, self._step_compute_s(group, tokens))

    def sparse_step_s(self, running: int, tokens: int, sparse: Sparse) -> float:
        """The same where each layer of full attention reads `sparse.tokens` tokens and the digests of all."""
        group = self._group(running)
        read = group * self.model.held_nbytes(min(tokens, sparse.tokens), Parallel(self.parallel.tp))
        digests = group * self.model.held_nbytes(tokens, Parallel(self.parallel.tp)) * sparse.digest
        moved = (self.model.touched_nbytes(group) + read + digests) / self.memory_bytes_per_s
        return max(moved, self._step_compute_s(group, min(tokens, sparse.tokens)))

    def _group(self, running: int) -> int:
        """Sequences that pass the pipeline's stages together."""
        return -(-running // self.parallel.pp)

    def _step_compute_s(self, group: int, tokens: int) -> float:
        attention = sum(_decode_flops(layer, tokens) for layer in self.model.layers)
        return (
            group
            * self.parallel.pp
            * (2 * self.model.active_params / self.matrix_flops + attention / self.attention_flops)
        )


def _decode_flops(layer: Layer, tokens: int) -> int:
    """Attention of one new token. A latent is attended to as it is, by every head (DeepSeek-V2, section 2.1.2)."""
    kept = layer.kept_tokens(tokens)
    choice = 2 * layer.index_heads * layer.indexer_dim * kept
    kept = min(kept, layer.chosen or kept)
    if layer.replicated and layer.query_heads:
        return 2 * layer.query_heads * 2 * layer.key_dim * kept + choice
    return 2 * layer.query_heads * (layer.qk_dim + layer.v_dim) * kept + choice
