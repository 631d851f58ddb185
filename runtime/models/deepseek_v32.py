"""DeepSeek V3.2 (arXiv:2512.02556): DeepSeek V3 with queries that see only the tokens with the
highest index scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.latent_attention import LatentAttention
from ..layers.sparse_attention import Indexer, IndexSizes, SparseLatentAttention
from .causal_lm import gguf_names
from .deepseek_v3 import DeepseekV3ForCausalLM
from .glm4_moe_lite import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

ARCHITECTURE = "DeepseekV32ForCausalLM"
MODEL_TYPE = "deepseek_v32"
GGUF_ARCHITECTURE = "deepseek32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(Glm4MoeLiteConfig):
    """The members that describe an index. A query sees `index_topk` tokens."""

    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    def __post_init__(self) -> None:
        Glm4MoeLiteConfig.__post_init__(self)
        self.check_positive("index_topk", "index_head_dim", "index_n_heads")
        if self.q_lora_rank is None or self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"q_lora_rank is {self.q_lora_rank}, index_head_dim {self.index_head_dim} and "
                f"qk_rope_head_dim {self.qk_rope_head_dim}: an index needs the first, and the "
                "second not below the third; download the model again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV32Config(SparseConfig):
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4


class DeepseekV32ForCausalLM(Glm4MoeLiteForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = DeepseekV32Config
    has_next_layer = False
    attention_class: ClassVar[type[LatentAttention]] = SparseLatentAttention
    config_defaults: ClassVar = {
        **DeepseekV3ForCausalLM.config_defaults,
        "max_position_embeddings": 163840,
    }
    gguf_names: ClassVar[dict[str, str]] = {
        **DeepseekV3ForCausalLM.gguf_names,
        **gguf_names(
            {
                "indexer.k_norm": "self_attn.indexer.k_norm",
                "indexer.proj": "self_attn.indexer.weights_proj",
                "indexer.attn_k": "self_attn.indexer.wk",
                "indexer.attn_q_b": "self_attn.indexer.wq_b",
            }
        ),
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **DeepseekV3ForCausalLM.gguf_keys,
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    }
    index_interleaved: ClassVar[bool] = False

    def has_index(self, layer: int) -> bool:
        return True

    def make_attention(self, layer: int) -> nn.Module:
        config: Any = self.config
        attention: Any = super().make_attention(layer)
        sizes = IndexSizes(config.index_n_heads, config.index_head_dim, config.index_topk)
        attention.selected, attention.indexer = sizes.selected, None
        if self.has_index(layer):
            attention.indexer = Indexer(
                config.hidden_size, config.q_lora_rank, sizes, interleaved=self.index_interleaved
            )
        made: nn.Module = attention
        return made

    def remarks(self) -> dict[str, str]:
        return {
            "sparse attention": f"a token sees {self.config.index_topk:,} tokens; longer texts are "
            "computed by plain torch, whatever the attention backend"
        }
