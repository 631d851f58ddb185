"""The ranks of NVIDIA GPUs: nccl, and for some passes flashinfer's fused all_reduce and torch's
symmetric memory.

This has not run on two GPUs yet. flashinfer's kernels are used where they are installed, after a
first call that all ranks agree on. Only `--passes +async_tp` enables torch's symmetric memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import TorchGroup
from .fused_norms import HALVES, FusedNorms


class CudaGroup(TorchGroup):
    """`fused_collectives.FusesNorms` and `Pipelines` over nccl."""

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Reduce, normalise and quantise to FP8 or FP4 by flashinfer, up to 16 MiB.

        Other quantisations follow as an op of their own.
        """
        return self._norms.compute(norm, x, residual, *rest)

    def free_memory(self) -> None:
        """Destroy the workspaces of flashinfer. See `HoldsMemory`."""
        self._norms.free_memory()

    @cached_property
    def _norms(self) -> FusedNorms:
        return FusedNorms(self._group, self._all)

    def _all(self, mine: bool) -> bool:
        """Return whether every rank gives True."""
        flag = torch.tensor([mine], dtype=torch.int32, device=self._flag_device)
        with self._in("all_reduce"):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    @property
    def _flag_device(self) -> str:
        return "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"

    def multiply(self, op: str, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """Multiply by torch's pipelined products: 16 bits, and FP8 with scales per row or per
        tensor.
        """
        if op not in _PRODUCTS:
            return None
        name = _with_symmetric_memory(self._group)
        if op in ("all_gather_linear", "linear_reduce_scatter"):
            weight, bias = rest
            if x.dtype not in HALVES or weight.dtype != x.dtype or bias is not None:
                return None
            return _PRODUCTS[op](x.contiguous(), weight.t(), name)
        x_scale, weight, weight_scale, bias, dtype = rest
        by_row = x_scale.dim() == 2 and x_scale.shape[1] == weight_scale.shape[-1] == 1
        by_tensor = x_scale.numel() == weight_scale.numel() == 1 and x_scale.dim() == 1
        if (
            x.dtype != torch.float8_e4m3fn
            or weight.dtype != x.dtype
            or dtype != torch.bfloat16
            or bias is not None
            or not (by_tensor or (by_row and weight_scale.shape[0] == weight.shape[0]))
        ):
            return None
        scales = (
            (x_scale[0], weight_scale.reshape(())) if by_tensor else (x_scale, weight_scale.t())
        )
        return _PRODUCTS[op](x.contiguous(), weight.t(), name, *scales, dtype)


@cache
def _with_symmetric_memory(group: dist.ProcessGroup) -> str:
    """Return the group's name for the ops of torch.distributed._symmetric_memory."""
    module = import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        # Newer versions do not need this call.
        warnings.simplefilter("ignore", FutureWarning)
        module.enable_symm_mem_for_group(group.group_name)
    return str(group.group_name)


def _all_gather_linear(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    _, results = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group, return_A=False)
    product: torch.Tensor = results[0]
    return product


def _linear_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    part: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group)
    return part


def _all_gather_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    _, results = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        x, [weight], x_scale, [weight_scale], 0, group, [None], [None], [dtype], [False]
    )
    product: torch.Tensor = results[0]
    return product


def _scaled_linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    part: torch.Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        x,
        weight,
        x_scale,
        weight_scale,
        "sum",
        0,
        0,
        group,
        [x.shape[0], weight.shape[1]],
        out_dtype=dtype,
    )
    return part


_PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather_linear": _all_gather_linear,
    "linear_reduce_scatter": _linear_reduce_scatter,
    "all_gather_scaled_linear": _all_gather_scaled_linear,
    "scaled_linear_reduce_scatter": _scaled_linear_reduce_scatter,
}
