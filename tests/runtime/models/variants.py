"""Tiny models of each architecture: what `make_tiny_model` takes."""

from __future__ import annotations

from typing import Any

from tests.runtime.models.sizes import (
    DELTA,
    EXPERTS,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GEMMA4_LARGE,
    GROWING,
    INDEXED,
    KIMI,
    LATENT,
    LLAMA3_ROPE,
    LLAMA4,
    MAMBA,
    PHI_LONG,
    SHORT_CONV,
    VISION,
    YARN,
)

LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-head-dim": ("llama", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 100.0,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-large": ("gemma4_text", GEMMA4_LARGE),
    "gemma4-moe": (
        "gemma4_text",
        {
            **GEMMA4_LARGE,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 24, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("phi3", PHI_LONG),
    "gemma3-vision": (
        "gemma3",
        {"text_config": {"head_dim": 32, "sliding_window": 24}, "vision_config": VISION},
    ),
    "mistral3-vision": (
        "mistral3",
        {"text_config": {"model_type": "mistral", "head_dim": 16}, "vision_config": VISION},
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "ministral3-vision": (
        "mistral3",
        {
            "text_config": {
                "model_type": "ministral3",
                "head_dim": 16,
                "rope_parameters": GROWING,
            },
            "vision_config": VISION,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}
            },
            "vision_config": {**VISION, "out_hidden_size": 64, "depth": 1, "num_heads": 2},
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 24,
            "rope_scaling": YARN,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
    ),
    "seed-oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "exaone4": (
        "exaone4",
        {"sliding_window": 24, "layer_types": [*["sliding_attention"] * 2, "full_attention"]},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "falcon": ("falcon", {"bias": True}),
    "falcon-40b": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-11b": (
        "falcon",
        {
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 160,
        },
    ),
    "falcon-rw": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    ),
    "bloom": ("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "mpt": (
        "mpt",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            # Wide enough that some tokens have two experts within reach.
            "router_jitter_noise": 0.3,
            "sliding_window": 24,
        },
    ),
    "gpt-neo": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 24},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "glm4": ("glm4", {"head_dim": 32}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2-moe": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "olmoe": ("olmoe", EXPERTS),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "block_size": 16,
            "sliding_window": 24,
            "full_attn_alpha_factor": 1.4,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.3,
            "linear_attn_beta_factor": 0.7,
            "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.9,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**LATENT, "attention_bias": True, "rope_scaling": {**YARN, "mscale_all_dim": 1.0}},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", LATENT),
    "deepseek-v3.2": ("deepseek_v32", {**INDEXED, "rope_scaling": {**YARN, "mscale_all_dim": 1.0}}),
    "glm5": ("glm_moe_dsa", {**INDEXED, "indexer_types": ["full", "shared", "full"]}),
    "longcat-flash": (
        "longcat_flash",
        {
            **{
                key: value
                for key, value in LATENT.items()
                if not key.startswith(("n_group", "topk"))
            },
            "num_layers": 2,
            "num_hidden_layers": 4,
            "zero_expert_num": 4,
            "head_dim": 16,
        },
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-vision": (
        "llama4",
        {
            "text_config": {
                **LLAMA4,
                "use_qk_norm": False,
                "attn_temperature_tuning": False,
                "moe_layers": [0, 2],
            },
            "vision_config": {
                **VISION,
                **dict.fromkeys(
                    ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32
                ),
            },
        },
    ),
    "lfm2": ("lfm2", {**SHORT_CONV, "tie_word_embeddings": True}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {**MAMBA, "num_local_experts": 0, "tie_word_embeddings": True},
    ),
    "granite4-moe": (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 4,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "time_step_limit": [0.05, 2.0],
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "key_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 0.7,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.9,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.5, 1.1, 0.8, 1.2, 0.7],
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 64,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 24,
            "use_bias": True,
        },
    ),
    "mamba": ("mamba", {"state_size": 6, "time_step_rank": 5, "use_bias": True}),
    "falcon-mamba": ("falcon_mamba", {"mixer_rms_eps": 1e-3, "tie_word_embeddings": True}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 4,
            "expert_layer_offset": 2,
            "num_experts": 4,
            "mamba_proj_bias": True,
        },
    ),
    "zamba": (
        "zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "initializer_range": 0.1,
            "num_attention_heads": 4,
            "mamba_d_state": 24,
            "mamba_proj_bias": True,
            # Otherwise transformers shares no block.
            "tie_word_embeddings": True,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "initializer_range": 0.1,
            "num_mem_blocks": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 24,
            "add_bias_linear": True,
            # Otherwise transformers shares no block.
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 24,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-3": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1-gate": ("falcon_h1", {**FALCON, "tie_word_embeddings": True}),
    "qwen3-next": (
        "qwen3_next",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 80},
    ),
    "kimi-linear": ("kimi_linear", KIMI),
    "olmo-hybrid": (
        "olmo_hybrid",
        {**DELTA, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo-hybrid-positions": (
        "olmo_hybrid",
        {
            "layer_types": DELTA["layer_types"],
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_positions": 4096}),
    "dots1": (
        "dots1",
        {
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
    ),
    "gpt-j": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "gpt-neox": ("gpt_neox", {"tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "ernie4.5": ("ernie4_5", {"head_dim": 16}),
    "phi": ("phi", {"qk_layernorm": True}),
}
"""Models that transformers' code computes."""
VARIANTS = {**LLAMAS, **OTHERS, **FALLBACKS}
"""A new model adds a line to `OTHERS`."""
