"""GLM 5: DeepSeek V3.2 in other sizes. A layer may reuse the tokens that an earlier layer has
selected (arXiv:2603.12201).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.model import ModelConfig
from .deepseek_v32 import DeepseekV32ForCausalLM, SparseConfig

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"
GGUF_ARCHITECTURE = "glm-dsa"

_KINDS = {"F": "full", "S": "shared"}  # letters of index_topk_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmMoeDsaConfig(SparseConfig):
    """The members that say which layers have an index.

    Attributes:
        indexer_types: "full" for a layer with an index, "shared" for a layer that takes the choice
            of the last one with an index.
        index_topk_pattern: The same as letters, F and S.
        index_topk_freq: Without these lists, every layer with a number below
            `index_skip_topk_offset` has an index, and then every `index_topk_freq`th layer.
    """

    q_lora_rank: int | None = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 32
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = GlmMoeDsaConfig
    config_defaults: ClassVar = {
        **DeepseekV32ForCausalLM.config_defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    }
    index_interleaved: ClassVar[bool] = True

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        layers, pattern = config.num_hidden_layers, config.index_topk_pattern
        kinds = config.indexer_types
        if kinds is None and pattern is not None:
            kinds = [_KINDS.get(each, each) for each in pattern]
        if kinds is None:
            every, first = max(config.index_topk_freq, 1), config.index_skip_topk_offset
            kinds = [
                "shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)
            ]
        known = all(kind in _KINDS.values() for kind in kinds)
        if len(kinds) != layers or not known or kinds[:1] == ["shared"]:
            raise ValueError(
                'indexer_types must say "full" or "shared" of each layer, and "full" of the first; '
                "download the model again"
            )
        return {**DeepseekV32ForCausalLM.config_fields(config), "indexer_types": kinds}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        members = DeepseekV32ForCausalLM.gguf_members(get, tensors)
        # Older files have no metadata of indexes, but every layer with an index has its tensors.
        members["indexer_types"] = [
            "full" if f"blk.{layer}.indexer.attn_k.weight" in tensors else "shared"
            for layer in range(members["num_hidden_layers"])
        ]
        return members

    def has_index(self, layer: int) -> bool:
        return bool(self.config.indexer_types[layer] == "full")
