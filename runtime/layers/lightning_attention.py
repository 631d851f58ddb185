"""Lightning attention (arXiv:2401.04658) as in MiniMax-Text-01."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.state import StateLayout
from .linear import Linear, Stretch
from .norm import AllHeadsRMSNorm
from .rotary import Rotations

_NORM_EPS = 1e-6


class LightningAttention(nn.Module):
    """Maps x [T, hidden] to [T, hidden]: linear attention whose state decays by a constant of each
    head.

    A gate [T, heads * D] multiplies the normalised result. `log_decay` [heads] float32 is the
    logarithm of the decay per token, so it is negative.
    """

    log_decay: torch.Tensor

    def __init__(
        self, layer: int, hidden_size: int, head_dim: int, log_decay: torch.Tensor
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.head_dim = layer, len(log_decay), head_dim
        inner = self.num_heads * head_dim
        self.register_buffer("log_decay", log_decay, persistent=False)
        self.qkv_proj = Linear(hidden_size, 3 * inner)
        self.output_gate = Linear(hidden_size, inner)
        self.norm: AllHeadsRMSNorm = AllHeadsRMSNorm(inner, _NORM_EPS)
        self.out_proj = Linear(inner, hidden_size)

    def hold_heads(self, heads: Stretch) -> None:
        """Keep only these heads, for a layer that is split over ranks."""
        self.num_heads = heads.size
        self.log_decay = self.log_decay[heads.begin : heads.begin + heads.size].clone()

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the shapes of the state of a request: one matrix for each head."""
        shape = self.num_heads, self.head_dim, self.head_dim
        return StateLayout(((shape, torch.float32),))

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        # The query, key and value of a head lie side by side.
        q, k, v = self.qkv_proj(x).unflatten(-1, (self.num_heads, 3, -1)).unbind(2)
        vkq = torch.cat((v, k, q), dim=1).flatten(1)
        out = vkq.new_empty(len(vkq), self.num_heads * self.head_dim)
        torch.ops.piecework.lightning_attention(vkq, self.log_decay, out, self.layer)
        output: torch.Tensor = self.out_proj(torch.sigmoid(self.output_gate(x)) * self.norm(out))
        return output
