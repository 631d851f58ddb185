"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 in parallel in each layer, and multipliers of
most intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..config.rope import is_number
from ..layers.linear import StoredTensor
from ..layers.mamba2 import Mamba2Mixer
from ..layers.mlp import GatedMLP
from ..layers.norm import GatedRMSNorm, RMSNorm
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .hybrid import GGUF_MAMBA, GGUF_MAMBA_KEYS, Mamba2Config, mamba_fields

ARCHITECTURE = "FalconH1ForCausalLM"
MODEL_TYPE = "falcon_h1"
GGUF_ARCHITECTURE = "falcon-h1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(Mamba2Config):
    """The members of config.json.

    `mlp_multipliers` are those of the gate and of the result. `ssm_multipliers` are those of the
    projections of Mamba 2: gate, x, b, c and dt.
    """

    mamba_d_ssm: int | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    mlp_multipliers: list[float] | None = None
    ssm_multipliers: list[float] | None = None


class FalconMixer(Mamba2Mixer):
    """Mamba 2 with multipliers. `config` is a `FalconH1Config`."""

    def __init__(self, config: Any, layer: int) -> None:
        sizes = config.mamba
        norm = None
        if config.mamba_rms_norm:
            first = config.mamba_norm_before_gate
            norm = GatedRMSNorm(sizes.inner, config.norm_eps, groups=sizes.groups, norm_first=first)
        super().__init__(
            layer,
            config.hidden_size,
            sizes,
            norm,
            conv_bias=config.mamba_conv_bias,
            in_bias=config.mamba_proj_bias,
            out_bias=config.projectors_bias,
        )
        self.factor: float = config.ssm_in_multiplier
        self.factors: list[float] = config.ssm_multipliers

    def project(self, x: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        b = 2 * sizes.inner
        c = b + sizes.groups * sizes.state
        at = [sizes.inner, b, c, -sizes.heads]
        parts = super().project(x * self.factor).tensor_split(at, dim=-1)
        return torch.cat([part * by for part, by in zip(parts, self.factors, strict=True)], dim=-1)


class FalconAttention(SelfAttention):
    """Attention with multiplied keys, which equals multiplied scores."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            scale=config.head_dim**-0.5 * config.key_multiplier,
        )


class FalconMLP(GatedMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.gate_factor: float = config.mlp_multipliers[0]
        self.factor: float = config.mlp_multipliers[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: torch.Tensor = self.down_proj(nn.functional.silu(gate * self.gate_factor) * up)
        result: torch.Tensor = down * self.factor
        return result


class FalconLayer(nn.Module):
    """Attention and Mamba 2 in parallel. `config` is a `FalconH1Config`."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mamba = FalconMixer(config, layer)
        self.self_attn = FalconAttention(config, layer)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FalconMLP(config)
        self.factors = (
            config.ssm_out_multiplier,
            config.attention_in_multiplier,
            config.attention_out_multiplier,
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        of_mamba, into, of_attention = self.factors
        mixed = self.mamba(x, rotations) * of_mamba
        mixed = mixed + self.self_attn(x * into, rotations) * of_attention
        x, residual = self.pre_ff_layernorm.add(mixed, residual)
        return self.mlp(x), residual


class FalconH1ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = FalconH1Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }

    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {**GGUF_BLOCK, **GGUF_MAMBA, "ffn_norm": "pre_ff_layernorm"}
    )
    gguf_keys: ClassVar[dict[str, str]] = {**GGUF_MAMBA_KEYS, "ssm.inner_size": "mamba_d_ssm"}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the members without multipliers, because GGUF files hold multiplied weights."""
        return {
            "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
            "mamba_proj_bias": "blk.0.ssm_in.bias" in tensors,
            "projectors_bias": "blk.0.ssm_out.bias" in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # The converter omits the end of these names.
        names = {r"^blk\.(\d+)\.ffn_norm$": r"model.layers.\1.pre_ff_layernorm.weight"}
        return from_llama_cpp(renamed(tensors, names), "mamba")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        inner = config.mamba_d_ssm
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"the activation {config.hidden_act!r:.60} is not supported here; supported: silu"
            )
        return {
            **mamba_fields(
                config, config.mamba_expand * config.hidden_size if inner is None else inner
            ),
            "mlp_multipliers": _factors(config, "mlp_multipliers", 2),
            "ssm_multipliers": _factors(config, "ssm_multipliers", 5),
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(
            tensors,
            {r"\.feed_forward\.": ".mlp.", r"^model\.final_layernorm\.": "model.norm."},
        )

    def embedding_scale(self) -> float:
        scale: float = self.config.embedding_multiplier
        return scale

    def make_layer(self, layer: int) -> nn.Module:
        return FalconLayer(self.config, layer)

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        finished: torch.Tensor = logits * self.config.lm_head_multiplier
        return finished


def _factors(config: Any, name: str, count: int) -> list[float]:
    """Return the multipliers of a member, all 1 if it is missing. Raises `ValueError`."""
    found = getattr(config, name)
    found = [1.0] * count if found is None else found
    if len(found) != count or not all(map(is_number, found)):
        raise ValueError(
            f"{name} must be {count} numbers, got {found!r:.60}; download the model again"
        )
    return [float(each) for each in found]
