"""Activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ...kernels import ops

# Activations of feed-forward layers without a gate, by transformers' names.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def _gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# Functions from x [T, 2 * I], gate before up projection, to activation(gate) * up [T, I]. By
# `ModelConfig.activation`.
GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": _gelu_and_mul,
    "gelu_pytorch_tanh": _gelu_tanh_and_mul,
}


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(x / cap), which lies between -cap and cap (Gemma 2, arXiv:2408.00118). If
    `cap` is None, return x.
    """
    return x if cap is None else torch.tanh(x / cap) * cap
