"""Which layers a model has, from a Hugging Face `config.json`: families with attention in every layer.

A family is a `model_type`. One that is not listed is refused, and so is a field that speaks of caching and that nobody
here reads: what a model really caches is not guessed. Sources: the configuration and modelling code of each family in
Transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvterrace.planner.families_known import (
    HARMLESS,
    MHA_IF_MISSING,
    MHA_ONLY,
    MULTI_QUERY,
    NEEDS_LAYER_TYPES,
    SUSPECT,
    WINDOWED,
)
from kvterrace.planner.fields import Fields
from kvterrace.planner.layers import Layer
from kvterrace.planner.params import FeedForward, attention_params, feed_forward, mla_params

__all__ = [
    "Shape",
    "attention_layer",
    "check_all_read",
    "head_dim",
    "latent_layer",
    "layer_kinds",
    "plain_layers",
    "with_ffn",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that all families have."""

    family: str
    layers: int
    hidden: int
    heads: int


def check_all_read(fields: Fields, family: str) -> None:
    """Refuse a field that speaks of caching and that nobody has read."""
    for name in fields.unread():
        value = fields.data[name]
        if SUSPECT.search(name) and name not in HARMLESS and value not in (None, False, 0, [], {}):
            fields.refuse(
                name, f"speaks of caching in a way that is not known of {family}: this model is not understood"
            )


def layer_kinds(fields: Fields, layers: int, rule: Callable[[int], str]) -> list[str]:
    """The kind of each layer: `layer_types` where it is there, else by `rule`."""
    listed = fields.items("layer_types")
    if not listed:
        return [rule(index) for index in range(layers)]
    if len(listed) != layers:
        fields.refuse("layer_types", f"names {len(listed)} layers of {layers}")
    return [str(kind) for kind in listed]


def attention_layer(shape: Shape, kv_heads: int, key_dim: int, value_dim: int, kind: str, window: int = 0) -> Layer:
    """A layer of multi-head or grouped-query attention, without its feed-forward network."""
    params = attention_params(shape.hidden, shape.heads, kv_heads, key_dim, value_dim)
    return Layer(
        kind, kv_heads, key_dim, value_dim, window,
        query_heads=shape.heads, qk_dim=key_dim, v_dim=value_dim, params=params, active_params=params,
    )  # fmt: skip


def latent_layer(fields: Fields, shape: Shape) -> Layer:
    """A layer of multi-head latent attention: one latent and one rotary key for a token, whatever the number of heads
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", least=0)
    params = mla_params(fields, shape.hidden, shape.heads)
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim"):  # of the expanded K and V, which is not cached
        fields.value(name)
    indexer = index_heads = chosen = 0
    if fields.has("index_topk"):
        chosen = fields.count("index_topk")
        indexer = fields.count("index_head_dim")
        index_heads = fields.count("index_n_heads")
        for name in ("indexer_types", "layer_types"):
            fields.value(name)
        params += (
            shape.hidden * indexer + fields.count("q_lora_rank") * index_heads * indexer + shape.hidden * index_heads
        )
    return Layer(
        "MLA latent with index" if indexer else "MLA latent", 1, rank + rope, 0, replicated=True, indexer_dim=indexer,
        index_heads=index_heads, chosen=chosen, query_heads=shape.heads,
        qk_dim=fields.count("qk_nope_head_dim") + rope, v_dim=fields.count("v_head_dim"),
        params=params, active_params=params,
    )  # fmt: skip


def with_ffn(layer: Layer, ffn: FeedForward) -> Layer:
    """The layer with its feed-forward network."""
    return replace(
        layer,
        params=layer.params + ffn.params,
        active_params=layer.active_params + ffn.active,
        experts=ffn.experts,
        experts_per_token=ffn.experts_per_token,
        expert_params=ffn.expert_params,
    )


def plain_layers(fields: Fields, shape: Shape) -> tuple[list[Layer], list[str]]:
    """Layers of a family in `PLAIN`, and notes."""
    family, heads = shape.family, shape.heads
    key_dim = head_dim(fields, shape)
    value_dim = fields.count("v_head_dim", default=key_dim)
    kv_heads = _kv_heads(fields, shape)
    if fields.flag("use_cla", default=False):
        fields.refuse("use_cla", "true: attention that shares KV across layers in this way is not understood")
    if "use_cla" in fields.data:
        fields.value("cla_share_factor")  # does nothing then
    if any(one != 1 for one in fields.items("attn_type_list")):
        fields.refuse("attn_type_list", f"names other layers than full attention, which are not known of {family}")
    kinds = _kinds(fields, shape)
    full = attention_layer(shape, kv_heads, key_dim, value_dim, "full attention")
    made = {"full_attention": full}
    if "sliding_attention" in kinds:
        made["sliding_attention"] = _sliding(fields, shape, full)
    if family == "gemma4_text":
        attending = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        made["full_attention"] = _gemma4_full(fields, shape, full, attending)
    if "chunked_attention" in kinds:
        chunk = fields.count("attention_chunk_size")
        made["chunked_attention"] = attention_layer(shape, kv_heads, key_dim, value_dim, "chunked attention", chunk)
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in made:
            fields.refuse("layer_types", f"layer {index} is {kind!r}, which is not known of {family}")
        layers.append(made[kind])
    ffn = feed_forward(fields, family, shape.hidden, shape.layers)
    layers = [with_ffn(layer, one) for layer, one in zip(layers, ffn, strict=True)]
    if heads % kv_heads:
        fields.refuse(fields.first("num_key_value_heads"), f"{kv_heads} KV heads do not divide {heads} attention heads")
    notes = []
    if family == "falcon" and 1 < kv_heads < heads:
        notes.append("as engines cache it, KV heads once; Transformers itself keeps K and V of every attention head")
    sharing = fields.count("num_kv_shared_layers", default=0, least=0)
    if sharing:
        if sharing >= shape.layers:
            fields.refuse("num_kv_shared_layers", f"{sharing} of {shape.layers} layers: none is left to share with")
        first = shape.layers - sharing
        layers[first:] = [
            replace(layer, kv_heads=0, shared=True, kind=f"shared, {layer.kind}") for layer in layers[first:]
        ]
        notes.append(f"the last {sharing} layers attend over earlier layers' KV and keep none")
    return layers, notes


def head_dim(fields: Fields, shape: Shape) -> int:
    """Elements of one head: as stated, or the hidden size divided over the heads."""
    name = fields.first("head_dim", "kv_channels", "attention_head_dim")
    if fields.has(name):
        return fields.count(name)
    if shape.hidden % shape.heads:
        fields.refuse("head_dim", f"missing, and hidden size {shape.hidden} is no multiple of {shape.heads} heads")
    return shape.hidden // shape.heads


def _kv_heads(fields: Fields, shape: Shape) -> int:
    name = fields.first("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups")
    if shape.family == "chatglm":
        grouped = fields.flag("multi_query_attention", default=False)
        return fields.count("multi_query_group_num") if grouped else shape.heads
    if shape.family in MULTI_QUERY:
        multi, new = fields.flag("multi_query", default=False), fields.flag("new_decoder_architecture", default=False)
        if not new:  # Falcon: the number of KV heads counts in the new architecture alone
            return 1 if multi else shape.heads
    if shape.family in MHA_ONLY or (not fields.has(name) and shape.family in MHA_IF_MISSING):
        return shape.heads
    return fields.count(name)


def _kinds(fields: Fields, shape: Shape) -> list[str]:
    family = shape.family
    every = fields.value(fields.first("sliding_window_pattern", "_sliding_window_pattern"))
    period = every if isinstance(every, int) and not isinstance(every, bool) and every > 0 else 0
    windowed = family in WINDOWED and (fields.has("sliding_window") or fields.has("sliding_window_size"))
    if "use_sliding_window" in fields.data:
        windowed = windowed and fields.flag("use_sliding_window", default=False)
    elif family in {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}:
        windowed = False  # class default of use_sliding_window
    first_windowed = fields.count("max_window_layers", default=0, least=0)
    rules: dict[str, Callable[[int], str]] = {
        "gemma2": lambda index: "full_attention" if index % 2 else "sliding_attention",
        "gpt_oss": lambda index: "full_attention" if index % 2 else "sliding_attention",
        "gemma3_text": _one_in(period or 6),
        "gemma3n_text": _one_in(5),
        "cohere2": _one_in(period or 4),
        "olmo3": _one_in(4),
        "exaone4": _one_in(period or 4),
        "qwen2": lambda index: "sliding_attention" if index >= first_windowed else "full_attention",
    }
    if family == "llama4_text":
        return _chunked_kinds(fields, shape)
    if family == "mimo_v2_flash" and fields.has("hybrid_layer_pattern"):
        pattern = fields.items("hybrid_layer_pattern")
        if len(pattern) != shape.layers:
            fields.refuse("hybrid_layer_pattern", f"{len(pattern)} of {shape.layers} layers")
        return ["sliding_attention" if one else "full_attention" for one in pattern]
    if not windowed:
        kinds = layer_kinds(fields, shape.layers, lambda _: "full_attention")
        if "sliding_attention" in kinds and "use_sliding_window" not in fields.data:
            fields.refuse("sliding_window", "missing, and layer_types names sliding attention")
        return ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    for same in ("qwen2_moe", "qwen3", "qwen3_moe", "dots1"):
        rules[same] = rules["qwen2"]
    if family in NEEDS_LAYER_TYPES and not fields.has("layer_types"):
        fields.refuse("layer_types", "missing: which layers slide is not known")
    return layer_kinds(fields, shape.layers, rules.get(family, lambda _: "sliding_attention"))


def _one_in(period: int) -> Callable[[int], str]:
    return lambda index: "sliding_attention" if (index + 1) % period else "full_attention"


def _chunked_kinds(fields: Fields, shape: Shape) -> list[str]:
    if "attention_chunk_size" in fields.data and not fields.has("attention_chunk_size"):
        return ["full_attention"] * shape.layers
    without_rope = fields.items("no_rope_layers")
    if without_rope and len(without_rope) != shape.layers:
        fields.refuse("no_rope_layers", f"{len(without_rope)} of {shape.layers} layers")
    period = fields.count("no_rope_layer_interval", default=4)

    def kind(index: int) -> str:
        chunked = bool(without_rope[index]) if without_rope else bool((index + 1) % period)
        return "chunked_attention" if chunked else "full_attention"

    return layer_kinds(fields, shape.layers, kind)


def _sliding(fields: Fields, shape: Shape, full: Layer) -> Layer:
    window = fields.count("sliding_window", "sliding_window_size")
    if not fields.has("sliding_window"):
        window += 1  # MiMo: the tokens before the query are counted, the query is not
    twice = 2 if shape.family == "mimo_v2_flash" else 1
    kv_heads = fields.count("swa_num_key_value_heads", default=twice * full.kv_heads)
    key_dim = fields.count("swa_head_dim", default=full.key_dim)
    value_dim = fields.count("swa_v_head_dim", default=full.value_dim)
    heads = fields.count("swa_num_attention_heads", default=shape.heads)
    return attention_layer(replace(shape, heads=heads), kv_heads, key_dim, value_dim, "sliding window", window)


def _gemma4_full(fields: Fields, shape: Shape, full: Layer, attending: list[int]) -> Layer:
    """Gemma 4: global layers have heads of another size, and with `attention_k_eq_v` another number of them. K and V
    are one projection there, and still two tensors in the cache: K is rotated, V is not.
    """
    changes = fields.section("per_layer_config")  # as Transformers 5 writes it: {"05": {"head_dim": 512}, ...}
    if changes is None:
        dim, kv_heads = fields.count("global_head_dim"), full.kv_heads
        own = fields.first("num_global_key_value_heads")
        if fields.flag("attention_k_eq_v", default=False):
            kv_heads = fields.count(own, default=kv_heads)
        return attention_layer(shape, kv_heads, dim, dim, "full attention")
    for name in ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"):
        fields.value(name)
    same = {str(value) for value in changes.data.values()}
    if [name.lstrip("0") or "0" for name in sorted(changes.data)] != [str(index) for index in attending] or len(
        same
    ) != 1:
        fields.refuse(
            "per_layer_config", "understood only where it changes all layers of full attention, and all alike"
        )
    one = changes.section(next(iter(changes.data)))
    if one is None or set(one.data) - {"head_dim", "num_key_value_heads"}:
        fields.refuse("per_layer_config", "understood only where it changes head_dim and num_key_value_heads")
    dim = one.count("head_dim", default=full.key_dim)
    return attention_layer(shape, one.count("num_key_value_heads", default=full.kv_heads), dim, dim, "full attention")
