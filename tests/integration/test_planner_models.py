"""What the planner reads from a configuration is what Transformers' own cache of a tiny model of that family holds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvterrace.planner.models import model_from_config

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", "5.24", reason="older ones name and keep the layers of a cache otherwise"
)

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
INDEX = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
GEMMA = {"num_hidden_layers": 6, "sliding_window": 6}

#: Nothing but the common sizes.
PLAIN = [
    "llama", "qwen2", "qwen3", "phi", "gemma", "glm", "glm4", "cohere", "olmo", "olmo2", "granite", "starcoder2",
    "smollm3", "internlm3", "jais2", "nanochat", "bitnet", "diffllama", "hyperclovax", "iquestcoder", "exaone",
    "arcee", "nemotron", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "gpt_neox", "bloom", "persimmon",
]  # fmt: skip
#: Families with sizes of their own; None: there is no such field.
SPECIAL: list[tuple[str, Mapping[str, object]]] = [
    ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4}),
    ("gpt_bigcode", {"n_embd": 32, "n_layer": 4, "n_head": 4}),
    ("gptj", {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}),
    ("codegen", {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}),
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("falcon", {"head_dim": None, "multi_query": True}),
    # The new architecture is left out: Transformers repeats its K and V for every head before it caches them.
    ("mistral", {"sliding_window": 6}),
    ("phi3", {"sliding_window": 6}),
    ("mixtral", LOCAL_MOE),
    ("minimax_m2", LOCAL_MOE),
    ("qwen3_moe", QWEN_MOE),
    ("gpt_oss", {**LOCAL_MOE, "sliding_window": 6}),
    ("gemma2", {"sliding_window": 6}),
    ("gemma3_text", GEMMA),
    ("gemma4_text", {**GEMMA, **PER_LAYER, "global_head_dim": 16}),
    (
        "gemma3n_text",
        {
            **PER_LAYER, "num_hidden_layers": 10, "num_kv_shared_layers": 4, "sliding_window": 6, "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        },
    ),
    ("cohere2", {"sliding_window": 6}),
    ("cwm", {"sliding_window": 6}),
    ("vaultgemma", {"sliding_window": 6}),
    ("granite_swa", {"sliding_window": 6}),
    ("afmoe", {**QWEN_MOE, "sliding_window": 6}),
    ("exaone_moe", {**QWEN_MOE, "sliding_window": 6}),
    ("hy_v3", QWEN_MOE),
    ("granitemoeshared", LOCAL_MOE),
    ("solar_open", MOE),
    ("youtu", MLA),
    ("sarvam_mla", {**MLA, **MOE}),
    ("axk1", {**MLA, **MOE}),
    ("lfm2_moe", {**QWEN_MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    ("mamba", {"state_size": 4, "time_step_rank": 2}),
    ("falcon_mamba", {"state_size": 4, "time_step_rank": 2}),
    ("mamba2", {"state_size": 4, "num_heads": 8, "n_groups": 2}),
    ("olmo3", {"sliding_window": 6}),
    ("exaone4", {"sliding_window": 6}),
    ("llama4_text", {"attention_chunk_size": 6, "num_local_experts": 4, "intermediate_size_mlp": 64}),
    ("mimo_v2_flash", {**MOE, "sliding_window": 6, "v_head_dim": 4}),
    ("glm4_moe", MOE),
    ("deepseek_v2", {**MLA, **MOE}),
    ("deepseek_v3", {**MLA, **MOE}),
    ("deepseek_v32", {**MLA, **MOE, **INDEX}),
    ("glm_moe_dsa", {**MLA, **MOE, **INDEX}),
    (
        "longcat_flash",
        {
            **MLA, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
            "moe_topk": 2, "zero_expert_num": 2,
        },
    ),
    ("qwen3_next", {**DELTA, **QWEN_MOE}),
    ("qwen3_5_text", DELTA),
    (
        "jamba",
        {
            "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    ("granitemoehybrid", {**MAMBA2, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"] * 2}),
    (
        "zamba2",
        {
            "head_dim": None, "n_mamba_heads": 8, "mamba_d_state": 4, "num_mem_blocks": 2, "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
    ),
    ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    (
        "kimi_linear",
        {
            **MLA, **MOE, "num_experts": 4, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
]  # fmt: skip
FAMILIES: list[tuple[str, Mapping[str, object]]] = [*((name, {}) for name in PLAIN), *SPECIAL]
TENSORS = ("keys", "values", "conv_states", "recurrent_states", "indexer_keys", "index_keys")


def held_elements(layer: object) -> int:
    """Elements in all tensors of one layer of Transformers' cache."""
    found = 0
    for name in TENSORS:
        value = getattr(layer, name, None)
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        found += sum(one.numel() for one in several if one is not None)
    return found


@pytest.mark.parametrize("tokens", [5, 12])
@pytest.mark.parametrize(("family", "sizes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_layers_hold_what_transformers_caches(family: str, sizes: Mapping[str, object], tokens: int) -> None:
    given = {name: value for name, value in {**TINY, **sizes}.items() if value is not None}
    config = transformers.CONFIG_MAPPING[family](**given)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        answer = network(torch.zeros((1, tokens), dtype=torch.long), use_cache=True)
    cache = getattr(answer, "past_key_values", None) or answer.cache_params
    held = [count for count in map(held_elements, cache.layers) if count]

    planned = []
    for layer in model_from_config(config.to_dict(), family, "config").layers:
        # Transformers keeps one token less than the window: the next one takes its place.
        kept = min(tokens, layer.window - 1) if layer.window else tokens
        planned.append(layer.elements_per_token() * kept + layer.state + layer.conv)
    assert [count for count in planned if count] == held


def test_weights_are_those_of_the_network() -> None:
    config = transformers.CONFIG_MAPPING["qwen2_moe"](**{**TINY, **QWEN_MOE, "vocab_size": 512, "hidden_size": 64})
    network = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(one.numel() for one in network.parameters())
    assert model_from_config(config.to_dict(), "x", "x").params == pytest.approx(counted, rel=0.02)
