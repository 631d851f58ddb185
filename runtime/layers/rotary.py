"""Rotary position embeddings. Cosines and sines are gathered once a step for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...kernels import ops
from ..config.model import ModelConfig
from .rope_scaling import SCALINGS, Scaled

_POSITIONS = 2**16  # Positions whose angles are computed at once.


class Rotation(NamedTuple):
    """cos and signed_sin [T, 1, R] of the positions of a step
    (`kernels.reference.rotary_embedding`).

    R is the number of rotated numbers of a head.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor


# One for each table of the model. Layers may use different frequencies.
Rotations = Sequence[Rotation]


class Rotary(nn.Module):
    """Tables of cos and signed_sin [positions, 1, R] in the model's dtype, computed by `fill`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.max_position_embeddings, 1, config.rotary_dim
        self.cos: torch.Tensor
        self.signed_sin: torch.Tensor
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("signed_sin", torch.empty(shape), persistent=False)

    def fill(self) -> None:
        """Compute the tables.

        Call this after all weights have been placed. A damaged configuration with wrong sizes fails
        there, before large tables are computed.
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
    """Return radians per position [R / 2] float32 on the CPU, and the factor of cosines and
    sines.
    """
    size = config.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies: torch.Tensor = 1.0 / config.rope_theta**exponents
    try:
        return SCALINGS[config.rope_type](frequencies, config)
    except (ArithmeticError, ValueError):
        raise ValueError(
            f"rope_scaling {config.rope_scaling!r:.100} with rope_theta {config.rope_theta} gives "
            "no valid frequencies: config.json is damaged, download the model again"
        ) from None


def plain_rotation(
    positions: torch.Tensor, size: int, theta: float, dtype: torch.dtype, *, divisor: float = 1.0
) -> Rotation:
    """Return the rotation of positions [T] without a table.

    The frequencies are the usual ones for `size` numbers, divided by `divisor`.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    angles = torch.outer(positions.float(), 1.0 / (divisor * theta ** (exponents / size)))
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)
    )


def rotate(x: torch.Tensor, rotation: Rotation, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first R of the D numbers of each head of x [T, heads, D]. The others stay.

    If `interleaved`, pairs (2i, 2i + 1) are rotated and stored as (i, i + R / 2). Queries and keys
    are reordered alike, so their products do not change.
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
