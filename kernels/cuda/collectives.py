"""The ranks of NVIDIA GPUs: nccl, and for some passes flashinfer's fused all_reduce and torch's
symmetric memory.

This has not run on two GPUs yet, so only `--passes +allreduce_norm` and `+async_tp` enable it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import TorchGroup
from .libraries import has_flashinfer

_HALVES = (torch.bfloat16, torch.float16)
_WORKSPACE_BYTES = 16 << 20  # Longest message of flashinfer. Longer ones go through nccl.
_NORM = 1  # flashinfer's AllReduceFusionPattern.kARResidualRMSNorm.


class CudaGroup(TorchGroup):
    """`fused_collectives.FusesNorms` and `Pipelines` over nccl."""

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Reduce and normalise by flashinfer up to 16 MiB, then quantise by another op.

        flashinfer chooses between its one-shot and two-shot algorithms. The first call of a kind
        makes a workspace. Warm-up makes these calls before a graph is captured.
        """
        weight, eps, *how = rest
        if (
            x.dtype not in _HALVES
            or x.dim() != 2
            or x.numel() == 0
            or x.nbytes > _WORKSPACE_BYTES
            or weight.dtype != x.dtype
            or not residual.is_contiguous()
            or not _has_flashinfer()
        ):
            return None
        comm, total, normalised = _flashinfer(), torch.empty_like(x), torch.empty_like(x)
        comm.allreduce_fusion(
            input=x,
            workspace=self._workspace(x),
            pattern=_NORM,
            residual_in=residual,
            residual_out=total,
            norm_out=normalised,
            rms_gamma=weight,
            rms_eps=eps,
        )
        if not how:
            return normalised, total
        quantize: Any = getattr(torch.ops.piecework, norm.removeprefix("add_rms_norm_"))
        made = quantize(normalised, *how)
        return (*made, total) if isinstance(made, tuple) else (made, total)

    def multiply(self, op: str, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """Multiply by torch's pipelined products: 16 bits, and FP8 with scales per row or per
        tensor.
        """
        if op not in _PRODUCTS:
            return None
        name = _with_symmetric_memory(self._group)
        if op in ("all_gather_linear", "linear_reduce_scatter"):
            weight, bias = rest
            if x.dtype not in _HALVES or weight.dtype != x.dtype or bias is not None:
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

    def _workspace(self, x: torch.Tensor) -> Any:
        kind = x.shape[1], x.dtype
        made = self.__dict__.setdefault("_workspaces", {})
        if kind not in made:
            made[kind] = _flashinfer().create_allreduce_fusion_workspace(
                world_size=self.size,
                rank=self.rank,
                max_token_num=_WORKSPACE_BYTES // (x.shape[1] * x.element_size()),
                hidden_dim=x.shape[1],
                dtype=x.dtype,
                group=self._group,
            )
        return made[kind]


_has_flashinfer = cache(has_flashinfer)


@cache
def _with_symmetric_memory(group: dist.ProcessGroup) -> str:
    """Return the group's name for the ops of torch.distributed._symmetric_memory."""
    module = import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        # Newer versions do not need this call.
        warnings.simplefilter("ignore", FutureWarning)
        module.enable_symm_mem_for_group(group.group_name)
    return str(group.group_name)


def _flashinfer() -> Any:
    return import_module("flashinfer.comm")


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
