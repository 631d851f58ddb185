"""Attention of models whose last layers read the keys and values of earlier ones (Gemma 3n and
Gemma 4).

Shapes: T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels.attention import KVLayout
from ..config.model import ModelConfig
from .attention import attention
from .linear import FusedLinear, StoredTensor
from .norm import RMSNorm, UnweightedRMSNorm
from .rotary import Rotations
from .self_attention import SelfAttention

# Keys and values of a step, by the number of their layer.
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]


def check_shared(config: ModelConfig, count: int) -> None:
    """Raise `ValueError` if the last `count` layers cannot read keys and values of earlier ones."""
    own = config.num_layers - count
    kinds = {window is None for window in config.windows}
    if not 0 < own <= config.num_layers or kinds != {each is None for each in config.windows[:own]}:
        raise ValueError(
            f"num_kv_shared_layers is {count}, but some of those of {config.num_layers} layers "
            "have no earlier layer of their kind; download the model again"
        )


def shared_layer(config: ModelConfig, count: int, layer: int) -> int | None:
    """Return the layer whose keys and values `layer` reads, if it is one of the last `count`: the
    last one of its kind before them. None: the layer has its own.
    """
    own = config.num_layers - count
    is_full = config.windows[layer] is None
    kept = [each for each in range(own) if (config.windows[each] is None) == is_full]
    return None if layer < own else kept[-1]


def without_shared(tensors: Sequence[StoredTensor], own: int) -> list[StoredTensor]:
    """Leave out the keys and values of layers from `own` on."""

    def is_unused(name: str) -> bool:
        found = re.match(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name)
        return found is not None and int(found[1]) >= own

    return [tensor for tensor in tensors if not is_unused(tensor.name)]


class SharedAttention(SelfAttention):
    """Gemma 3's attention with normalised values. A layer that `shares` keys and values reads those
    of the layer with this number, and has only queries of its own.

    If `only_keys`, the values are the keys before they are normalised and rotated (Gemma 4).
    `narrow_spans`: see `KVLayout`.
    """

    def __init__(
        self,
        config: Any,
        layer: int,
        shares: int | None,
        *,
        only_keys: bool = False,
        narrow_spans: bool = False,
    ) -> None:
        eps, biased = config.norm_eps, config.attention_bias
        super().__init__(
            config,
            layer,
            qkv_bias=biased,
            o_bias=biased,
            q_norm=RMSNorm(config.head_dim, eps),
            k_norm=RMSNorm(config.head_dim, eps) if shares is None else None,
            rotary=0 if config.windows[layer] is None else 1,
            scale=1.0,
        )
        self.shares, self.only_keys, self.narrow_spans = shares, only_keys, narrow_spans
        self.v_norm = UnweightedRMSNorm(eps)
        if shares is not None or only_keys:
            parts = {"q_proj": config.num_heads * config.head_dim}
            if shares is None:
                parts["k_proj"] = config.num_kv_heads * config.head_dim
            self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=biased)

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        layout = super().kv_layout(dtype)
        return replace(layout, shares=self.shares, narrow_spans=self.narrow_spans)

    def attend(
        self,
        x: torch.Tensor,
        rotations: Rotations,
        kept: Kept,
    ) -> torch.Tensor:
        """Return attention of x [T, hidden]. `kept` holds the step's keys and values of earlier
        layers; a layer with keys and values of its own adds them.
        """
        assert self.q_norm is not None
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.shares is not None:
            q = self.turn(self.q_norm(heads), rotations)
            k, v = kept[self.shares]
        else:
            assert self.k_norm is not None
            q, k_unturned, v = heads.tensor_split(
                [self.num_heads, self.num_heads + self.num_kv_heads], dim=1
            )
            normed = torch.cat((self.q_norm(q), self.k_norm(k_unturned)), dim=1)
            q, k = self.turn(normed, rotations).tensor_split([self.num_heads], dim=1)
            v = self.v_norm(k_unturned if self.only_keys else v)
            kept[self.layer] = k, v
        output: torch.Tensor = self.o_proj(attention(q, k, v, self.layer))
        return output
