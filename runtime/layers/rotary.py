"""Rotary position embedding: cosines and sines by position, gathered once a step for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...kernels import ops
from ..config.model import ModelConfig
from .rope_scaling import SCALINGS, Scaled

_POSITIONS = 2**16
"""Whose angles are computed at once."""


class Rotation(NamedTuple):
    """cos, signed_sin [T, 1, R] of a step's positions, as `kernels.reference.rotary_embedding`
    takes them; R: the numbers of a head that are turned.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor


Rotations = Sequence[Rotation]
"""One of each table of the model: its layers may turn by different frequencies."""


class Rotary(nn.Module):
    """Tables of cos and sin [positions, 1, R] in the model's dtype, which `fill` computes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.max_position_embeddings, 1, config.rotary_dim
        self.cos: torch.Tensor
        self.signed_sin: torch.Tensor
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("signed_sin", torch.empty(shape), persistent=False)

    def fill(self) -> None:
        """To be called once all weights have their place: a configuration whose sizes are wrong
        fails at those, and before tables of such a size are computed.
        """
        frequencies, factor = scaled_frequencies(self.config)
        for begin in range(0, len(self.cos), _POSITIONS):
            rows = slice(begin, min(begin + _POSITIONS, len(self.cos)))
            positions = torch.arange(rows.start, rows.stop, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, frequencies)
            cos, sin = angles.cos() * factor, angles.sin() * factor
            self.cos[rows] = torch.cat((cos, cos), -1)[:, None]
            self.signed_sin[rows] = torch.cat((-sin, sin), -1)[:, None]

    def forward(self, positions: torch.Tensor) -> Rotation:
        return Rotation(self.cos[positions], self.signed_sin[positions])

    def step_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos, self.signed_sin


def scaled_frequencies(config: ModelConfig) -> Scaled:
    """Radians a position, [R / 2] float32 on the CPU, and the factor of cosines and sines."""
    size = config.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies: torch.Tensor = 1.0 / config.rope_theta**exponents
    try:
        return SCALINGS[config.rope_type](frequencies, config)
    except (ArithmeticError, ValueError):
        raise ValueError(
            f"no frequencies follow from the rope scaling {config.rope_scaling!r:.100} with a "
            f"rope_theta of {config.rope_theta}; fetch the model again"
        ) from None


def plain_rotation(
    positions: torch.Tensor, size: int, theta: float, dtype: torch.dtype, *, divisor: float = 1.0
) -> Rotation:
    """Without a table: of positions [T], by the usual frequencies of `size` numbers, which are
    divided by `divisor`.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    angles = torch.outer(positions.float(), 1.0 / (divisor * theta ** (exponents / size)))
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)
    )


def rotate(x: torch.Tensor, rotation: Rotation, *, interleaved: bool = False) -> torch.Tensor:
    """Turn the first R of the D numbers of each head of x [T, heads, D]; the others stay.

    `interleaved`: pairs are (2i, 2i + 1), and come out as (i, i + R / 2): queries and keys alike,
    whose products do not change by it.
    """
    size = rotation.cos.shape[-1]
    if size < x.shape[-1]:
        turned, kept = x.tensor_split([size], dim=-1)
        turned = rotate(turned, rotation, interleaved=interleaved)
        return torch.cat((turned, kept), dim=-1)
    if interleaved:
        pairs = x.view(*x.shape[:-1], size // 2, 2)
        x = pairs.transpose(-1, -2).flatten(-2)
    return ops.rotary_embedding(x, *rotation)
