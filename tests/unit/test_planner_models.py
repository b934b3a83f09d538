"""Bytes of a token, a sequence and a rank, and weights: against published figures and hand arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.planner_configs import PUBLISHED

from kvterrace.errors import ConfigError, UnsupportedModelError
from kvterrace.planner.layers import Parallel
from kvterrace.planner.models import kv_dtype_of, load_model, model_from_config, shipped_models

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
MLA: dict[str, object] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # 2 x KV heads x head_dim x 2 bytes x layers
        ("llama-3.1-8b", 2 * 8 * 128 * 2 * 32),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 2 * 8 * 128 * 2 * 126),
        ("mha-70b", 2_621_440),
        ("qwen2.5-32b", 262_144),
        ("qwen3-32b", 262_144),
        ("qwen3-coder-480b", 253_952),
        ("qwen3-235b-a22b", 2 * 4 * 128 * 2 * 94),
        ("deepseek-v3", 70_272),  # (512 + 64) x 2 bytes x 61 layers
        ("deepseek-r1", 70_272),
        ("kimi-k2", 70_272),
        ("deepseek-v3.2", 70_272 + 128 * 2 * 61),  # and an index key of 128 in each layer
        ("gpt-oss-120b", 73_728),
        ("qwen3-next-80b-a3b", 2 * 2 * 256 * 2 * 12),  # 12 of 48 layers attend
        ("jamba-1.5-mini", 2 * 8 * 128 * 2 * 4),  # 4 of 32
        ("gemma-3n-e4b", 2 * 2 * 256 * 2 * 20),  # 20 of 35 keep KV of their own
        ("smollm2-135m", 2 * 3 * 64 * 2 * 30),
    ],
)
def test_bytes_of_a_token(name: str, nbytes: int) -> None:
    assert load_model(name).nbytes_per_token() == nbytes


@pytest.mark.parametrize(
    ("name", "window", "later"),
    [
        ("gpt-oss-120b", 128, 36_864),
        ("gemma-3-27b", 1024, 2 * 16 * 128 * 2 * 10),  # one layer in six of 62 is global: 10
        ("mistral-7b-v0.1", 4096, 0),
        ("llama-4-scout", 8192, 2 * 8 * 128 * 2 * 12),  # one layer in four of 48 attends to all
    ],
)
def test_tokens_beyond_a_window_cost_what_the_other_layers_keep(name: str, window: int, later: int) -> None:
    model = load_model(name)
    first = model.nbytes_per_token()
    assert model.nbytes_per_token(window) == first
    assert model.nbytes_per_token(window + 1) == later
    assert model.sequence_nbytes(window) == window * first
    assert model.sequence_nbytes(window + 1000) == window * first + 1000 * later


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        # Published parameter counts (billions), total and active.
        ("llama-3.1-8b", 8.03, None),
        ("llama-3.1-70b", 70.55, None),
        ("llama-3.1-405b", 405.9, None),
        ("llama-65b", 65.2, None),
        ("qwen2.5-32b", 32.8, None),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("qwen3-coder-480b", 480.0, 35.0),
        ("deepseek-v3", 671.0, 37.0),
        ("kimi-k2", 1026.0, 32.0),
        ("gpt-oss-120b", 116.8, 5.1),
        ("gpt-oss-20b", 20.9, 3.6),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gemma-3-27b", 27.0, None),
        ("qwen3-next-80b-a3b", 80.0, None),
        ("jamba-1.5-mini", 51.6, 12.0),
        ("minimax-m2", 229.0, 10.0),
        ("glm-4.5", 355.0, 32.0),
        ("smollm2-135m", 0.1345, None),
    ],
)
def test_weights_are_the_published_ones(name: str, params: float, active: float | None) -> None:
    model = load_model(name)
    assert model.params / 1e9 == pytest.approx(params, rel=0.01)
    if active is not None:
        assert model.active_params / 1e9 == pytest.approx(active, rel=0.09)  # some count the embeddings, too


def test_weights_in_bytes() -> None:
    assert load_model("llama-3.1-70b").weights_nbytes == pytest.approx(141.1e9, rel=0.001)  # 2 bytes each
    # gpt-oss-120b's files are 65.2 GB: experts in MXFP4 (4.25 bits), the rest in bf16.
    assert load_model("gpt-oss-120b").weights_nbytes == pytest.approx(65.2e9, rel=0.01)
    assert load_model("deepseek-v3").weights_nbytes == pytest.approx(673e9, rel=0.01)  # fp8, embeddings bf16


def test_forty_and_eighty_gib() -> None:
    gib = 2**30
    assert load_model("llama-3.1-70b").sequence_nbytes(131_072) == 40 * gib  # R1
    assert load_model("mha-70b").sequence_nbytes(32_768) == 80 * gib


@pytest.mark.parametrize(
    ("name", "tp", "rank"),
    [
        ("llama-3.1-70b", 8, 40_960),  # one of 8 KV heads
        ("llama-3.1-70b", 16, 40_960),  # 8 heads on 16 ranks: each twice
        ("qwen3-235b-a22b", 8, 2 * 1 * 128 * 2 * 94),  # 4 heads on 8 ranks
        ("deepseek-v3", 8, 70_272),  # the latent, whole, on each
        ("deepseek-v3", 1, 70_272),
    ],
)
def test_what_a_rank_holds(name: str, tp: int, rank: int) -> None:
    model = load_model(name)
    assert model.nbytes_per_token(1, tp) == rank
    assert model.held_nbytes(1000, Parallel(tp)) == 1000 * rank * tp


def test_pipeline_stages_hold_their_layers() -> None:
    model = load_model("llama-3.1-405b")  # 126 layers over 4: 32, 32, 31, 31
    stages = model.stages(4)
    assert [len(stage) for stage in stages] == [32, 32, 31, 31]
    each = [model.sequence_nbytes(1000, 8, stage) for stage in stages]
    one_layer = 2 * 1 * 128 * 2 * 1000
    assert each == [32 * one_layer, 32 * one_layer, 31 * one_layer, 31 * one_layer]
    assert model.fullest_rank_nbytes(1000, Parallel(8, 4)) == 32 * one_layer


def test_recurrent_state_is_counted_once_a_sequence() -> None:
    model = load_model("qwen3-next-80b-a3b")
    # 36 layers: 32 heads of 128 x 128 in float32, and 4 columns of (2 x 16 + 32) x 128 in bf16
    state = 36 * (32 * 128 * 128 * 4 + 4 * (2 * 16 + 32) * 128 * 2)
    assert model.sequence_nbytes(0) == state
    assert model.sequence_nbytes(1000) == state + 1000 * 24_576
    assert model.recurrent


@pytest.mark.parametrize(
    ("dtype", "per_token"), [("fp8", 163_840), ("int8", 163_840), ("fp32", 655_360), ("auto", 327_680)]
)
def test_kv_dtype(dtype: str, per_token: int) -> None:
    assert load_model("llama-3.1-70b", kv_dtype=kv_dtype_of(dtype)).nbytes_per_token() == per_token


def test_a_text_model_inside_another_is_read() -> None:
    inner = {**LLAMA, "model_type": "qwen2"}
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": inner, "vision_config": {"mamba": 1}}
    assert model_from_config(outer, "x", "x").nbytes_per_token() == 2 * 2 * 64 * 2 * 4


def test_qwen2_slides_only_where_it_is_switched_on() -> None:
    base = {**LLAMA, "model_type": "qwen2", "sliding_window": 100, "max_window_layers": 1}
    off = model_from_config({**base, "use_sliding_window": False}, "x", "x")
    on = model_from_config({**base, "use_sliding_window": True}, "x", "x")
    layer = 2 * 2 * 64 * 2
    assert off.sequence_nbytes(1000) == 4 * layer * 1000
    assert on.sequence_nbytes(1000) == layer * 1000 + 3 * layer * 100


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    config, per_token = PUBLISHED[name]
    assert model_from_config(config, name, "x").nbytes_per_token() == per_token


def test_parameters_of_hybrid_models() -> None:
    for name, billions in {"Nemotron-H-8B": 8.1, "Kimi-Linear-48B-A3B": 49.1, "Granite-4.0-H-Micro": 3.2}.items():
        assert model_from_config(PUBLISHED[name][0], name, "x").params / 1e9 == pytest.approx(billions, rel=0.08), name
    for name, billions in {"Jamba-v0.1": 51.6, "MiniMax-Text-01": 456.0, "Hunyuan-A13B": 80.4}.items():
        assert model_from_config(PUBLISHED[name][0], name, "x").params / 1e9 == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("MiniMax-M2", {"attn_type_list": [0] + [1] * 61}, "attn_type_list"),
        ("Hunyuan-A13B", {"use_cla": True}, "use_cla"),
        ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "moe_topk"),
        ("Nemotron-H-8B", {"hybrid_override_pattern": "M-M?"}, "hybrid_override_pattern"),
        ("Kimi-Linear-48B-A3B", {"linear_attn_config": None}, "layer_types"),
    ],
)
def test_what_would_change_the_caching_is_refused(name: str, changes: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field}: "):
        model_from_config({**PUBLISHED[name][0], **changes}, name, "x")


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"multi_query": True}, 1),  # Falcon-7B
        ({"multi_query": False}, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4),  # Falcon-40B: whatever multi_query says
        ({"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 4}, 4),
        ({}, 1),  # the class default
    ],
)
def test_falcon_has_one_kv_head_or_as_many_as_it_says(changes: dict[str, object], kv_heads: int) -> None:
    base = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    model = model_from_config({**base, "model_type": "falcon", **changes}, "x", "x")
    assert model.nbytes_per_token() == 2 * kv_heads * 64 * 2 * 4
    assert any("every attention head" in note for note in model.notes) == (kv_heads == 4)


def test_quantised_weights() -> None:
    plain = model_from_config(LLAMA, "x", "x")
    embeddings = 2 * 1000 * 512
    inside = plain.params - embeddings
    for method, bits in (("gptq", {"bits": 4}), ("awq", {"w_bit": 4})):
        made = model_from_config({**LLAMA, "quantization_config": {"quant_method": method, **bits}}, "x", "x")
        # 4 bits each, 16 + 4 more for groups of 128: 4.16; embeddings stay in 16 bits
        assert made.weights_nbytes == pytest.approx(inside * 4.16 / 8 + embeddings * 2)
    made = model_from_config({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "x", "x")
    assert made.weights_nbytes == inside + embeddings * 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "whisper"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 7}, "model_type"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.5}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 7}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"torch_dtype": "float13"}, "torch_dtype"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method"),
        ({"quantization_config": 8}, "quantization_config"),
        # A field that speaks of caching and that no reader of this family knows is not passed over.
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_kv_shared_layer_groups": 2}, "num_kv_shared_layer_groups"),
        ({"cla_share_factor": 2}, "cla_share_factor"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"index_topk": 2048}, "index_topk"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 9, "layer_types": ["holographic"] * 4}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "qwen3_next"}, "linear_key_head_dim"),
        ({"model_type": "granitemoehybrid"}, "layer_types"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank"),
        ({"model_type": "exaone_moe", "sliding_window": 128}, "layer_types"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        model_from_config({**LLAMA, **changes}, "x", "some/config.json")
    message = str(refused.value)
    assert message.startswith("some/config.json: ")
    assert f"{field}:" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"intermediate_size": 0}, "intermediate_size"),  # a network without experts has some width
        ({"quantization_config": {"quant_method": "gptq", "bits": 160}}, "bits"),
    ],
)
def test_weights_that_cannot_be_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field}: "):
        model_from_config({**LLAMA, **changes}, "x", "x")


def test_a_configuration_in_float32_is_told_that_engines_halve_it() -> None:
    """As google/gemma-2-9b has it: 688,128 B of KV a token, of which engines keep half."""
    made = model_from_config({**LLAMA, "torch_dtype": "float32"}, "x", "x")
    assert made.kv_dtype == "float32"
    assert "--kv-dtype bf16" in made.notes[0]
    assert model_from_config({**LLAMA, "torch_dtype": "float32"}, "x", "x", kv_dtype="bfloat16").notes == ()


def test_a_configuration_without_a_dtype_is_told_so() -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert model_from_config(LLAMA, "x", "x").notes == ()
    made = model_from_config(silent, "x", "x")
    assert made.kv_dtype == "bfloat16"
    assert made.notes == ("the configuration names no dtype: bfloat16 is taken, for weights and KV",)
    assert model_from_config({**silent, "dtype": "float32"}, "x", "x").nbytes_per_token() == 2 * 2 * 64 * 4 * 4


def test_fields_that_are_null_or_off_are_no_reason_to_refuse() -> None:
    harmless = {
        "sliding_window": None,
        "kv_lora_rank": None,
        "layer_types": None,
        "mamba_d_state": 0,
        "cla_share": False,
    }
    assert model_from_config({**LLAMA, **harmless}, "x", "x").nbytes_per_token() == 2 * 2 * 64 * 2 * 4


def test_a_folder_with_an_index_tells_the_size_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12_345_678}}))
    assert load_model(str(tmp_path)).weights_nbytes == 12_345_678
    assert load_model(str(tmp_path / "config.json")).weights_nbytes == 12_345_678
    assert load_model(str(tmp_path), weights_nbytes=99).weights_nbytes == 99


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '"x"', "\x00", "[" * 100_000])
def test_a_file_that_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_unknown_names_and_dtypes() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-70b"):
        load_model("no-such-model")
    with pytest.raises(ConfigError, match="--kv-dtype int3"):
        kv_dtype_of("int3")


def test_every_shipped_model_loads_and_has_a_source() -> None:
    names = {str(entry["name"]) for entry in shipped_models().values()}
    assert len(names) >= 12
    for name in names:
        model = load_model(name)
        assert model.source.startswith("huggingface.co/")
        assert model.nbytes_per_token() > 0


def test_ranks_that_cannot_be() -> None:
    model = load_model("smollm2-135m")  # 9 heads, 3 KV heads
    model.check(Parallel(3))
    model.check(Parallel(9))
    for tp in (2, 4, 8):
        with pytest.raises(ConfigError, match=f"--tp {tp}"):
            model.check(Parallel(tp))
    with pytest.raises(ConfigError, match="--pp 31"):
        model.check(Parallel(1, 31))
