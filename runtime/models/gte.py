"""GTE (arXiv:2407.19669): BERT with rotary positions and a gated feed-forward, as in Alibaba's GTE
v1.5, its multilingual models and Snowflake's Arctic Embed M v2.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ..config.encoder import EncoderConfig
from ..layers.linear import Linear
from .bert import Bert
from .nomic_bert import Mlp, NomicBert, check_only, plain_rope, positive, rotary_fields

ENCODER = "Gte"
MODEL_TYPE = "gte"


class Gte(NomicBert):
    """Attention and the last projection have biases, the gates have none."""

    base: ClassVar = "gte."
    other_base: ClassVar = "new."
    unused: ClassVar = ("lm_head.", "classifier.", *Bert.unused)
    config_names: ClassVar = {}
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "rope_theta": 160_000.0,
        "rope_parameters": None,
        "rope_scaling": None,
        "attention_bias": True,
        "mlp_bias": True,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "position_embedding_type": "rope",
    }
    only: ClassVar[dict[str, Any]] = {
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "position_embedding_type": "rope",
    }
    tensor_names: ClassVar = {
        "attention.qkv_proj": "qkv",
        "attention.o_proj": "out",
        "attn_ln": "attn_norm",
        "mlp_ln": "mlp_norm",
        "mlp.up_gate_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        check_only(config, Gte.only)
        rope = plain_rope(config)
        scaling = config.rope_scaling
        if scaling is not None:
            if scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
                raise ValueError(
                    f"rope_scaling {scaling!r:.80} is not supported; supported: ntk without mixed_b"
                )
            factor = positive("factor", scaling.get("factor"))
            # As in the checkpoints' own code, theta is multiplied and all frequencies are divided.
            head_dim = max(1, config.hidden_size // max(1, config.num_attention_heads))
            rope = rope[0] * factor, factor ** (2 / head_dim)
        return rotary_fields(config, *rope, gated=True)

    def make_mlp(self, config: EncoderConfig) -> nn.Module:
        size, wide = config.hidden_size, config.intermediate_size
        return Mlp(Linear(size, 2 * wide), Linear(wide, size, bias=True), config)
