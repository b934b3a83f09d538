"""Models: from a Hugging Face `config.json`, or by the name of one that is shipped as data. Offline; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from kvterrace.errors import ConfigError, UnsupportedModelError
from kvterrace.layout import DTYPE_NBYTES
from kvterrace.planner.families import Shape, check_all_read, latent_layer, plain_layers, with_ffn
from kvterrace.planner.families_hybrid import HYBRID
from kvterrace.planner.families_known import DEFAULTS, LATENT, PLAIN
from kvterrace.planner.fields import Fields
from kvterrace.planner.layers import Layer, Model
from kvterrace.planner.params import feed_forward
from kvterrace.planner.quantised import checkpoint_kv_dtype, weight_nbytes

__all__ = ["KV_DTYPES", "kv_dtype_of", "load_model", "model_from_config", "shipped_models"]

#: What a KV dtype is called on the command line.
KV_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
    **{name: name for name in DTYPE_NBYTES if name not in {"float64", "uint8", "int8"}},
}
_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba"})
#: The language model inside is read; a picture's or a sound's tokens are cached like others.
_INNER = ("text_config", "llm_config", "language_config")
_ALIASES = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "gemma3": "gemma3_text",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
_CONFIG_DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0}
_MAX_CONFIG_NBYTES = 64 << 20


def load_model(name: str, *, kv_dtype: str | None = None, weights_nbytes: int | None = None) -> Model:
    """A model by its name or by the path of a `config.json` or of the folder it lies in.

    Args:
        kv_dtype: element type of the KV, a key of `DTYPE_NBYTES`; None takes the configuration's.
        weights_nbytes: of the weights, where the configuration does not tell or tells it wrong.

    Raises:
        ConfigError: no such file or name, or no JSON.
        UnsupportedModelError: a field that is missing, cannot be, or is not understood; the message names it.
    """
    shipped = shipped_models()
    entry = shipped.get(name.lower())
    if entry is not None:
        config, source = entry["config"], str(entry["source"])
        assert isinstance(config, Mapping)
        stated = entry.get("weights_nbytes")
        assert stated is None or isinstance(stated, int)
        return model_from_config(
            config, str(entry["name"]), source, kv_dtype=kv_dtype, weights_nbytes=weights_nbytes or stated
        )
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(sorted({str(one["name"]) for one in shipped.values()}))
        raise ConfigError(f"--model {name}: no file or folder with a config.json, and no known name; known: {known}")
    config = _read_json(path)
    weights_nbytes = weights_nbytes or _indexed_nbytes(folder / "model.safetensors.index.json")
    called = config.get("_name_or_path")
    title = called if isinstance(called, str) and called.strip() else folder.absolute().name
    return model_from_config(config, title, str(path), kv_dtype=kv_dtype, weights_nbytes=weights_nbytes)


def model_from_config(
    config: Mapping[str, object],
    name: str,
    source: str,
    *,
    kv_dtype: str | None = None,
    weights_nbytes: int | None = None,
) -> Model:
    """What a configuration says about caching and weights. Arguments and errors: see `load_model`."""
    outer = Fields(config, source, UnsupportedModelError)
    if outer.flag("is_encoder_decoder", default=False):
        outer.refuse("is_encoder_decoder", "true: encoder-decoder models are not understood")
    fields, inner = outer, next((one for one in _INNER if isinstance(config.get(one), Mapping)), None)
    if inner is not None:
        section = outer.section(inner)
        assert section is not None
        fields = section
    family = fields.text("model_type")
    family = _ALIASES.get(family, family)
    fields = Fields({**DEFAULTS.get(family, {}), **fields.data}, fields.where, UnsupportedModelError)
    fields.read.update({"model_type", *_INNER})
    layers, notes = _layers(fields, family)
    check_all_read(fields, family)
    dtype_field = next((one for one in ("dtype", "torch_dtype") if fields.has(one) or outer.has(one)), "torch_dtype")
    dtype = (fields if fields.has(dtype_field) else outer).text(dtype_field, "bfloat16").removeprefix("torch.")
    if not (fields.has(dtype_field) or outer.has(dtype_field)):
        notes.append("the configuration names no dtype: bfloat16 is taken, for weights and KV")
    if dtype == "float32" and kv_dtype is None:
        notes.append(
            "the configuration says float32, for weights and KV; engines run most such models in 16 bit: say "
            "--kv-dtype bf16, and --weights half as much"
        )
    if dtype not in _CONFIG_DTYPES:
        fields.refuse(dtype_field, f"{dtype!r} is unknown; known: {', '.join(_CONFIG_DTYPES)}")
    quantised = fields if fields.has("quantization_config") else outer
    kv = kv_dtype or _kv_dtype(quantised, dtype, notes)
    embedding, output = _embedding_params(fields)
    model = Model(name, source, tuple(layers), kv, 1, embedding, output, _max_context(fields), tuple(notes))
    if weights_nbytes is None:
        weights, experts = _weights_nbytes(model, quantised, dtype)
    else:
        weights, experts = weights_nbytes, round(weights_nbytes * model.experts_params / model.params)
    return replace(model, weights_nbytes=weights, experts_nbytes=experts)


def kv_dtype_of(word: str) -> str | None:
    """The element type that `--kv-dtype` means; None for `auto`. Raises ConfigError."""
    if word == "auto":
        return None
    if word not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {word}: unknown; known: auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[word]


@cache
def shipped_models() -> dict[str, Mapping[str, object]]:
    """Models that are shipped as data, by each of their names in lower case."""
    text = resources.files("kvterrace.planner").joinpath("data/models.json").read_text("utf-8")
    found: dict[str, Mapping[str, object]] = {}
    for entry in json.loads(text)["models"]:
        for name in (entry["name"], *entry.get("aliases", ())):
            found[str(name).lower()] = entry
    return found


def _layers(fields: Fields, family: str) -> tuple[list[Layer], list[str]]:
    if family not in PLAIN and family not in LATENT and family not in HYBRID:
        fields.refuse("model_type", f"{family!r} is not understood: how it caches is not known here, and not guessed")
    pattern = fields.value(fields.first("hybrid_override_pattern", "layers_block_type"))
    listed = len(pattern) if family == "nemotron_h" and isinstance(pattern, (str, list)) and pattern else None
    shape = Shape(
        family,
        fields.count("num_hidden_layers", "n_layer", "num_layers", "n_layers", default=listed),
        fields.count("hidden_size", "n_embd", "d_model", "n_embed"),
        fields.count("num_attention_heads", "n_head", "n_heads", default=1 if family in _WITHOUT_ATTENTION else None),
    )
    if shape.layers > 10_000:
        fields.refuse("num_hidden_layers", f"{shape.layers} layers: more than any model has")
    if family in HYBRID:
        for name in ("num_key_value_heads", "head_dim"):  # not asked for where no layer attends
            fields.value(name)
        layers, notes = HYBRID[family](fields, shape)
        notes.append(
            "a recurrent state can be reused only at the token where it was stored; it is counted once a sequence"
        )
        return layers, notes
    if family in PLAIN:
        return plain_layers(fields, shape)
    latent, ffn = latent_layer(fields, shape), feed_forward(fields, family, shape.hidden, shape.layers)
    if family == "longcat_flash":  # two attentions and two dense networks in a layer, experts beside them
        dense = 3 * shape.hidden * fields.count("ffn_hidden_size")
        wide = replace(latent, params=latent.params + dense, active_params=latent.params + dense)
        return [layer for one in ffn for layer in (with_ffn(wide, one), wide)], []
    return [with_ffn(latent, one) for one in ffn], []


def _embedding_params(fields: Fields) -> tuple[int, int]:
    """Weights outside the layers, and those of the output projection."""
    hidden = fields.count("hidden_size", "n_embd", "d_model", "n_embed")
    table = fields.count("vocab_size", "padded_vocab_size") * hidden
    tied = fields.flag("tie_word_embeddings", default=False)
    extra = fields.count("hidden_size_per_layer_input", default=0, least=0)
    if extra:  # Gemma 3n and 4: an embedding for each layer
        layers = fields.count("num_hidden_layers")
        extra *= layers * fields.count("vocab_size_per_layer_input")
    return (table if tied else 2 * table) + extra, table


def _max_context(fields: Fields) -> int:
    name = fields.first("max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", "seq_length")
    return fields.count(name, default=0)


def _kv_dtype(fields: Fields, dtype: str, notes: list[str]) -> str:
    """What KV is kept in where nobody says otherwise: what the checkpoint has scales for, or the weights' type."""
    section = fields.section("quantization_config")
    stated = checkpoint_kv_dtype(section) if section is not None else None
    if stated is None:
        return dtype if _CONFIG_DTYPES[dtype] >= 2 else "bfloat16"
    kept, field = stated
    notes.append(f"KV is kept in {kept}, as {field} of the checkpoint says; if the engine does not: --kv-dtype bf16")
    return kept


def _weights_nbytes(model: Model, fields: Fields, dtype: str) -> tuple[int, int]:
    """Bytes of all weights, and of the routed experts among them."""
    section = fields.section("quantization_config")
    size = _CONFIG_DTYPES[dtype]
    inside = expert = size
    if section is not None:
        size = max(size, 2.0)
        inside, expert = weight_nbytes(section, size)
    experts = model.experts_params * expert
    others = (model.params - model.embedding_params - model.experts_params) * inside
    return round(experts + others + model.embedding_params * size), round(experts)


def _indexed_nbytes(path: Path) -> int | None:
    """Size of the weights as their index states it, where there is one."""
    if not path.is_file():
        return None
    metadata = Fields(_read_json(path), str(path)).section("metadata")
    return metadata.count("total_size") if metadata is not None and metadata.has("total_size") else None


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > _MAX_CONFIG_NBYTES:
            raise ConfigError(f"{path}: larger than {_MAX_CONFIG_NBYTES} B: this is no configuration")
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: no JSON object")
    return data
