"""Bytes of a token, of a state and of a rank, for models of many families; and what quantisation makes of them."""

from __future__ import annotations

import pytest
from tests.unit.planner_zoo import ZOO

from kvterrace.errors import ConfigError, UnsupportedModelError
from kvterrace.planner.layers import Model, Parallel
from kvterrace.planner.models import model_from_config

LLAMA_8B: dict[str, object] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
EMBEDDINGS = 2 * 128_256 * 4096
INSIDE = 32 * (4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 14_336)


def read(name: str) -> Model:
    return model_from_config(ZOO[name][2], name, "x")


@pytest.mark.parametrize("name", ZOO)
def test_bytes_of_a_token_and_weights(name: str) -> None:
    per_token, billions, _ = ZOO[name]
    model = read(name)
    assert model.nbytes_per_token() == per_token
    if billions is not None:
        assert model.params / 1e9 == pytest.approx(billions, rel=0.03)


#: Bytes of each token beyond all windows: only layers that attend to all keep it.
BEYOND = {
    "gemma-2-9b": 21 * 2 * 8 * 256 * 2,  # every second of 42
    "gemma-3-1b": 4 * 2 * 1 * 256 * 2,  # every sixth of 26
    "gemma-3-12b": 8 * 2 * 8 * 256 * 2,  # every sixth of 48
    "gemma-3n-e2b": 4 * 2 * 2 * 256 * 2,  # every fifth of the 20 that keep KV
    "phi-4-mini": 0,
    "phi-3.5-moe": 0,
    "starcoder2-15b": 0,
    "command-r7b": 8 * 2 * 8 * 128 * 2,  # every fourth of 32
    "exaone-4-32b": 16 * 2 * 8 * 128 * 2,
    "olmo-3-7b": 8 * 2 * 32 * 128 * 2,
    "llama-4-maverick": 12 * 2 * 8 * 128 * 2,
    "recurrentgemma-2b": 0,
}


@pytest.mark.parametrize("name", ZOO)
def test_bytes_of_a_token_beyond_all_windows(name: str) -> None:
    assert read(name).nbytes_per_token(1 << 20) == BEYOND.get(name, ZOO[name][0])


#: Bytes of a sequence's state: layers x (state in float32 + columns of the convolution in 16 bits).
STATES = {
    "minimax-m1": 70 * 64 * 128 * 128 * 4,
    "mamba2-2.7b": 64 * (80 * 64 * 128 * 4 + 4 * (5120 + 2 * 128) * 2),
    "bamba-9b": 29 * (128 * 64 * 128 * 4 + 4 * (8192 + 2 * 128) * 2),
    "granite-4-h-small": 36 * (128 * 64 * 128 * 4 + 4 * (8192 + 2 * 128) * 2),
    "falcon-h1-7b": 44 * (24 * 128 * 256 * 4 + 4 * (3072 + 2 * 256) * 2),
    "zamba2-7b": 81 * (112 * 64 * 64 * 4 + 4 * (112 * 64 + 2 * 2 * 64) * 2),
    "lfm2-1.2b": 10 * 3 * 2048 * 2,
    "recurrentgemma-2b": 18 * (2560 * 4 + 3 * 2560 * 2),
}


@pytest.mark.parametrize("name", ZOO)
def test_bytes_of_a_state(name: str) -> None:
    assert read(name).sequence_nbytes(0) == STATES.get(name, 0)


@pytest.mark.parametrize(
    ("name", "tp", "rank"),
    [
        ("qwen2.5-7b-1m", 4, 28 * 2 * 1 * 128 * 2),
        ("gemma-3-1b", 4, 26 * 2 * 1 * 256 * 2),  # one KV head, on each of four ranks
        ("glm-4.5-air", 16, 46 * 2 * 1 * 128 * 2),  # 8 KV heads, each on two ranks
        ("starcoder", 8, 40 * 2 * 1 * 128 * 2),
        ("deepseek-v2-lite", 16, 27 * 576 * 2),  # a latent is whole on each
        ("kimi-vl", 2, 27 * 576 * 2),
        ("command-r-plus", 2, 64 * 2 * 4 * 128 * 2),
    ],
)
def test_what_a_rank_holds(name: str, tp: int, rank: int) -> None:
    model = read(name)
    model.check(Parallel(tp))
    assert model.nbytes_per_token(1, tp) == rank
    assert model.held_nbytes(100, Parallel(tp)) == 100 * rank * tp


@pytest.mark.parametrize(("name", "tp"), [("qwen2.5-7b-1m", 8), ("phi-4", 4), ("falcon-7b", 2), ("smollm3", 3)])
def test_ranks_over_which_heads_are_not_divided(name: str, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp {tp}: {name}"):
        read(name).check(Parallel(tp))


@pytest.mark.parametrize(
    "family",
    ["t5", "whisper", "bert", "rwkv", "zamba", "mllama_text_model", "step3_text", "nemotron-nas", "dbrx", "mpt",
     "hunyuan", "gpt_neo", "phi3small", "minicpm3"],
)  # fmt: skip
def test_families_that_are_not_known_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="model_type: "):
        model_from_config({**LLAMA_8B, "model_type": family}, "x", "x")


def grouped(bits: int, **more: object) -> dict[str, object]:
    """A compressed-tensors section as llm-compressor writes it."""
    weights = {"num_bits": bits, "type": "int", **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
        # A scale of 8 bits for each 64 weights, and one of 32 for each 256 of these.
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            4 + 8 / 64 + 32 / (64 * 256),
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({**grouped(8), "ignore": ["lm_head"]}, 8),
        (grouped(4, group_size=128), 4 + 16 / 128),
        (grouped(8, group_size=-1), 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4 + 8 / 16),
    ],
)
def test_bytes_of_quantised_weights(section: dict[str, object], bits: float) -> None:
    model = model_from_config({**LLAMA_8B, "quantization_config": section}, "x", "x")
    assert model.weights_nbytes == pytest.approx(INSIDE * bits / 8 + EMBEDDINGS * 2, rel=1e-4)
    assert model.nbytes_per_token() == 131_072


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({**grouped(4), "ignore": ["lm_head", "re:.*self_attn.*"]}, "ignore"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}, "targets": ["re:.*mlp"]}}},
            "config_groups",
        ),
        (grouped(64), "num_bits"),
        (grouped(4, group_size=1), "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": []}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [["lm_head"]]}, "ignore"),
        ({"quant_method": "hqq"}, "quant_method"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits"),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
    ],
)
def test_quantisation_that_is_not_understood_is_refused(section: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field}: "):
        model_from_config({**LLAMA_8B, "quantization_config": section}, "x", "x")


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "float8_e4m3fn"),
        ({**grouped(8), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
    ],
)
def test_a_checkpoint_with_scales_for_kv_keeps_it_in_8_bits(section: dict[str, object], dtype: str) -> None:
    config = {**LLAMA_8B, "quantization_config": section}
    model = model_from_config(config, "x", "x")
    assert model.kv_dtype == dtype
    assert model.nbytes_per_token() == 65_536
    assert "--kv-dtype bf16" in model.notes[0]
    asked = model_from_config(config, "x", "x", kv_dtype="bfloat16")
    assert (asked.nbytes_per_token(), asked.notes) == (131_072, ())
