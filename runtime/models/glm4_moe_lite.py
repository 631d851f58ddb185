"""GLM 4.7 Flash: DeepSeek V3 with a configuration that states for each layer whether it has
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.model import ModelConfig
from .deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

ARCHITECTURE = "Glm4MoeLiteForCausalLM"
MODEL_TYPE = "glm4_moe_lite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1536
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.8
    n_group: int = 1
    topk_group: int = 1
    mlp_layer_types: list[str] | None = None


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Glm4MoeLiteConfig
    config_defaults: ClassVar = {
        **DeepseekV3ForCausalLM.config_defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        kinds = config.mlp_layer_types
        if kinds is not None and len(kinds) != config.num_hidden_layers:
            raise ValueError(
                "mlp_layer_types must have an entry for each layer; download the model again"
            )
        return DeepseekV3ForCausalLM.config_fields(config)

    def has_experts(self, layer: int) -> bool:
        kinds = self.config.mlp_layer_types
        if kinds is None or layer >= len(kinds):
            return super().has_experts(layer)
        return bool(kinds[layer] == "sparse")
