"""What stands between the products of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ...kernels import ops

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""By transformers' names, of feed-forward layers without a gate."""


def _gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": _gelu_and_mul,
    "gelu_pytorch_tanh": _gelu_tanh_and_mul,
}
"""By `ModelConfig.activation`: x [T, 2 * I], the gate before the up projection, to activation(gate)
* up, [T, I].
"""


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """x held softly between -cap and cap (Gemma 2, arXiv:2408.00118); None: as it is."""
    return x if cap is None else torch.tanh(x / cap) * cap
