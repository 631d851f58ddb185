"""The layers after the transformer of an embedder or classifier: pooling, projections, norm.

Shapes: T tokens, N texts, H hidden size, L tokens of a text, n texts of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.varlen_attention import Run

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Softmax": partial(torch.softmax, dim=-1),
}


def pool(hidden: torch.Tensor, runs: Sequence[Run], modes: Sequence[str]) -> torch.Tensor:
    """Return [N, H * modes] of the hidden states [T, H] of consecutive texts. Sums are float32."""
    vectors = []
    for run in runs:
        states = run.sequences(hidden)
        vectors.append(torch.cat([_pool(states, mode) for mode in modes], dim=-1))
    return torch.cat(vectors)


def _pool(states: torch.Tensor, mode: str) -> torch.Tensor:
    """Return [n, H] of states [n, L, H]."""
    length = states.shape[1]
    match mode:
        case "cls":
            return states[:, 0]
        case "lasttoken":
            return states[:, -1]
        case "max":
            return states.amax(dim=1)
        case "weightedmean":
            weights = torch.arange(1, length + 1, dtype=torch.float32, device=states.device)
            mean = (states * weights[:, None]).sum(dim=1) / weights.sum()
        case "mean_sqrt_len_tokens":
            mean = states.sum(dim=1, dtype=torch.float32) / length**0.5
        case _:
            mean = states.mean(dim=1, dtype=torch.float32)
    return mean.to(states.dtype)


class DenseLayer(nn.Module):
    """A projection of the pooled vector, with its activation."""

    def __init__(self, linear: nn.Module, activation: str) -> None:
        super().__init__()
        self.linear, self.activation = linear, ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))
