"""Families in which some layers keep a recurrent state of fixed size, or a convolution's, instead of KV for each token.

A state is counted in float32 unless the configuration says otherwise, a convolution's in the KV's dtype, with as many
columns as its kernel has (Transformers keeps these; vLLM one less). Sources: Mamba-2, arXiv 2405.21060; Gated
DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692; Griffin, arXiv 2402.19427; the modelling code of each family
in Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from kvterrace.planner.families import Shape, attention_layer, head_dim, latent_layer, layer_kinds, with_ffn
from kvterrace.planner.fields import Fields
from kvterrace.planner.layers import Layer
from kvterrace.planner.params import FeedForward, feed_forward

__all__ = ["HYBRID"]

_Layers = tuple[list[Layer], list[str]]
_RECURRENT = {"linear_attention", "mamba", "recurrent", "mamba2"}
_STATE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _full(fields: Fields, shape: Shape) -> Layer:
    dim, kv_heads = head_dim(fields, shape), fields.count("num_key_value_heads")
    if shape.heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{kv_heads} KV heads do not divide {shape.heads} attention heads")
    return attention_layer(shape, kv_heads, dim, dim, "full attention")


def _state_size(fields: Fields) -> int:
    name = fields.first("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    dtype = fields.text(name, "float32")
    if dtype not in _STATE_NBYTES:
        fields.refuse(name, f"{dtype!r} is unknown; known: {', '.join(_STATE_NBYTES)}")
    return _STATE_NBYTES[dtype]


def _recurrent(fields: Fields, kind: str, state: int, conv: int, params: int) -> Layer:
    return Layer(
        kind, state=state, conv=conv, state_nbytes_per_element=_state_size(fields), params=params, active_params=params
    )


def _mamba(fields: Fields, shape: Shape) -> Layer:
    """Mamba (arXiv 2312.00752): a state of d_inner x d_state."""
    inner = shape.hidden * fields.count("mamba_expand", "expand", default=2)
    if shape.family in {"mamba", "falcon_mamba"}:
        inner = fields.count("intermediate_size", default=inner)
    states = fields.count("mamba_d_state", "state_size", default=16)
    columns = fields.count("mamba_d_conv", "conv_kernel", default=4)
    rank = fields.value(fields.first("mamba_dt_rank", "time_step_rank"))
    steps = rank if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0 else -(-shape.hidden // 16)
    params = shape.hidden * 3 * inner + inner * (steps + 2 * states) + steps * inner + inner * states
    return _recurrent(fields, "Mamba state", inner * states, inner * columns, params)


def _mamba2(fields: Fields, shape: Shape) -> Layer:
    """Mamba-2: a state of heads x head_dim x d_state."""
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    dim_field = fields.first("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    inner = fields.count("mamba_d_ssm", default=0, least=0)
    if isinstance(fields.value(dim_field), str):  # "auto"
        expanded = inner or shape.hidden * fields.count("mamba_expand", "expand", default=2)
        dim = max(1, expanded // heads)
    else:
        dim = fields.count(dim_field)
    inner = heads * dim
    groups = fields.count("mamba_n_groups", "mamba_ngroups", "n_groups")
    states = fields.count("mamba_d_state", "ssm_state_size", "state_size")
    columns = fields.count("mamba_d_conv", "conv_kernel")
    for name in ("mamba_expand", "expand", "mamba_chunk_size"):
        fields.value(name)
    params = shape.hidden * (2 * inner + 2 * groups * states + heads) + inner * shape.hidden
    return _recurrent(fields, "Mamba-2 state", heads * dim * states, (inner + 2 * groups * states) * columns, params)


def _gated_delta(fields: Fields, shape: Shape) -> Layer:
    """Gated DeltaNet: a matrix of key_dim x value_dim for each value head."""
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    columns = fields.count("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    params = shape.hidden * (2 * keys + 2 * values + 2 * value_heads) + values * shape.hidden
    state = value_heads * key_dim * value_dim
    return _recurrent(fields, "gated delta state", state, (2 * keys + values) * columns, params)


def _build(fields: Fields, shape: Shape, kinds: list[str], made: Mapping[str, Callable[[], Layer]]) -> list[Layer]:
    ready: dict[str, Layer] = {}
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in made:
            fields.refuse("layer_types", f"layer {index} is {kind!r}, which is not known of {shape.family}")
        if kind not in ready:
            ready[kind] = made[kind]()
        layers.append(ready[kind])
    return layers


def _with_all(fields: Fields, shape: Shape, layers: list[Layer]) -> list[Layer]:
    ffn = feed_forward(fields, shape.family, shape.hidden, shape.layers)
    return [with_ffn(layer, one) for layer, one in zip(layers, ffn, strict=True)]


def _qwen3_next(fields: Fields, shape: Shape) -> _Layers:
    every = fields.count("full_attention_interval", default=4)
    kinds = layer_kinds(fields, shape.layers, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    full = _full(fields, shape)
    gate = shape.hidden * shape.heads * full.key_dim  # the output gate is as wide as Q
    full = replace(full, params=full.params + gate, active_params=full.params + gate)
    made = {"full_attention": lambda: full, "linear_attention": lambda: _gated_delta(fields, shape)}
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _jamba(fields: Fields, shape: Shape) -> _Layers:
    period, offset = fields.count("attn_layer_period"), fields.count("attn_layer_offset", least=0)
    kinds = layer_kinds(fields, shape.layers, lambda i: "attention" if i % period == offset else "mamba")
    made = {name: lambda: _mamba(fields, shape) for name in _RECURRENT}
    made.update({name: lambda: _full(fields, shape) for name in ("attention", "full_attention")})
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _mamba2_hybrid(fields: Fields, shape: Shape) -> _Layers:
    """Bamba and Granite 4: Mamba-2 layers, a few of full attention."""
    indices = fields.items("attn_layer_indices")
    if not indices and not fields.has("layer_types"):
        fields.refuse("layer_types", "missing, and attn_layer_indices too: which layers attend is not known")
    kinds = layer_kinds(fields, shape.layers, lambda i: "attention" if i in indices else "mamba")
    made = {name: lambda: _mamba2(fields, shape) for name in _RECURRENT}
    made.update({name: lambda: _full(fields, shape) for name in ("attention", "full_attention")})
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _falcon_h1(fields: Fields, shape: Shape) -> _Layers:
    """Attention and Mamba-2 side by side in every layer."""
    full, state = _full(fields, shape), _mamba2(fields, shape)
    both = replace(
        full, kind="full attention and Mamba-2 state", state=state.state, conv=state.conv,
        state_nbytes_per_element=state.state_nbytes_per_element, params=full.params + state.params,
        active_params=full.params + state.params,
    )  # fmt: skip
    return _with_all(fields, shape, [both] * shape.layers), []


def _nemotron_h(fields: Fields, shape: Shape) -> _Layers:
    """One block a layer: Mamba-2 (M), attention (*), a feed-forward network (-) or experts (E)."""
    words = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
    if fields.has("hybrid_override_pattern"):
        kinds = [words.get(one, one) for one in fields.text("hybrid_override_pattern")]
    else:
        kinds = [str(one) for one in fields.items(fields.first("layers_block_type", "layer_types"))]
    if len(kinds) != shape.layers:
        fields.refuse(
            fields.first("hybrid_override_pattern", "layers_block_type"), f"{len(kinds)} of {shape.layers} layers"
        )
    width = fields.count("intermediate_size")
    dense = FeedForward(shared=2 * shape.hidden * width)

    def experts() -> Layer:
        one = 2 * shape.hidden * fields.count("moe_intermediate_size")
        shared = 2 * shape.hidden * fields.count("moe_shared_expert_intermediate_size", default=0, least=0)
        sparse = FeedForward(shared, fields.count("n_routed_experts"), fields.count("num_experts_per_tok"), one)
        return with_ffn(Layer("experts"), sparse)

    made: dict[str, Callable[[], Layer]] = {name: lambda: _mamba2(fields, shape) for name in _RECURRENT}
    made.update({name: lambda: _full(fields, shape) for name in ("attention", "full_attention")})
    made.update({"mlp": lambda: with_ffn(Layer("feed-forward"), dense), "moe": experts})
    return _build(fields, shape, kinds, made), []


def _minimax(fields: Fields, shape: Shape) -> _Layers:
    """MiniMax-01 (arXiv 2501.08313): lightning attention, whose state is head_dim x head_dim for each head."""
    dim = head_dim(fields, shape)
    pattern = fields.items("attn_type_list")
    if not pattern and not fields.has("layer_types"):
        fields.refuse("layer_types", "missing, and attn_type_list too: which layers attend is not known")
    if pattern and len(pattern) != shape.layers:
        fields.refuse("attn_type_list", f"{len(pattern)} of {shape.layers} layers")
    kinds = layer_kinds(fields, shape.layers, lambda i: "full_attention" if pattern[i] else "linear_attention")
    width = shape.heads * dim
    made = {
        "full_attention": lambda: _full(fields, shape),
        "linear_attention": lambda: _recurrent(
            fields, "lightning state", shape.heads * dim * dim, 0, 5 * shape.hidden * width
        ),
    }
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _kimi_linear(fields: Fields, shape: Shape) -> _Layers:
    """Kimi Delta Attention in three layers of four, MLA in the fourth."""
    section = fields.section("linear_attn_config")
    if section is not None:
        # Counts layers from 1.
        full = section.items("full_attn_layers")
        kinds = ["full_attention" if index + 1 in full else "linear_attention" for index in range(shape.layers)]
        heads, dim = section.count("num_heads"), section.count("head_dim")
        columns = section.count("short_conv_kernel_size")
    else:
        if not fields.has("layer_types"):
            fields.refuse("layer_types", "missing, and linear_attn_config too: which layers attend is not known")
        kinds = layer_kinds(fields, shape.layers, lambda _: "full_attention")
        heads, dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
        columns = fields.count("linear_conv_kernel_dim")
    width = heads * dim
    params = 4 * shape.hidden * width + 2 * dim * (shape.hidden + width) + shape.hidden * heads
    made = {
        "full_attention": lambda: latent_layer(fields, shape),
        "linear_attention": lambda: _recurrent(fields, "delta state", heads * dim * dim, 3 * width * columns, params),
    }
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _recurrent_gemma(fields: Fields, shape: Shape) -> _Layers:
    pattern = [str(one) for one in fields.items(fields.first("block_types", "_block_types"))]
    if not pattern:
        fields.refuse("block_types", "missing: which layers attend is not known")
    kinds = [pattern[index % len(pattern)] for index in range(shape.layers)]
    width = fields.count("lru_width", default=shape.hidden)
    columns = fields.count("conv1d_width") - 1
    window = fields.count("attention_window_size")
    full = _full(fields, shape)
    recurrent_params = 3 * shape.hidden * width + 2 * width * width // shape.heads
    made = {
        "attention": lambda: replace(full, window=window, kind="sliding window"),
        "recurrent": lambda: _recurrent(fields, "RG-LRU state", width, width * columns, recurrent_params),
    }
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _lfm2(fields: Fields, shape: Shape) -> _Layers:
    """LFM2: short convolutions, a few layers of full attention."""
    attending = fields.items("full_attn_idxs")
    if not attending and not fields.has("layer_types"):
        fields.refuse("layer_types", "missing, and full_attn_idxs too: which layers attend is not known")
    kinds = layer_kinds(fields, shape.layers, lambda i: "full_attention" if i in attending else "conv")
    conv = shape.hidden * fields.count("conv_L_cache")
    made = {
        "full_attention": lambda: _full(fields, shape),
        "conv": lambda: _recurrent(fields, "convolution state", 0, conv, 4 * shape.hidden * shape.hidden),
    }
    return _with_all(fields, shape, _build(fields, shape, kinds, made)), []


def _zamba2(fields: Fields, shape: Shape) -> _Layers:
    """Zamba2 (arXiv 2411.15242): Mamba-2 layers; before some of them a transformer block of twice the width, of which
    there are few, used in turn. Each use has KV of its own.
    """
    kinds = [str(one) for one in fields.items("layers_block_type")]
    if len(kinds) != shape.layers:
        fields.refuse("layers_block_type", f"names {len(kinds)} layers of {shape.layers}")
    for name in ("hybrid_layer_ids", "kv_channels", "num_query_groups", "attention_hidden_size"):
        fields.value(name)  # follow from the others
    wide, inner = 2 * shape.hidden, fields.count("intermediate_size", default=4 * shape.hidden)
    dim = fields.count("attention_head_dim", default=max(1, wide // shape.heads))
    kv_heads = fields.count("num_key_value_heads", default=shape.heads)
    block = wide * dim * (shape.heads + 2 * kv_heads) + shape.heads * dim * shape.hidden + 3 * shape.hidden * inner
    rank = fields.count("adapter_rank", default=128)
    own = shape.hidden * shape.hidden + rank * (shape.hidden + 2 * inner)
    if fields.flag("use_shared_attention_adapter", default=False):
        own += 6 * rank * wide
    blocks, uses = fields.count("num_mem_blocks", default=1), max(1, kinds.count("hybrid"))
    state, full = _mamba2(fields, shape), attention_layer(shape, kv_heads, dim, dim, "full attention")
    both = replace(
        full, kind="full attention and Mamba-2 state", state=state.state, conv=state.conv,
        state_nbytes_per_element=state.state_nbytes_per_element,
        params=state.params + own + blocks * block // uses, active_params=state.params + own + block,
    )  # fmt: skip
    made: dict[str, Callable[[], Layer]] = {name: lambda: state for name in _RECURRENT}
    made["hybrid"] = lambda: both
    return _build(fields, shape, kinds, made), []


def _pure_mamba(fields: Fields, shape: Shape) -> _Layers:
    return [_mamba(fields, shape)] * shape.layers, []


def _pure_mamba2(fields: Fields, shape: Shape) -> _Layers:
    return [_mamba2(fields, shape)] * shape.layers, []


#: The reader of each family.
HYBRID: Mapping[str, Callable[[Fields, Shape], _Layers]] = MappingProxyType(
    {
        "qwen3_next": _qwen3_next,
        "qwen3_5_text": _qwen3_next,
        "qwen3_5_moe_text": _qwen3_next,
        "jamba": _jamba,
        "bamba": _mamba2_hybrid,
        "granitemoehybrid": _mamba2_hybrid,
        "falcon_h1": _falcon_h1,
        "nemotron_h": _nemotron_h,
        "minimax": _minimax,
        "kimi_linear": _kimi_linear,
        "recurrent_gemma": _recurrent_gemma,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "zamba2": _zamba2,
        "mamba": _pure_mamba,
        "falcon_mamba": _pure_mamba,
        "mamba2": _pure_mamba2,
    }
)
