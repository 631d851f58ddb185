"""Sizes and members that variants of several architectures share."""

from __future__ import annotations

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHI_LONG = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}
GROWING = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
INDEXED = {
    **LATENT,
    "index_topk": 16,
    # Many, so that no scores are equal: all heads of a token give 0 once in 65,536 times.
    "index_n_heads": 16,
    "index_head_dim": 24,
}
LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.5,
}
SHORT_CONV = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
    "conv_L_cache": 4,
    "block_multiple_of": 32,
    # Its configuration says True otherwise.
    "tie_word_embeddings": False,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
FALCON = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GEMMA3N = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 400,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 8,
    "final_logit_softcapping": 5.0,
    "rope_local_base_freq": 100.0,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 0,
}
# Keys that are values, in layers with one head of them.
GEMMA4_LARGE = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
KIMI = {
    **{name: size for name, size in LATENT.items() if name not in ("n_routed_experts",)},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 24,
    # transformers' own chunks are exact to 1e-4 with larger weights.
    "initializer_range": 0.1,
    "q_lora_rank": None,
    "num_local_experts": 8,
}
