"""GPT-Neo (EleutherAI): learned positions, unscaled scores, and layers that mostly alternate
between full attention and a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..config.model import ModelConfig
from ..layers.activation import ACTIVATIONS
from ..layers.decoder import Decoder
from ..layers.linear import StoredTensor, weight
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import renamed

ARCHITECTURE = "GPTNeoForCausalLM"
MODEL_TYPE = "gpt_neo"

_MODULES = {
    # Masks, which old checkpoints hold.
    r".*\.attn\.attention\.(masked_)?bias$": "",
    r"^(transformer\.)?wte\.": "model.embed_tokens.",
    r"^(transformer\.)?wpe\.weight": "model.embed_positions",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"^(transformer\.)?h\.": "model.layers.",
}
_PARTS = {
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"\.attn\.attention\.out_proj\.": ".self_attn.o_proj.",
    r"\.attn\.attention\.": ".self_attn.",
    r"\.c_fc\.": ".up_proj.",
    r"\.c_proj\.": ".down_proj.",
}


class GPTNeoDecoder(Decoder):
    def __init__(self, config: ModelConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.embed_positions = weight(config.max_position_embeddings, config.hidden_size)

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids, positions) + F.embedding(positions, self.embed_positions)


class GPTNeoForCausalLM(CausalLM):
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "intermediate_size": 0,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 256,
        "attention_types": [[["global", "local"], 12]],
    }
    config_names: ClassVar[dict[str, str]] = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "window_size": "sliding_window",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        # `attention_types` lists patterns and how often each is repeated.
        layers, kinds = config.num_hidden_layers, []
        for part in config.attention_types if isinstance(config.attention_types, list) else []:
            match part:
                case [list() as pattern, int() as times] if 0 <= times <= layers:
                    kinds += pattern * times
        if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
            raise ValueError(
                f"attention_types must say global or local for each of {layers} layers, got "
                f"{config.attention_types!r:.80}; download the model again"
            )
        return {
            "num_kv_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
            "windows": [config.sliding_window if kind == "local" else None for kind in kinds],
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(renamed(tensors, _MODULES), _PARTS)

    def make_decoder(self) -> Decoder:
        layers = map(self.make_layer, range(self.config.num_layers))
        return GPTNeoDecoder(self.config, layers, self.make_norm(), [])

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_attention(self, layer: int) -> nn.Module:
        return SelfAttention(self.config, layer, o_bias=True, rotary=None, scale=1.0)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        return MLP(config.hidden_size, config.intermediate_size, activation, bias=True)
