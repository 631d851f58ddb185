"""What the layers of a step share in Triton's paged attention, and what is known of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ..attention import KVLayout
from .attention_tiles import Shape
from .launches import Launch


class Tensors(IntEnum):
    """The tensors of a layer by their places in `Kept.addresses`."""

    Q = 0
    K = 1
    V = 2
    OUT = 3
    K_CACHE = 4
    V_CACHE = 5
    SCALE = 6
    SINKS = 7
    SLOPES = 8
    PARTIAL = 9


class Floats(IntEnum):
    """The floats of a layer by their places in `Kept.values`."""

    SCORE_SCALE = 0
    CAP = 1
    K_SCALE = 2
    V_SCALE = 3


# The launches of a layer, and the shape of what its splits write, if there are any.
Launches = tuple[list[Launch], tuple[int, ...] | None]


@dataclass(slots=True, kw_only=True)
class TritonPlan:
    """The plan that the layers of a step share, on the device, int32 unless noted.

    Attributes:
        slots, block_table: [T] and [B, pages], int64 or int32.
        query_starts, seq_lens: [B + 1] and [B].
        rows, requests: [decodes], the row of a decode's token in the step, and its request.
        prefills: (request, new tokens) of each request with several new tokens.
        longest: Tokens of the longest sequence that may be decoded.
        sizes: [2], tokens of all decoded sequences, and of the longest.
        total: Tokens of all decoded sequences, on the host.
        fixed: The plan is updated for later steps, so each query is a decode.
        tiles: By tokens in a tile: [tiles, 2], what each prefill program computes.
        launches: What repeats the launches of the step's first layer, by all that may differ from
            layer to layer besides addresses, and the shape of what splits write.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    requests: torch.Tensor
    prefills: list[tuple[int, int]]
    longest: int
    sizes: torch.Tensor
    page_size: int
    total: int = 0
    fixed: bool = False
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    launches: dict[Any, Launches] = field(default_factory=dict)


class Kept(NamedTuple):
    """What is known of a layer before its first step.

    Attributes:
        form: All that kernels are compiled by, and nothing else.
        values: Floats of the layer.
    """

    layout: KVLayout
    form: tuple[Any, ...]
    values: tuple[float, ...]
    shape: Shape

    @classmethod
    def of(cls, layout: KVLayout) -> Kept:
        given = (layout.softcap, layout.sinks, layout.slopes)
        form = (
            layout.num_heads, layout.num_kv_heads, layout.key_size, layout.dtype, layout.window,
            layout.cache_dtype, *(each is not None for each in given),
        )  # fmt: skip
        scale = layout.scale * layout.k_scale * math.log2(math.e)
        cap = (layout.softcap or 0.0) * math.log2(math.e)
        shape = Shape(
            layout.num_heads // layout.num_kv_heads, layout.key_size, layout.dtype.itemsize
        )
        return cls(layout, form, (scale, cap, layout.k_scale, layout.v_scale), shape)

    def addresses(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: torch.Tensor | None,
        partial: torch.Tensor,
    ) -> tuple[int, ...]:
        """Return the addresses of a layer's tensors. Kernels do not read those that are missing,
        which get the address of another tensor.
        """
        queries, written = q.data_ptr(), out.data_ptr()
        sinks, slopes = self.layout.sinks, self.layout.slopes
        return (
            queries,
            k.data_ptr(),
            v.data_ptr(),
            written,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            written if scale is None else scale.data_ptr(),
            queries if sinks is None else sinks.data_ptr(),
            queries if slopes is None else slopes.data_ptr(),
            partial.data_ptr(),
        )

    @property
    def kinds(self) -> dict[str, bool]:
        layout = self.layout
        given = {"CAPPED": layout.softcap, "SINKS": layout.sinks, "SLOPES": layout.slopes}
        return {name: each is not None for name, each in given.items()}
