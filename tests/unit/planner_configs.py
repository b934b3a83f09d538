"""Configurations of models as they were published, less what has nothing to do with caching or weights."""

from __future__ import annotations

#: As published, with the fields that have to do with caching and some that only look so; and bytes of a token, bf16.
PUBLISHED: dict[str, tuple[dict[str, object], int]] = {
    "Jamba-v0.1": (
        {
            "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 65536, "attn_layer_offset": 4,
            "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_conv_bias": True,
            "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
            "mamba_inner_layernorms": True, "mamba_proj_bias": False, "n_ctx": 262144, "num_experts": 16,
            "num_experts_per_tok": 2, "sliding_window": None, "use_mamba_kernels": True,
        },
        4 * 2 * 8 * 128 * 2,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "vocab_size": 200064,
            "attn_type_list": [1] * 62, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
            "num_local_experts": 256, "num_experts_per_tok": 8, "use_mtp": True, "num_mtp_modules": 3,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        62 * 2 * 8 * 128 * 2,
    ),
    "MiniMax-Text-01": (
        {
            "model_type": "minimax_text_01", "num_hidden_layers": 80, "hidden_size": 6144, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "vocab_size": 200064,
            "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "layernorm_linear_attention_alpha": 3.5,
            "num_local_experts": 32, "num_experts_per_tok": 2, "shared_intermediate_size": 0,
        },
        10 * 2 * 8 * 128 * 2,
    ),
    "Hunyuan-A13B": (
        {
            "model_type": "hunyuan_v1_moe", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 3072, "vocab_size": 128167,
            "cla_share_factor": 2, "use_cla": False, "num_experts": 64, "moe_topk": [8] * 32,
            "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32,
        },
        32 * 2 * 8 * 128 * 2,
    ),
    "Nemotron-H-8B": (
        {
            "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "mamba_head_dim": 64, "mamba_num_heads": 128, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
            "expand": 2, "chunk_size": 128, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
            "sliding_window": None,
        },
        4 * 2 * 8 * 128 * 2,
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 72, "intermediate_size": 9216, "vocab_size": 163840,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                "kda_layers": [1, 2, 3, 5, 6, 7], "short_conv_kernel_size": 4,
            },
            "moe_intermediate_size": 1024, "moe_layer_freq": 1, "num_experts": 256, "num_experts_per_token": 8,
            "num_shared_experts": 1, "first_k_dense_replace": 1, "mla_use_nope": True,
        },
        7 * 576 * 2,
    ),
    "Mistral-Small-3.2": (
        {
            "model_type": "mistral3", "torch_dtype": "bfloat16", "vision_config": {"head_dim": 64},
            "text_config": {
                "model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32768, "vocab_size": 131072,
                "sliding_window": None,
            },
        },
        40 * 2 * 8 * 128 * 2,
    ),
    "Qwen2.5-VL-7B": (
        {
            "model_type": "qwen2_5_vl", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_window_layers": 28,
            "sliding_window": 32768, "use_sliding_window": False, "vision_config": {"window_size": 112},
        },
        28 * 2 * 4 * 128 * 2,
    ),
    "Gemma-3-4B": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
                "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        34 * 2 * 4 * 256 * 2,
    ),
    "ChatGLM3-6B": (
        {
            "model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32,
            "kv_channels": 128, "ffn_hidden_size": 13696, "padded_vocab_size": 65024, "multi_query_attention": True,
            "multi_query_group_num": 2, "seq_length": 8192, "torch_dtype": "float16",
        },
        28 * 2 * 2 * 128 * 2,
    ),
    "Granite-4.0-H-Micro": (
        {
            "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 8192, "shared_intermediate_size": 8192, "vocab_size": 100352,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_proj_bias": False,
            "num_local_experts": 0, "num_experts_per_tok": 0,
        },
        4 * 2 * 8 * 64 * 2,
    ),
}  # fmt: skip
