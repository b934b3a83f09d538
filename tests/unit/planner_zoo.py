"""More configurations as they were published: bytes of a token in 16 bits, billions of weights, and the fields."""

from __future__ import annotations

#: Bytes: layers x (K and V) x KV heads x head size x 2, by hand; a latent has no V. Weights: as published, or None.
ZOO: dict[str, tuple[int, float | None, dict[str, object]]] = {
    "llama-3.2-1b": (16 * 2 * 8 * 64 * 2, 1.24, {"model_type": "llama", "hidden_size": 2048, "intermediate_size":
        8192, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "rope_type": "llama3"}, "torch_dtype": "bfloat16", "tie_word_embeddings": True}),
    "mistral-nemo": (40 * 2 * 8 * 128 * 2, 12.2, {"model_type": "mistral", "hidden_size": 5120,
        "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 131072, "torch_dtype": "bfloat16"}),
    "mixtral-8x22b": (56 * 2 * 8 * 128 * 2, 141, {"model_type": "mixtral", "hidden_size": 6144,
        "intermediate_size": 16384, "num_attention_heads": 48, "num_hidden_layers": 56, "num_key_value_heads": 8,
        "num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None, "vocab_size": 32768,
        "torch_dtype": "bfloat16"}),
    "qwen2.5-7b-1m": (28 * 2 * 4 * 128 * 2, 7.6, {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size":
        18944, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window":
        32768, "use_sliding_window": False, "max_window_layers": 28, "vocab_size": 152064, "torch_dtype":
        "bfloat16", "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),
    "gemma-2-9b": (42 * 2 * 8 * 256 * 2, 9.24, {"model_type": "gemma2", "head_dim": 256, "hidden_size": 3584,
        "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000, "torch_dtype": "bfloat16"}),
    "gemma-3-1b": (26 * 2 * 1 * 256 * 2, 1.0, {"model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152,
        "intermediate_size": 6912, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144, "torch_dtype": "bfloat16"}),
    "gemma-3-12b": (48 * 2 * 8 * 256 * 2, 11.8, {"model_type": "gemma3", "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}, "text_config": {"model_type":
        "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}),
    "gemma-3n-e2b": ((30 - 10) * 2 * 2 * 256 * 2, None, {"model_type": "gemma3n", "torch_dtype": "bfloat16",
        "audio_config": {}, "text_config": {"model_type": "gemma3n_text", "head_dim": 256, "hidden_size": 2048,
        "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30, "layer_types": ["sliding_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 6,
        "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
        "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144}}),
    "phi-2": (32 * 2 * 32 * 80 * 2, 2.78, {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": None, "vocab_size": 51200,
        "torch_dtype": "float16"}),
    "phi-3.5-moe": (32 * 2 * 8 * 128 * 2, 41.9, {"model_type": "phimoe", "hidden_size": 4096, "intermediate_size":
        6400, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts":
        16, "num_experts_per_tok": 2, "sliding_window": 131072, "vocab_size": 32064, "torch_dtype": "bfloat16"}),
    "phi-4": (40 * 2 * 10 * 128 * 2, 14.7, {"model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10, "sliding_window": None,
        "vocab_size": 100352, "torch_dtype": "bfloat16"}),
    "phi-4-mini": (32 * 2 * 8 * 128 * 2, 3.84, {"model_type": "phi3", "hidden_size": 3072, "intermediate_size":
        8192, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window":
        262144, "partial_rotary_factor": 0.75, "vocab_size": 200064, "tie_word_embeddings": True, "rope_scaling":
        {"long_factor": [1.0], "short_factor": [1.0], "type": "longrope"}, "torch_dtype": "bfloat16"}),
    "deepseek-v2": (60 * 576 * 2, 236, {"model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size":
        12288, "moe_intermediate_size": 1536, "num_attention_heads": 128, "num_key_value_heads": 128,
        "num_hidden_layers": 60, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "q_lora_rank": 1536, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 102400,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "torch_dtype":
        "bfloat16", "rope_scaling": {"type": "yarn", "factor": 40}}),
    "deepseek-v2-lite": (27 * 576 * 2, 15.7, {"model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_hidden_layers": 27, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "q_lora_rank": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "vocab_size": 102400, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank":
        512, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn", "factor": 40}}),
    "deepseek-v3": (70272, 671, {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
        "num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "q_lora_rank": 1536, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128]}, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "kv_lora_rank": 512, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn", "factor": 40}}),
    "glm-4.5-air": (46 * 2 * 8 * 128 * 2, 110, {"model_type": "glm4_moe", "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 96, "num_hidden_layers":
        46, "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "vocab_size": 151552, "torch_dtype":
        "bfloat16"}),
    "minimax-m1": (10 * 2 * 8 * 128 * 2, 456, {"model_type": "minimax_m1", "attn_type_list": [0, 0, 0, 0, 0, 0, 0,
        1] * 10, "head_dim": 128, "hidden_size": 6144, "intermediate_size": 9216,
        "layernorm_full_attention_alpha": 3.55, "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 3.55, "layernorm_linear_attention_beta": 1.0, "num_attention_heads":
        64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32,
        "shared_intermediate_size": 0, "sliding_window": None, "vocab_size": 200064, "torch_dtype": "bfloat16"}),
    "llama-4-maverick": (48 * 2 * 8 * 128 * 2, 400, {"model_type": "llama4", "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1408}, "text_config": {"model_type": "llama4_text",
        "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 2,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "no_rope_layers": [], "num_attention_heads":
        40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 128,
        "vocab_size": 202048}}),
    "bamba-9b": (3 * 2 * 8 * 128 * 2, 9.78, {"model_type": "bamba", "attn_layer_indices": [9, 18, 27],
        "hidden_size": 4096, "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "torch_dtype": "bfloat16"}),
    "granite-4-h-small": (4 * 2 * 8 * 128 * 2, 32.2, {"model_type": "granitemoehybrid", "hidden_size": 4096,
        "intermediate_size": 768, "shared_intermediate_size": 1536, "layer_types": ["attention" if i in (5, 15,
        25, 35) else "mamba" for i in range(40)], "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "num_attention_heads":
        32, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10,
        "vocab_size": 100352, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}),
    "falcon-h1-7b": (44 * 2 * 2 * 128 * 2, 7.59, {"model_type": "falcon_h1", "attn_layer_indices": None,
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 12288, "mamba_chunk_size": 256, "mamba_d_conv":
        4, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_use_mlp": True, "num_attention_heads": 12,
        "num_hidden_layers": 44, "num_key_value_heads": 2, "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "vocab_size": 130049, "torch_dtype": "bfloat16"}),
    "mamba2-2.7b": (0, 2.7, {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "state_size":
        128, "expand": 2, "conv_kernel": 4, "n_groups": 1, "num_heads": 80, "head_dim": 64, "chunk_size": 256,
        "vocab_size": 50288, "tie_word_embeddings": True, "time_step_rank": 160, "torch_dtype": "float16"}),
    "gpt-neox-20b": (44 * 2 * 64 * 96 * 2, 20.6, {"model_type": "gpt_neox", "hidden_size": 6144,
        "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44, "vocab_size": 50432,
        "torch_dtype": "float16"}),
    "opt-6.7b": (32 * 2 * 32 * 128 * 2, 6.7, {"model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384,
        "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50272, "torch_dtype": "float16"}),
    "bloom-176b": (70 * 2 * 112 * 128 * 2, 176, {"model_type": "bloom", "n_embed": 14336, "n_layer": 70,
        "num_attention_heads": 112, "hidden_size": 14336, "vocab_size": 250880, "seq_length": 2048, "torch_dtype":
        "bfloat16", "tie_word_embeddings": True}),
    "bloom-560m-old": (24 * 2 * 16 * 64 * 2, 0.56, {"model_type": "bloom", "n_embed": 1024, "n_layer": 24,
        "num_attention_heads": 16, "vocab_size": 250880, "torch_dtype": "bfloat16", "tie_word_embeddings": True}),
    "falcon-7b": (32 * 2 * 1 * 64 * 2, 6.9, {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
        "torch_dtype": "bfloat16"}),
    "falcon-40b": (60 * 2 * 8 * 64 * 2, 41.3, {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers":
        60, "num_attention_heads": 128, "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True,
        "vocab_size": 65024, "torch_dtype": "bfloat16"}),
    "glm-4-9b": (40 * 2 * 2 * 128 * 2, 9.4, {"model_type": "chatglm", "num_layers": 40, "hidden_size": 4096,
        "num_attention_heads": 32, "kv_channels": 128, "ffn_hidden_size": 13696, "padded_vocab_size": 151552,
        "vocab_size": 151552, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 131072,
        "torch_dtype": "bfloat16"}),
    "starcoder2-15b": (40 * 2 * 4 * 128 * 2, 16.0, {"model_type": "starcoder2", "hidden_size": 6144,
        "intermediate_size": 24576, "num_attention_heads": 48, "num_hidden_layers": 40, "num_key_value_heads": 4,
        "sliding_window": 4096, "vocab_size": 49152, "torch_dtype": "bfloat16", "tie_word_embeddings": False}),
    "starcoder": (40 * 2 * 1 * 128 * 2, 15.5, {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40,
        "n_head": 48, "n_inner": 24576, "n_positions": 8192, "multi_query": True, "attention_softmax_in_fp32":
        True, "vocab_size": 49152, "torch_dtype": "float16"}),
    "command-r7b": (32 * 2 * 8 * 128 * 2, 8.03, {"model_type": "cohere2", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 4, "vocab_size": 256000,
        "torch_dtype": "bfloat16"}),
    "command-r-plus": (64 * 2 * 8 * 128 * 2, 103.8, {"model_type": "cohere", "hidden_size": 12288,
        "intermediate_size": 33792, "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "vocab_size": 256000, "model_max_length": 131072, "torch_dtype": "float16"}),
    "smollm3": (36 * 2 * 4 * 128 * 2, 3.08, {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size":
        11008, "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16"}),
    "qwen3-vl-30b": (48 * 2 * 4 * 128 * 2, 30.5, {"model_type": "qwen3_vl_moe", "torch_dtype": "bfloat16",
        "text_config": {"model_type": "qwen3_vl_moe_text", "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers":
        48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "vocab_size": 151936, "rope_scaling": {"mrope_interleaved": True, "rope_type":
        "default"}}}),
    "kimi-vl": (27 * 576 * 2, 15.7, {"model_type": "kimi_vl", "torch_dtype": "bfloat16", "text_config":
        {"model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size":
        1408, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "n_routed_experts":
        64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "vocab_size": 163840, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim":
        128, "kv_lora_rank": 512, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn", "factor": 40}}}),
    "internvl3": (28 * 2 * 4 * 128 * 2, 7.6, {"model_type": "internvl_chat", "torch_dtype": "bfloat16",
        "llm_config": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "max_window_layers": 70,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 151674, "is_encoder_decoder": False,
        "cross_attention_hidden_size": None}}),
    "baichuan2-13b": (40 * 2 * 40 * 128 * 2, 13.9, {"model_type": "baichuan", "hidden_size": 5120,
        "intermediate_size": 13696, "num_attention_heads": 40, "num_hidden_layers": 40, "vocab_size": 125696,
        "model_max_length": 4096, "torch_dtype": "bfloat16"}),
    "lfm2-1.2b": (6 * 2 * 8 * 64 * 2, 1.17, {"model_type": "lfm2", "hidden_size": 2048,
        "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier":
        1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_dim": 2048, "conv_dim_out": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers":
        16, "num_key_value_heads": 8, "use_pos_enc": True, "vocab_size": 65536, "torch_dtype": "bfloat16"}),
    "recurrentgemma-2b": (8 * 2 * 1 * 256 * 2, 2.7, {"model_type": "recurrent_gemma", "_block_types":
        ["recurrent", "recurrent", "attention"], "attention_window_size": 2048, "conv1d_width": 4, "head_dim":
        256, "hidden_size": 2560, "intermediate_size": 15360, "lru_width": 2560, "num_attention_heads": 10,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "vocab_size": 256000, "partial_rotary_factor": 0.5,
        "block_types": ["recurrent", "recurrent", "attention"], "torch_dtype": "bfloat16"}),
    "zamba2-7b": (13 * 2 * 32 * 224 * 2, 7.36, {"model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers":
        81, "num_attention_heads": 32, "num_key_value_heads": 32, "attention_head_dim": 224,
        "attention_hidden_size": 7168, "kv_channels": 112, "num_query_groups": 32, "intermediate_size": 14336,
        "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 2,
        "n_mamba_heads": 112, "num_mem_blocks": 2, "adapter_rank": 128, "use_shared_attention_adapter": False,
        "use_mem_rope": True, "hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77],
        "vocab_size": 32000, "layers_block_type": ["hybrid" if i in (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65,
        71, 77) else "mamba" for i in range(81)], "torch_dtype": "bfloat16"}),
    "exaone-4-32b": (64 * 2 * 8 * 128 * 2, 32, {"model_type": "exaone4", "hidden_size": 5120, "intermediate_size":
        27392, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention"] * 16, "vocab_size": 102400, "torch_dtype":
        "bfloat16"}),
    "olmo-3-7b": (32 * 2 * 32 * 128 * 2, 7.3, {"model_type": "olmo3", "hidden_size": 4096, "intermediate_size":
        11008, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "sliding_window":
        4096, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] *
        8, "vocab_size": 100278, "dtype": "bfloat16"}),
    "ernie-4.5-21b": (28 * 2 * 4 * 128 * 2, 21.8, {"model_type": "ernie4_5_moe", "hidden_size": 2560,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 103424,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16"}),
    "dots.llm1": (62 * 2 * 32 * 128 * 2, 143, {"model_type": "dots1", "hidden_size": 4096, "intermediate_size":
        10944, "moe_intermediate_size": 1408, "num_attention_heads": 32, "num_key_value_heads": 32,
        "num_hidden_layers": 62, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "sliding_window": None, "max_window_layers": 62, "use_sliding_window": False,
        "vocab_size": 152064, "moe_layer_freq": 1, "torch_dtype": "bfloat16"}),
    "longcat": (28 * 2 * 576 * 2, 560, {"model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
        "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512, "moe_topk": 12, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "vocab_size": 131072, "torch_dtype": "bfloat16"}),
}  # fmt: skip
