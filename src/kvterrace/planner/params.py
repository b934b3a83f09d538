"""How many weights a layer has, from its configuration: the large matrices; norms and biases (under 0.1 %) are not.

Formulas: the shapes of the matrices in Hugging Face's public modelling code of each family.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.planner.fields import Fields

__all__ = ["FeedForward", "attention_params", "feed_forward", "mla_params"]

#: Families whose feed-forward network has two matrices; all others have three (a gate).
_UNGATED = frozenset({
    "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "nemotron",
    "nemotron_h", "codegen", "persimmon", "arcee", "apertus"
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Weights of one layer's feed-forward network; `shared` ones every token passes through."""

    shared: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0

    @property
    def params(self) -> int:
        """All of them."""
        return self.shared + self.experts * self.expert_params

    @property
    def active(self) -> int:
        """Those that one token passes through."""
        return self.shared + self.experts_per_token * self.expert_params


def attention_params(hidden: int, query_heads: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
    """Projections of Q, K, V and the output."""
    return hidden * (query_heads * (key_dim + value_dim) + kv_heads * (key_dim + value_dim))


def mla_params(fields: Fields, hidden: int, heads: int) -> int:
    """Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", least=0)
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    q_rank = fields.count("q_lora_rank", default=0, least=0)
    width = heads * (nope + rope)
    query = hidden * q_rank + q_rank * width if q_rank else hidden * width
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def feed_forward(fields: Fields, family: str, hidden: int, layers: int) -> list[FeedForward]:
    """The feed-forward network of each layer."""
    matrices = 2 if family in _UNGATED else 3
    experts_field = fields.first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = fields.count(experts_field, default=0, least=0)
    dense_width = _dense_width(fields, family, hidden, experts)
    if family == "granitemoehybrid" and not experts:
        dense_width = fields.count("shared_intermediate_size", default=dense_width)
    dense = FeedForward(shared=matrices * hidden * dense_width)
    if experts <= 1:
        return [dense] * layers
    chosen = fields.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
    if chosen > experts:
        fields.refuse("num_experts_per_tok", f"{chosen} of {experts} experts")
    width = fields.count("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size")
    expert = matrices * hidden * width
    shared = fields.count("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    shared += width * fields.count(
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert", default=0, least=0
    )
    if family == "llama4_text":
        shared, dense = width, FeedForward(shared=matrices * hidden * fields.count("intermediate_size_mlp"))
    router = hidden * experts
    sparse = FeedForward(matrices * hidden * shared + router, experts, chosen, expert)
    return [sparse if is_sparse else dense for is_sparse in _sparse_layers(fields, family, layers)]


def _dense_width(fields: Fields, family: str, hidden: int, experts: int) -> int:
    if family in {"gpt2", "gptj", "codegen", "gpt_bigcode", "bloom", "mpt", "falcon"}:
        return fields.count("n_inner", "ffn_hidden_size", default=4 * hidden)
    if family == "lfm2" and fields.has("block_ff_dim"):
        return _lfm2_width(fields)
    if family == "recurrent_gemma":
        return fields.count("intermediate_size", least=2) // 2
    name = fields.first("intermediate_size", "ffn_hidden_size", "ffn_dim", "moe_intermediate_size")
    return fields.count(name, default=0 if experts else None, least=0 if experts else 1)


def _lfm2_width(fields: Fields) -> int:
    """LFM2 states the width before two thirds of it are taken, and rounded up."""
    width = fields.count("block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        width = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
        multiple = fields.count("block_multiple_of", default=256)
        width = -(-width // multiple) * multiple
    return width


def _sparse_layers(fields: Fields, family: str, layers: int) -> list[bool]:
    kinds = fields.items("mlp_layer_types")
    if kinds:
        if len(kinds) != layers:
            fields.refuse("mlp_layer_types", f"{len(kinds)} of {layers} layers")
        return [kind != "dense" for kind in kinds]
    if family == "llama4_text":
        step = fields.count("interleave_moe_layer_step", default=1)
        listed = fields.items("moe_layers")
        return [index in listed if listed else (index + 1) % step == 0 for index in range(layers)]
    if family == "jamba":
        period, offset = fields.count("expert_layer_period"), fields.count("expert_layer_offset", least=0)
        return [index % period == offset for index in range(layers)]
    frequency = fields.value("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != layers:
            fields.refuse("moe_layer_freq", f"{len(frequency)} of {layers} layers")
        return [bool(one) for one in frequency]
    first = fields.count("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=0, least=0)
    only_dense = fields.items("mlp_only_layers")
    step = fields.count("decoder_sparse_step", default=1)
    every = fields.count("moe_layer_freq", default=1)
    return [
        index >= first and index not in only_dense and (index + 1) % step == 0 and index % every == 0
        for index in range(layers)
    ]
