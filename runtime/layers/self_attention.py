"""The attention layer of decoders like Llama."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ...kernels.step_parts import AttentionParts, NoParts, part_or_none
from ..config.model import ModelConfig
from .attention import attention
from .linear import FusedLinear, Linear, Stretch, weight
from .rotary import Rotations, rotate


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
        q_norm, k_norm: Norms of heads [T, heads, D], applied before the rotation.
        rotary: Index of the model's rotary table. None: the layer uses no positions.
        interleaved: Whether rotated pairs lie side by side.
        scale: Factor of the scores, by default 1 / sqrt(D).
        softcap, chunked: See `KVLayout`.
        sinks: Each head has an additional score that takes weight from all tokens and adds no
            value.
        slopes: Returns the ALiBi slope of a head, by its number among the heads of all ranks.
        bound: Queries, keys and values are clamped to [-bound, bound].
        gated: q_proj gives each head a gate beside its query. The sigmoid of the gate multiplies
            the result of the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rotary: int | None = 0,
        interleaved: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        slopes: Callable[[int], float] | None = None,
        bound: float | None = None,
        chunked: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.gated = gated
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": query * (1 + gated), "k_proj": key, "v_proj": key},
            bias=qkv_bias,
        )
        self.o_proj = Linear(query, config.hidden_size, bias=o_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rotary, self.interleaved = rotary, interleaved
        # A layer that predicts further tokens follows the last one of the list.
        self.window = config.windows[layer] if layer < len(config.windows) else None
        self.chunked = chunked
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.sinks = weight(config.num_heads) if sinks else None
        self.slopes, self.first_head, self.bound = slopes, 0, bound
        self.held_rows: Stretch | None = None
        self.group_size: int | None = None
        self.skipped_heads = 0

    def hold_heads(
        self, heads: Stretch, kv_heads: Stretch, *, group: int, skipped: int = 0
    ) -> None:
        """Keep only these heads. Call this before the weights are created.

        `group`, `skipped`: `group_size` and `skipped_heads` of `KVLayout`.
        """
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        self.first_head = heads.begin
        if heads.size != group * kv_heads.size and kv_heads.size > 1:
            self.group_size, self.skipped_heads = group, skipped
        if self.sinks is not None:
            self.held_rows, self.sinks = heads, weight(heads.size)

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return what the cache keeps of a token, and how it is read."""
        slopes = None
        if self.slopes is not None:
            heads = range(self.first_head, self.first_head + self.num_heads)
            device = self.o_proj.weight.device
            slopes = torch.tensor([*map(self.slopes, heads)], dtype=torch.float32, device=device)
        return KVLayout(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_size=self.head_dim,
            value_size=self.head_dim,
            scale=self.scale,
            dtype=dtype,
            window=self.window,
            chunked=self.chunked,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.detach().float(),
            slopes=slopes,
            group_size=self.group_size,
            skipped_heads=self.skipped_heads,
        )

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Rotate queries and keys [T, heads + kv heads, D] by their positions."""
        assert self.rotary is not None
        return rotate(heads, rotations[self.rotary], interleaved=self.interleaved)

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        heads: torch.Tensor = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.bound is not None:
            heads = heads.clamp(-self.bound, self.bound)
        if self.gated:
            queries, kv = heads.tensor_split([2 * self.num_heads], dim=1)
            queries, gate = queries.view(-1, self.num_heads, 2, self.head_dim).unbind(2)
            heads = torch.cat((queries, kv), dim=1)
        if self.q_norm is None or self.k_norm is None:
            turned, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        else:
            q, k, v = heads.tensor_split(
                [self.num_heads, self.num_heads + self.num_kv_heads], dim=1
            )
            turned = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if self.rotary is not None:
            turned = self.turn(turned, rotations)
        q, k = turned.tensor_split([self.num_heads], dim=1)
        attended = attention(q, k, v, self.layer)
        if self.gated:
            attended = attended * torch.sigmoid(gate.flatten(1))
        output: torch.Tensor = self.o_proj(attended)
        return output

    def step_parts(self) -> AttentionParts:
        is_other = self.slopes is not None or self.bound is not None
        if self.gated or is_other or type(self).turn is not SelfAttention.turn:
            raise NoParts(type(self).__name__)
        norms = part_or_none(self.q_norm), part_or_none(self.k_norm)
        return AttentionParts(self.qkv_proj, self.o_proj, *norms, self.rotary, self.interleaved)
