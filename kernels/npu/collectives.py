"""The ranks of Ascend NPUs: hccl, and with `--passes +async_tp` torch_npu's products that send
parts while they multiply others.

This has not run on two NPUs yet. The limits of the kernels are those of the op documentation of
torch_npu 2.13 (op-plugin, docs/context): two dimensions, 16 bits, a width of 256 to 65534 in the
middle, groups of 2, 4, 8, 16 or 32 ranks.
"""

# mypy: disable-error-code="attr-defined"
# torch.npu exists after the import of torch_npu.

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from ..collectives import TorchGroup
from .refusals import or_else

_HALVES = (torch.bfloat16, torch.float16)
_SIZES = (2, 4, 8, 16, 32)
_LEAST, _MOST = 256, 65534


def _left(x: torch.Tensor, weight: torch.Tensor, name: str, size: int) -> torch.Tensor | None:
    """Return None, so that the caller uses plain ops."""
    return None


class NpuGroup(TorchGroup):
    """`fused_collectives.Pipelines` over hccl."""

    def multiply(self, op: str, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """Multiply 16 bits without a bias, if the kernels support the width.

        After a kernel refused a call once, all ranks use plain ops, because their hardware and
        shapes are the same.
        """
        return multiply(op, self.size, lambda: self._hccl_name, x, *rest)

    @cached_property
    def _hccl_name(self) -> str:
        """The group's name in torch_npu's ops."""
        backend: Any = self._group._get_backend(torch.device("npu"))
        return str(backend.get_hccl_comm_name(self.rank))


def multiply(
    op: str, size: int, name: Callable[[], str], x: torch.Tensor, *rest: Any
) -> torch.Tensor | None:
    """Compute `Pipelines.multiply` of a group of `size` ranks. `name` returns hccl's name."""
    if op not in _PRODUCTS or size not in _SIZES:
        return None
    weight, bias = rest
    if (
        x.dtype not in _HALVES
        or weight.dtype != x.dtype
        or bias is not None
        or x.numel() == 0
        or not _LEAST <= x.shape[1] <= _MOST
    ):
        return None
    return _PRODUCTS[op](x.contiguous(), weight.t(), name(), size)


@or_else(_left)
def all_gather_linear(
    x: torch.Tensor, weight: torch.Tensor, name: str, size: int
) -> torch.Tensor | None:
    product: torch.Tensor = torch.ops.npu.npu_all_gather_base_mm(
        x, weight, name, size, gather_index=0, gather_output=False
    )[0]
    return product


@or_else(_left)
def linear_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, name: str, size: int
) -> torch.Tensor | None:
    part: torch.Tensor = torch.ops.npu.npu_mm_reduce_scatter_base(
        x, weight, name, size, reduce_op="sum"
    )
    return part


@or_else(_left)
def linear_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, name: str, size: int
) -> torch.Tensor | None:
    total: torch.Tensor = torch.ops.npu.npu_mm_all_reduce_base(x, weight, name, reduce_op="sum")
    return total


_PRODUCTS: dict[str, Callable[..., torch.Tensor | None]] = {
    "all_gather_linear": all_gather_linear,
    "linear_reduce_scatter": linear_reduce_scatter,
    "linear_all_reduce": linear_all_reduce,
}
