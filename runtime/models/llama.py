"""Llama, and the decoder that Mistral, Qwen2 and Qwen3 share with it: they differ by switches of
`ModelConfig`, which their files set.

T tokens, H query heads, K key/value heads, D head size. Parameters are named as in the checkpoints,
fused ones aside.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..layers.linear import Embedding, Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary, Rotation
from ..layers.self_attention import SelfAttention
from ..model_config import ModelConfig

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
GGUF_ARCHITECTURE = "llama"
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised sum of everything before."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        x = self.self_attn(x, rotation)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation)
        assert residual is not None
        return self.norm.add(x, residual)[0]


CONFIG_DEFAULTS: dict[str, Any] = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Of `config_defaults`, the members that every architecture like Llama's has."""


class LlamaForCausalLM(nn.Module):
    """A decoder and its output head, which may be the embedding (`tie_word_embeddings`).

    Modules are named as in Hugging Face's checkpoints, `gguf_names` has what GGUF calls them.
    """

    gguf_names: ClassVar = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        **{f"blk.{{}}.{key}": f"model.layers.{{}}.{name}" for key, name in _GGUF_BLOCK.items()},
    }
    gguf_interleaves_heads = True
    """Whether GGUF files hold the rows of q and k in the order of pairs (2i, 2i + 1)."""
    layers_are_llamas = True
    """Whether kernels that know Llama's layers may compute a whole decode step; False where layers
    compute something else.
    """

    config_defaults: ClassVar[dict[str, Any]] = {
        **CONFIG_DEFAULTS,
        "attention_bias": False,
        "mlp_bias": False,
    }
    """What transformers' configuration takes for members that a config.json leaves out. None: it
    may not, but where null means something. Other members mean nothing here, whatever they are.
    """

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        """The fields of `ModelConfig` that are this architecture's own matter, from the members of
        config.json.
        """
        biased = bool(config.attention_bias)
        return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": bool(config.mlp_bias)}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kv_scales = [(1.0, 1.0)] * config.num_layers
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tied_weights: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions [T] int64 to hidden states [T, hidden], normalised."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] to logits [N, vocab] float32."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """What each layer keeps of a token, in order."""
        layers: Any = self.model.layers
        windows = self.config.windows or [None] * len(layers)
        return [
            layer.self_attn.kv_layout(dtype, window)
            for layer, window in zip(layers, windows, strict=True)
        ]
