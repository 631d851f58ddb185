"""DeepSeek V3 and R1 (arXiv:2412.19437), and Kimi K2: DeepSeek V2 with experts that are scored by
sigmoids and chosen by corrected scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.model import ModelConfig
from ..layers.moe import Routing
from .deepseek_v2 import DeepseekV2ForCausalLM, LatentConfig

ARCHITECTURE = "DeepseekV3ForCausalLM"
MODEL_TYPE = "deepseek_v3"
ALSO_MODEL_TYPE = "kimi_k2"
GGUF_ARCHITECTURE = "deepseek2"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(LatentConfig):
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    rope_interleave: bool = True


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = DeepseekV3Config
    has_next_layer = True
    config_defaults: ClassVar = {
        **DeepseekV2ForCausalLM.config_defaults,
        "max_position_embeddings": 4096,
    }

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return not DeepseekV2ForCausalLM.fits_gguf(get)

    def routing(self) -> Routing:
        config = self.config
        return Routing(
            config.n_routed_experts,
            config.num_experts_per_tok,
            "sigmoid",
            config.norm_topk_prob,
            config.n_group,
            config.topk_group,
            config.routed_scaling_factor,
        )
