"""What a Transformers model caches, as a `KVLayout`; models whose caching is not understood are refused, never guessed.

A model chooses its cache like this in the supported range: `generate` and `forward` make `DynamicCache(config=...)`,
which takes one layer class for each entry of `layer_types` (or infers them from `sliding_window` and
`attention_chunk_size`). Only `DynamicLayer` keeps K and V of every token; sliding layers drop old tokens, linear ones
keep a state that stands for all tokens. Some architectures bring a cache of their own. So the config is checked first,
for a message that names the field, then the cache that the model really makes, then the tensors in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from kvterrace.errors import UnsupportedModelError
from kvterrace.integrations.transformers.roomy import Room, RoomyLayer
from kvterrace.layout import DTYPE_NBYTES, KVLayout

__all__ = [
    "cache_argument",
    "check_cache",
    "dtype_name",
    "examine",
    "layer_tensors",
    "layout_from_config",
    "layout_from_model",
    "new_cache",
]

# RoPE whose frequencies depend on the length of the prompt would give one prefix several K.
_STATIC_ROPE = {"default", "linear", "yarn", "llama3", "proportional"}

# Fields of models that keep something else than K and V of every token, or share them between layers.
_FOREIGN_FIELDS = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "cross_attention_layers",
    "full_attn_idxs",
    "index_topk",
    "kv_sharing_modes",
    "layers_block_type",
    "lru_width",
    "mamba_d_state",
    "mem_len",
    "num_kv_shared_layers",
    "ssm_cfg",
    "state_size",
    "use_bidirectional_attention",
)

_TRIAL_TOKENS = 6
# Further trials where the first does not convince. Near a tie, rounding decides what a model says: logits of SmolLM2 in
# bfloat16 differ by all they are for some prompts and cuts, and not at all for others. A cache that is not understood
# shows in every trial.
_MORE_TRIALS = (8, 16, 32, 64)


def cache_argument(model: Any) -> str:
    """Name of the argument of `model.forward` and `model.generate` that takes the cache: `cache` (5.24),
    `past_key_values` (5.16)."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(f"{_name(model.config)}: forward() takes no cache; kvterrace cannot restore into it")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`; raises UnsupportedModelError for what no layout holds."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_NBYTES:
        raise UnsupportedModelError(f"KV of dtype {name} is not supported; known: {', '.join(DTYPE_NBYTES)}")
    return name


def layout_from_config(config: Any, *, dtype: torch.dtype | str, block_tokens: int) -> KVLayout:
    """The layout that a model of `config` will cache in, without the model.

    For planning. `layout_from_model` is the authority: it also looks at what a real model puts into its cache.

    Args:
        config: a `PreTrainedConfig`.
        dtype: of the KV, normally the dtype that the model computes in.
        block_tokens: tokens in a block.

    Raises:
        UnsupportedModelError: the cache is not one K and one V for every token and layer, or is not understood.
    """
    check_config(config)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{_name(config)}: kv_lora_rank={config.kv_lora_rank}: what MLA caches is told by the model, not by the "
            "config: "
            "use layout_from_model"
        )
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int):
        raise UnsupportedModelError(
            f"{_name(config)}: no single num_attention_heads and num_hidden_layers: not a plain attention model"
        )
    # Falcon names its KV heads in its own way; a plain `num_key_value_heads` is what every other family has.
    if getattr(config, "multi_query", False) or getattr(config, "new_decoder_architecture", False):
        raise UnsupportedModelError(
            f"{_name(config)}: multi_query: KV heads are told by the model: use layout_from_model"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    check_cache(new_cache(config), config, layers=layers)
    return KVLayout(
        layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        dtype=dtype if isinstance(dtype, str) else dtype_name(dtype),
        block_tokens=block_tokens,
        attention="full",
        order="hnd",
    )


def layout_from_model(model: Any, *, block_tokens: int) -> KVLayout:
    """The layout that `model` really caches in: runs a few tokens through it and looks at the cache it makes.

    A few short forward passes. They also show that going on from a cached prefix gives the logits of the whole prompt.

    Raises:
        UnsupportedModelError: as `layout_from_config`, or the cache that the model made differs from what was
            understood.
    """
    return examine(model, block_tokens=block_tokens)[0]


def examine(model: Any, *, block_tokens: int) -> tuple[KVLayout, bool]:
    """The layout, as `layout_from_model`; and whether `model` computes the same bits on a cache of `RoomyLayer`s."""
    config = model.config
    check_config(config)
    _check_state(model)
    argument = cache_argument(model)
    ids = (torch.arange(_TRIAL_TOKENS, device=model.device) + 1).remainder(int(config.vocab_size)).unsqueeze(0)
    try:
        whole, split, last = _trial(model, config, argument, ids)
        same_bits = _is_same_on_rooms(model, config, argument, ids, last)
    except (RuntimeError, IndexError, ValueError) as error:
        reason = _short(str(error).splitlines()[0])
        raise UnsupportedModelError(f"{_name(config)}: a trial of {_TRIAL_TOKENS} tokens failed: {reason}") from error
    layout = _layout_of(layer_tensors(getattr(whole, argument)), config, block_tokens)
    _check_going_on(model, config, argument, (getattr(whole, argument), whole.logits, split, last.logits))
    return layout, same_bits


def _check_going_on(model: Any, config: Any, argument: str, first: tuple[Any, Any, Any, Any]) -> None:
    """Raises UnsupportedModelError unless going on from a cached prefix does what the whole prompt does.

    K and V of layer 0 follow from a token and its place alone, so they must agree in every trial. Deeper layers and
    logits need to agree in one trial only, see `_MORE_TRIALS`.
    """
    # Rounding of half precision, some steps of it.
    bound = 1e-2 if layer_tensors(first[0])[0].element_size() >= 4 else 1e-1
    smallest = float("inf")
    for tokens in (_TRIAL_TOKENS, *_MORE_TRIALS):
        if tokens == _TRIAL_TOKENS:
            cache, logits, split, last = first
        else:
            ids = (torch.arange(tokens, device=model.device) * 7919 + 13).remainder(int(config.vocab_size))
            try:
                whole, split, output = _trial(model, config, argument, ids.unsqueeze(0))
            except (RuntimeError, IndexError, ValueError):  # longer than the model's context
                break
            cache, logits, last = getattr(whole, argument), whole.logits, output.logits
        wants, gots = layer_tensors(cache), layer_tensors(split)
        if any(want.shape != got.shape for want, got in zip(wants, gots, strict=True)):
            raise UnsupportedModelError(
                f"{_name(config)}: a cache filled in two steps has other shapes than one filled at once: its cache is "
                "not understood"
            )
        apart = max(_difference(want, got) for want, got in zip(wants[:2], gots[:2], strict=True))
        if not apart <= bound:
            raise UnsupportedModelError(
                f"{_name(config)}: going on from a cached prefix changes K and V of the first layer by "
                f"{100 * apart:.2g} %: its cache is not understood"
            )
        parts = [_difference(want, got) for want, got in zip(logits[0, tokens // 2 :], last[0], strict=True)]
        difference = sorted(parts)[len(parts) // 2]  # of most tokens: one may be near a tie
        if difference <= bound:
            return
        smallest = min(smallest, difference)
    raise UnsupportedModelError(
        f"{_name(config)}: going on from a cached prefix changes the logits by {100 * smallest:.2g} %: its cache is "
        "not understood"
    )


def _difference(want: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference, of the largest of `want`; infinite where there are no numbers."""
    want, got = want.float(), got.float()
    found = float((want - got).abs().max()) / max(float(want.abs().max()), 1e-6)
    return found if found == found else float("inf")


def _trial(model: Any, config: Any, argument: str, ids: Any) -> tuple[Any, Any, Any]:
    """Output for all of `ids`; a cache filled with their halves one after the other; output for the second half."""
    half = ids.shape[1] // 2
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=True)
        made = getattr(whole, argument, None)
        if made is None:
            raise UnsupportedModelError(f"{_name(config)}: use_cache=True gave no cache: there is nothing to store")
        check_cache(made, config)
        split = new_cache(config)
        model(input_ids=ids[:, :half], use_cache=True, **{argument: split})
        last = model(input_ids=ids[:, half:], use_cache=True, **{argument: split})
    return whole, split, last


def _is_same_on_rooms(model: Any, config: Any, argument: str, ids: Any, plain: Any) -> bool:
    """Whether the second half of `ids` gives the logits of `plain` where K and V are views with room behind them."""
    half = ids.shape[1] // 2
    cache, roomy = new_cache(config), new_cache(config)
    with torch.no_grad():
        model(input_ids=ids[:, :half], use_cache=True, **{argument: cache})
        roomy.layers = [RoomyLayer([_with_room(layer.keys), _with_room(layer.values)]) for layer in cache.layers]
        try:
            last = model(input_ids=ids[:, half:], use_cache=True, **{argument: roomy})
        except RuntimeError:  # a `view` that wants one piece of memory
            return False
    return bool(torch.equal(last.logits, plain.logits))


def _with_room(tensor: torch.Tensor) -> Room:
    room = Room(tensor.new_empty((*tensor.shape[:2], 2 * _TRIAL_TOKENS, tensor.shape[3])))
    room.append(tensor)
    return room


def new_cache(config: Any) -> Any:
    """The empty `DynamicCache` that Transformers makes for `config`; raises UnsupportedModelError where it cannot."""
    try:
        return DynamicCache(config=config)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{_name(config)}: Transformers makes no DynamicCache for it ({error!r})"
        ) from error


def check_cache(cache: Any, config: Any, *, layers: int | None = None) -> None:
    """Raises UnsupportedModelError unless `cache` is a plain `DynamicCache` of plain `DynamicLayer`s (or of ours), one
    a layer."""
    if type(cache) is not DynamicCache:
        raise UnsupportedModelError(
            f"{_name(config)}: cache class {type(cache).__name__} is not supported, only DynamicCache (no static, "
            "quantized, "
            "sliding, recurrent or encoder-decoder cache)"
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedModelError(
            f"{_name(config)}: offloading caches are not supported; make the cache without offloading"
        )
    for number, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, RoomyLayer):
            raise UnsupportedModelError(
                f"{_name(config)}: cache layer {number} is a {type(layer).__name__}, only DynamicLayer (full "
                "attention) is supported"
            )
    if layers is not None and len(cache.layers) != layers:
        raise UnsupportedModelError(
            f"{_name(config)}: num_hidden_layers={layers}, but its cache has {len(cache.layers)} layers"
        )


def layer_tensors(cache: Any) -> list[torch.Tensor]:
    """K of layer 0, V of layer 0, K of layer 1, ... of a filled `DynamicCache`: the order of a layout's parts."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _layout_of(tensors: Sequence[torch.Tensor], config: Any, block_tokens: int) -> KVLayout:
    key, value = tensors[0], tensors[1]
    for number, tensor in enumerate(tensors):
        like = value if number % 2 else key
        if tensor.ndim != 4 or tensor.shape != like.shape or tensor.dtype != key.dtype:
            raise UnsupportedModelError(
                f"{_name(config)}: layer {number // 2} caches {tuple(tensor.shape)} {tensor.dtype} where the first "
                "caches "
                f"{tuple(like.shape)} {key.dtype}; layers that differ are not supported"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != 1 or key.shape[2] != _TRIAL_TOKENS:
        raise UnsupportedModelError(
            f"{_name(config)}: cached K {tuple(key.shape)} and V {tuple(value.shape)} are not [batch, kv_heads, "
            "tokens, head_dim]"
        )
    return KVLayout(
        layers=len(tensors) // 2,
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        dtype=dtype_name(key.dtype),
        block_tokens=block_tokens,
        value_head_dim=0 if value.shape[3] == key.shape[3] else value.shape[3],
        attention="mla" if getattr(config, "kv_lora_rank", None) else "full",
        order="hnd",
    )


def check_config(config: Any) -> None:
    """Raises UnsupportedModelError, naming the model type and the field, for a config that kvterrace does not
    understand."""
    name = _name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: is_encoder_decoder=True: encoder-decoder models are not supported")
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True):
        raise UnsupportedModelError(f"{name}: is_decoder=False: only causal models have KV that a prefix decides")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(
            f"{name}: text_config: multimodal and composed models are not supported, only text models"
        )
    kinds = getattr(config, "layer_types", None)
    for kind in kinds or ():
        if kind != "full_attention":
            raise UnsupportedModelError(f"{name}: layer_types has {kind!r}: only full_attention layers are supported")
    window = getattr(config, "sliding_window", None)
    if window is not None and not kinds and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(f"{name}: sliding_window={window}: only full attention is supported")
    for field in _FOREIGN_FIELDS:
        value = getattr(config, field, None)
        if value:
            raise UnsupportedModelError(
                f"{name}: {field}={_short(value)}: only one K and V for every token and layer is supported"
            )
    for where, kind in _rope_types(config):
        if kind not in _STATIC_ROPE:
            raise UnsupportedModelError(
                f"{name}: {where}={kind!r}: K would depend on the length of the prompt, not only on its prefix"
            )


def _rope_types(config: Any) -> list[tuple[str, str]]:
    found = []
    for field in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, field, None)
        if not isinstance(rope, dict):
            continue
        groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        for group in groups:
            kind = group.get("rope_type", group.get("type"))
            if kind is not None:
                found.append((f"{field}.rope_type", str(kind)))
    return found


def _check_state(model: Any) -> None:
    name = _name(model.config)
    if model.training:
        raise UnsupportedModelError(f"{name}: the model is in training mode: call model.eval() first")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise UnsupportedModelError(
            f"{name}: peft_config: an adapter can be switched unseen; merge it first (merge_and_unload)"
        )
    kind = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kind not in (None, "dynamic"):
        raise UnsupportedModelError(f"{name}: cache_implementation={kind!r}: only the dynamic cache is supported")


def _name(config: Any) -> str:
    return str(getattr(config, "model_type", "") or type(config).__name__)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
