"""What `quantization_config` says: how large weights are, and in what a checkpoint wants its KV kept.

Embeddings and the output projection stay in 16 bits with every method that is known here; where a configuration lists
other parts that do too, the size is not worked out but asked for.
"""

from __future__ import annotations

from typing import NoReturn

from kvterrace.planner.fields import Fields

__all__ = ["checkpoint_kv_dtype", "weight_nbytes"]

_MXFP4_BITS = 4.25  # 32 elements of 4 bits share a scale of 8: OCP Microscaling Formats 1.0
_MODELOPT_BITS = {"FP8": 8.0, "NVFP4": 4.5}  # NVFP4: 16 elements share a scale of 8
#: 64 elements of 4 bits share a scale of 32, or of 8.127 with scales quantised in turn: QLoRA, arXiv 2305.14314.
_NF4_BITS, _NF4_DOUBLE_BITS = 4.5, 4.127
#: Scales and zeros of groups of 128 weights: about 4 %.
_GROUPS_OF_128 = 1.04
_STAY_PLAIN = {"lm_head", "model.embed_tokens"}
_KV = {(8, "float"): "float8_e4m3fn", (8, "int"): "int8"}


def weight_nbytes(section: Fields, plain: float) -> tuple[float, float]:
    """Bytes for each weight in the layers, and in routed experts; `plain` for each that is not quantised."""
    method = section.text("quant_method")
    if method == "mxfp4":
        return plain, _MXFP4_BITS / 8
    if method == "fp8":
        bits = 8.0
    elif method in {"gptq", "awq"}:
        field = "bits" if section.has("bits") else "w_bit"
        if section.count(field) > 16:
            section.refuse(field, f"{section.count(field)}: more bits than the weights had before they were quantised")
        bits = section.count(field) * _GROUPS_OF_128
    elif method == "bitsandbytes":
        double = section.flag("bnb_4bit_use_double_quant", default=False)
        four = section.flag("load_in_4bit", default=False)
        bits = (_NF4_DOUBLE_BITS if double else _NF4_BITS) if four else 8.0
    elif method == "compressed-tensors":
        bits = _compressed_bits(section)
    elif method == "modelopt":
        algorithm = section.text("quant_algo")
        if algorithm not in _MODELOPT_BITS:
            _ask(section, "quant_algo", repr(algorithm))
        for name in ("ignore", "exclude_modules"):
            _refuse_plain_parts(section, name)
        bits = _MODELOPT_BITS[algorithm]
    else:
        _ask(section, "quant_method", repr(method))
    return bits / 8, bits / 8


def checkpoint_kv_dtype(section: Fields) -> tuple[str, str] | None:
    """The element type that a checkpoint's scales for KV are for, and the field that says so; None without such."""
    scheme = section.section("kv_cache_scheme")
    if scheme is not None:
        bits, kind = scheme.count("num_bits"), scheme.text("type", "float")
        if (bits, kind) not in _KV:
            scheme.refuse("num_bits", f"KV of {bits} bits, {kind}: only 8 bits are known")
        return _KV[bits, kind], "kv_cache_scheme"
    if section.has("kv_cache_quant_algo"):
        algorithm = section.text("kv_cache_quant_algo")
        if algorithm not in {"FP8", "INT8"}:
            section.refuse("kv_cache_quant_algo", f"{algorithm!r} is unknown; known: FP8, INT8")
        return ("float8_e4m3fn" if algorithm == "FP8" else "int8"), "kv_cache_quant_algo"
    return None


def _compressed_bits(section: Fields) -> float:
    """Bits of a weight where all linear layers are quantised alike (compressed-tensors of vLLM)."""
    _refuse_plain_parts(section, "ignore")
    groups = section.section("config_groups")
    names = list(groups.data) if groups is not None else []
    if groups is None or len(names) != 1:
        _ask(section, "config_groups", f"{len(names)} groups")
    group = groups.section(names[0])
    weights = group.section("weights") if group is not None else None
    if group is None or weights is None or group.items("targets") not in ([], ["Linear"]):
        _ask(section, "config_groups", "not all linear layers")
    bits, size = weights.count("num_bits"), weights.value("group_size")
    if bits > 16:
        weights.refuse("num_bits", f"{bits}: more bits than the weights had before they were quantised")
    if not isinstance(size, int) or size in {0, -1}:  # one scale for a column or all
        return float(bits)
    return bits + 16 / weights.count("group_size", least=16)


def _refuse_plain_parts(section: Fields, name: str) -> None:
    others = [str(one) for one in section.items(name) if str(one) not in _STAY_PLAIN]
    if others:
        _ask(section, name, f"{others[0]!r} and such stay as they were")


def _ask(section: Fields, name: str, what: str) -> NoReturn:
    section.refuse(name, f"{what}: how large the weights are is not known: give --weights, e.g. --weights 70GB")
