"""Which families of models are known, and which fields of a configuration speak of caching. Words only.

A family is a `model_type` of Transformers, where not marked otherwise.
"""

from __future__ import annotations

import re

__all__ = [
    "DEFAULTS",
    "HARMLESS",
    "LATENT",
    "MHA_IF_MISSING",
    "MHA_ONLY",
    "MULTI_QUERY",
    "NEEDS_LAYER_TYPES",
    "PLAIN",
    "SUSPECT",
    "WINDOWED",
]

#: Attention in every layer: full, or what `layer_types`, `sliding_window` and rules of the family say. InternLM2,
#: Baichuan and ChatGLM come with code of their own.
PLAIN = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi", "phi3", "phimoe", "gemma",
    "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "gpt_oss", "opt", "falcon",
    "bloom", "starcoder2", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "glm",
    "glm4", "glm4_moe", "glm4v_text", "glm4v_moe_text", "llama4_text", "exaone4", "smollm3", "stablelm", "ernie4_5",
    "ernie4_5_moe", "seed_oss", "dots1", "arcee", "nemotron", "minimax_m2", "mimo_v2_flash", "ministral",
    "ministral3", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus", "helium", "codegen", "persimmon", "gemma4_text",
    "internlm3", "jais2", "nanochat", "cwm", "vaultgemma", "bitnet", "diffllama", "flex_olmo", "exaone_moe",
    "solar_open", "hy_v3", "laguna", "mellum", "afmoe", "granitemoeshared", "granitemoe_swa", "granite_swa",
    "iquestcoder", "hyperclovax", "exaone", "internlm2", "baichuan", "chatglm",
})  # fmt: skip
#: The class default of `num_key_value_heads` is the number of attention heads.
MHA_IF_MISSING = frozenset({
    "llama", "phi", "phimoe", "gemma", "gpt2", "gptj", "gpt_neox", "opt", "bloom", "codegen", "persimmon", "cohere",
    "olmo", "olmo2", "olmoe", "granite", "granitemoe", "stablelm", "glm", "helium", "arcee", "phi3", "nemotron",
})  # fmt: skip
#: There is no such field: every head has K and V of its own.
MHA_ONLY = frozenset({
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "codegen", "persimmon", "baichuan",
})  # fmt: skip
#: Attention heads that are known by another name than `num_key_value_heads`, or follow from a flag.
MULTI_QUERY = frozenset({"falcon", "gpt_bigcode"})
#: Families whose modelling code looks at `sliding_window`.
WINDOWED = frozenset({
    "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "phimoe", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "gpt_oss", "starcoder2", "cohere2", "olmo3", "exaone4", "smollm3", "ministral",
    "ministral3", "mimo_v2_flash", "dots1", "cwm", "vaultgemma", "exaone_moe", "afmoe", "laguna", "mellum",
    "granite_swa", "granitemoe_swa",
})  # fmt: skip
#: Of these, which layers slide is known only from `layer_types`.
NEEDS_LAYER_TYPES = frozenset({
    "cwm", "vaultgemma", "exaone_moe", "afmoe", "laguna", "mellum", "granite_swa", "granitemoe_swa", "gemma4_text"
})  # fmt: skip
#: Multi-head latent attention in every layer.
LATENT = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash", "youtu",
    "sarvam_mla", "axk1"
})  # fmt: skip
#: Class defaults in Transformers that published configurations rely on.
DEFAULTS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "vocab_size": 262208, "tie_word_embeddings": True,
    },
    "gemma3n_text": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "num_kv_shared_layers": 15, "vocab_size": 262400, "tie_word_embeddings": True,
    },
    "llama4_text": {
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
        "vocab_size": 202048,
    },
    "gemma4_text": {"global_head_dim": 512, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "gpt2": {"tie_word_embeddings": True},
    "opt": {"tie_word_embeddings": True},
    "bloom": {"tie_word_embeddings": True},
    "recurrent_gemma": {"tie_word_embeddings": True},
    "lfm2": {"tie_word_embeddings": True},
    "zamba2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    "falcon": {"multi_query": True, "tie_word_embeddings": True},
}  # fmt: skip

#: What a field is called that speaks of caching.
SUSPECT = re.compile(
    r"kv_lora|kv_heads|key_value_heads|kv_shar|shar.*kv|cla_|cross_layer|cross_attention|window|attention_chunk|layer_types"
    r"|block_types|blocks?_type|block_configs|mamba|ssm|state_size|d_state|conv_kernel|conv_l|d_conv|linear_|lru"
    r"|index_(topk|n_heads|head)|compress|sparse_attention|attn_layer|attn_type|attention_layer|layer_pattern|hybrid|swa_(num|head|v_head)"
    r"|multi_query|query_groups|head_dim|kv_channels|kv_cache_(?!dtype)|global_head|k_eq_v|kda|lightning|recurrent|per_layer_config",
    re.IGNORECASE,
)
#: Such names that change nothing that is cached.
HARMLESS = frozenset({
    "max_window_layers", "partial_rotary_factor", "linear_conv_bias", "use_mamba_kernels", "no_rope_layer_interval",
    "rope_head_dim", "attention_window_pattern", "mamba_proj_bias", "mamba_conv_bias", "sliding_window_pattern",
    "_sliding_window_pattern", "mtp_layer_types", "mtp_layers_block_type", "ssm_multipliers", "ssm_in_multiplier",
    "ssm_out_multiplier", "mamba_norm_before_gate", "mamba_rms_norm", "mamba_chunk_size", "linear_attn_alpha_factor",
    "linear_attn_beta_factor", "mamba_hidden_act", "mamba_use_mlp", "linear_num_layers", "mamba_inner_layernorms",
    "layernorm_linear_attention_alpha", "mla_scale_kv_lora", "layernorm_linear_attention_beta",
})  # fmt: skip
