"""The meaning of torch_npu's products that meet a collective: ranks are threads, whose group goes
by the name that hccl's would have. Source: op-plugin's docs/context of the three ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .checks import check

Tensor = torch.Tensor
GROUPS: dict[str, Any] = {}
"""By hccl's name: what has all_gather, all_reduce, reduce_scatter and size."""
launched: list[str] = []
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    group = _group("npu_all_gather_base_mm", input, x2, bias, hcom, world_size)
    check(gather_index == 0, "npu_all_gather_base_mm: gather_index must be 0")
    gathered = group.all_gather(input)
    return gathered @ x2, gathered if gather_output else input.new_empty(0)


def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    name = "npu_mm_reduce_scatter_base"
    group = _group(name, input, x2, bias, hcom, world_size)
    check(reduce_op == "sum" and len(input) % world_size == 0, f"{name}: rows, or reduce_op")
    part: Tensor = group.reduce_scatter(input @ x2)
    return part


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    group = _group("npu_mm_all_reduce_base", x1, x2, bias, hcom, GROUPS[hcom].size)
    total: Tensor = group.all_reduce(x1 @ x2)
    return total


def _group(
    name: str, x: Tensor, x2: Tensor, bias: Tensor | None, hcom: str, world_size: int
) -> Any:
    check(x.dtype == x2.dtype and x.dtype in FLOATS, f"{name}: {x.dtype} and {x2.dtype}")
    check(x.dim() == x2.dim() == 2 and x.is_contiguous(), f"{name}: two dimensions, x contiguous")
    check(x.shape[1] == x2.shape[0] and x.numel() > 0, f"{name}: the shapes do not fit")
    check(bias is None, f"{name}: no bias is taken")
    group = GROUPS[hcom]
    check(world_size == group.size, f"{name}: the group has {group.size} ranks")
    launched.append(name)
    return group


KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_all_gather_base_mm": npu_all_gather_base_mm,
    "npu::npu_mm_all_reduce_base": npu_mm_all_reduce_base,
    "npu::npu_mm_reduce_scatter_base": npu_mm_reduce_scatter_base,
}
SHAPES: dict[str, Callable[..., Any]] = {
    "npu::npu_all_gather_base_mm": lambda x, x2, hcom, size, **others: (
        x.new_empty(len(x) * size, x2.shape[1]),
        x.new_empty(0),
    ),
    "npu::npu_mm_all_reduce_base": lambda x, x2, hcom, **others: x.new_empty(len(x), x2.shape[1]),
    "npu::npu_mm_reduce_scatter_base": lambda x, x2, hcom, size, **others: x.new_empty(
        len(x) // size, x2.shape[1]
    ),
}
