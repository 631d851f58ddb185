"""Rotary position embedding: cosines and sines by position, gathered once a step for all layers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from ..model_config import ModelConfig


class Rotation(NamedTuple):
    """cos, signed_sin [T, 1, D] of a step's positions, as `kernels.reference.rotary_embedding`
    takes them.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor


class Rotary(nn.Module):
    """Tables of cos and sin [positions, 1, D] in the model's dtype, which `fill` computes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.max_position_embeddings, 1, config.head_dim
        self.cos: torch.Tensor
        self.signed_sin: torch.Tensor
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("signed_sin", torch.empty(shape), persistent=False)

    def fill(self) -> None:
        """To be called once all weights have their place: a configuration whose sizes are wrong
        fails at those, and before tables of such a size are computed.
        """
        positions = torch.arange(len(self.cos), dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(self.config))
        cos, sin = angles.cos(), angles.sin()
        self.cos.copy_(torch.cat((cos, cos), -1)[:, None])
        self.signed_sin.copy_(torch.cat((-sin, sin), -1)[:, None])

    def forward(self, positions: torch.Tensor) -> Rotation:
        return Rotation(self.cos[positions], self.signed_sin[positions])


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a position, [D / 2] float32, on the CPU."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    frequencies: torch.Tensor = 1.0 / config.rope_theta**exponents
    match config.rope_type:
        case "linear":
            return frequencies / float(config.rope_scaling["factor"])
        case "llama3":
            return _llama3(frequencies, config.rope_scaling)
        case "divided":
            return frequencies / torch.tensor(
                config.rope_scaling["factors"], dtype=torch.float32, device="cpu"
            )
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's: waves longer than the original context are stretched by `factor`, short ones
    kept, those between blended.

    Source: the Llama 3.1 reference code's `apply_scaling`; parameters under transformers' names,
    and rounded as there.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths: torch.Tensor = 2 * math.pi / frequencies
    kept: torch.Tensor = (
        (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    ).clamp(0.0, 1.0)
    blended: torch.Tensor = (1 - kept) * frequencies / factor + kept * frequencies
    return blended
