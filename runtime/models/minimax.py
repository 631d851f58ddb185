"""MiniMax-Text-01 and MiniMax-M1 (arXiv:2501.08313): lightning attention in most layers, softmax
attention in the others, mixtures of experts, and multipliers of the normalised stream and of the
results added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..config.model_registry import UnsupportedError
from ..layers.decoder import DecoderLayer
from ..layers.lightning_attention import LightningAttention
from ..layers.linear import StoredTensor
from ..layers.rotary import Rotations
from .causal_lm import CausalLM
from .checkpoint import renamed
from .hybrid import kinds_of_layers
from .minimax_m2 import turned_part
from .mixtral import MixtralForCausalLM, mixtral_experts

ARCHITECTURE = "MiniMaxForCausalLM"
MODEL_TYPE = "minimax"

_KINDS = ("linear_attention", "full_attention")  # By their numbers in `attn_type_list`.


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(ModelConfig):
    """`..._alpha_factor` multiplies the stream, `..._beta_factor` the result that a layer adds to
    it.
    """

    layer_types: list[str] | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0


class MiniMaxLayer(DecoderLayer):
    """A layer that adds results to the normalised stream.

    `attention_factors` and `mlp_factors` are factors of the stream and of the result.
    """

    def __init__(
        self,
        config: Any,
        attention: nn.Module,
        mlp: nn.Module,
        attention_factors: tuple[float, float],
    ) -> None:
        super().__init__(config, attention, mlp)
        self.attention_factors = attention_factors
        self.mlp_factors = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x = self.input_layernorm(x)
        else:
            x, _ = self.input_layernorm.add(x, residual)
        alpha, beta = self.attention_factors
        attended = getattr(self, self.mixer)(x, rotations)
        x, _ = self.post_attention_layernorm.add(attended * beta, x * alpha)
        alpha, beta = self.mlp_factors
        return self.mlp(x) * beta, x * alpha


class MiniMaxForCausalLM(CausalLM):
    """Some files use the names of MiniMax's own code for the factors and the kinds of layers."""

    config_class: ClassVar[type[ModelConfig]] = MiniMaxConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rotary_dim": None,
        "sliding_window": None,
    }
    config_names: ClassVar[dict[str, str]] = {
        f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
        for theirs, ours in (
            ("full_attention", "full_attn"),
            ("linear_attention", "linear_attn"),
            ("mlp", "mlp"),
        )
        for factor in ("alpha", "beta")
    }
    takes_partial_rotary = True

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if getattr(config, "shared_intermediate_size", 0) not in (0, [0]):
            raise UnsupportedError(
                "an expert that all tokens go through (shared_intermediate_size) is not supported "
                "beside MiniMax's; choose another model"
            )
        default = [_KINDS[1 - layer % 2] for layer in range(config.num_hidden_layers)]
        if isinstance(numbers := getattr(config, "attn_type_list", None), list):
            default = [_KINDS[kind] if kind in (0, 1) else kind for kind in numbers]
        if config.layer_types is None:
            config.layer_types = default
        kinds = kinds_of_layers(config, _KINDS, default)
        window = config.sliding_window
        windows = [window if kind == _KINDS[1] else None for kind in kinds["layer_types"]]
        return {**kinds, **turned_part(config), "windows": windows}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # transformers also writes tensors that follow from the configuration.
        kept = renamed(tensors, {r".*\.self_attn\.(slope_rate|\w+_decay)$": ""})
        return MixtralForCausalLM.checkpoint_tensors(config, kept)

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            factors = config.full_attn_alpha_factor, config.full_attn_beta_factor
            return MiniMaxLayer(config, self.make_attention(layer), mlp, factors)
        factors = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        return MiniMaxLayer(config, self.make_lightning(layer), mlp, factors)

    def make_lightning(self, layer: int) -> nn.Module:
        """Return a mixer. Each head has its own decay, and later layers decay more slowly."""
        config = self.config
        exponents = torch.arange(1, config.num_heads + 1, dtype=torch.float32)
        rates = 2.0 ** (-8.0 / config.num_heads * exponents)
        rates = rates * (1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5)
        return LightningAttention(layer, config.hidden_size, config.head_dim, -rates)

    def make_mlp(self, layer: int) -> nn.Module:
        return mixtral_experts(self.config)
