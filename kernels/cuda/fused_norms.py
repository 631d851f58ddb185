"""flashinfer's all_reduce that also adds, normalises and quantises.

This has not run on two GPUs yet. Names, limits and meanings are those of flashinfer 0.7.2
(`flashinfer/comm/allreduce.py`, `trtllm_allreduce_fusion.cuh`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..fp4 import E4M3, GROUP
from .libraries import has_flashinfer, one_line
from .products import capability

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
_MAJORS = (9, 10, 12)  # Compute capabilities that flashinfer compiles these kernels for.
_SIZES = (2, 4, 8, 16)  # Numbers of ranks.
_WORKSPACE_BYTES = 16 << 20  # Longest message. Longer ones go through nccl.
_VECTOR_BYTES = 16
# flashinfer's AllReduceFusionPattern.
_NORM, _FP8, _FP4, _DYNAMIC_FP8 = 1, 2, 3, 10
_FP4_MAJORS = (10, 12)  # Compute capabilities with the conversion to 4 bits.
_LINEAR = 2  # flashinfer's QuantizationSFLayout: scales [tokens, columns / 16] in order.
_QUANTIZE = "add_rms_norm_quantize_"

has_library = cache(has_flashinfer)


def obstacle(ranks: int | None = None, device: torch.device | None = None) -> str | None:
    """Return why flashinfer cannot fuse on this machine, or None if it can.

    `ranks`: also check the number of ranks. `device`: default is the current one.
    """
    if not has_library():
        return "flashinfer is not installed"
    is_there = device is not None or torch.cuda.is_available()
    has = capability(device or torch.device("cuda")) if is_there else (0, 0)
    if has[0] not in _MAJORS:
        return f"flashinfer has no kernel for compute capability {has[0]}.{has[1]}"
    if ranks is not None and ranks not in _SIZES:
        return f"flashinfer has kernels for {', '.join(map(str, _SIZES))} ranks, not {ranks}"
    return None


class _Kind(NamedTuple):
    """What a kernel and a workspace are made for."""

    pattern: int
    columns: int
    dtype: torch.dtype


class FusedNorms:
    """The fused calls of one group, and their workspaces.

    The first call of each kind is made outside of captures (warm-up does that), and all ranks then
    agree whether it succeeded everywhere. If not, all of them compute the parts separately.
    """

    def __init__(self, group: dist.ProcessGroup, agree: Callable[[bool], bool]) -> None:
        """`agree` returns whether every rank gave True."""
        self._group, self._agree = group, agree
        self._workspaces: dict[tuple[int, torch.dtype], Any] = {}
        self._usable: dict[_Kind, bool] = {}

    def compute(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Do what `FusesNorms.all_reduce_norm` does. Return None if flashinfer cannot."""
        weight, eps, *how = rest
        if not self._takes(x, residual, weight):
            return None
        pattern = _pattern(norm, x, how)
        kind = _Kind(pattern, x.shape[1], x.dtype)
        if kind not in self._usable:
            if _is_capturing(x.device):
                return None
            self._usable[kind] = self._agree(self._tried(kind, x, residual, weight, eps, how))
        if not self._usable[kind]:
            return None
        made = self._call(kind, x, residual, weight, eps, how)
        if pattern != _NORM or not how:
            return made
        # No pattern quantises in this way.
        normalised, total = made
        quantize: Any = getattr(torch.ops.piecework, norm.removeprefix("add_rms_norm_"))
        numbers = quantize(normalised, *how)
        return (*numbers, total) if isinstance(numbers, tuple) else (numbers, total)

    def free_memory(self) -> None:
        """Destroy the workspaces. They are made again if a call follows."""
        while self._workspaces:
            self._workspaces.popitem()[1].destroy()

    def _takes(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        return (
            x.dtype in HALVES
            and x.dim() == 2
            and 0 < x.nbytes <= _WORKSPACE_BYTES
            and x.shape[1] * x.element_size() % _VECTOR_BYTES == 0
            and weight.dtype == x.dtype
            and residual.is_contiguous()
            and obstacle(self._group.size(), x.device) is None
        )

    def _tried(self, kind: _Kind, x: torch.Tensor, *given: Any) -> bool:
        try:
            self._call(kind, x, *given)
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
        except Exception as error:
            # Building and launching foreign kernels raises errors of any type.
            logger.warning(
                "flashinfer's all_reduce with a norm is not used, nccl's is: %s", one_line(error)
            )
            return False
        return True

    def _call(
        self,
        kind: _Kind,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        how: list[Any],
    ) -> tuple[torch.Tensor, ...]:
        total, named = torch.empty_like(x), dict[str, Any]()
        if kind.pattern == _NORM:
            result = named["norm_out"] = torch.empty_like(x)
        elif kind.pattern == _FP4:
            rows, columns = x.shape
            result = named["quant_out"] = x.new_empty(rows, columns // 2, dtype=torch.uint8)
            named["scale_out"] = x.new_empty(rows, columns // GROUP, dtype=E4M3)
            named |= {"scale_factor": how[0], "layout_code": _LINEAR}
        else:
            result = named["quant_out"] = torch.empty_like(x, dtype=E4M3)
        if kind.pattern == _FP8:
            named["scale_factor"] = how[0]
        elif kind.pattern == _DYNAMIC_FP8:
            named["scale_out"] = x.new_empty(x.shape[0], 1, dtype=torch.float32)
        _flashinfer().allreduce_fusion(
            input=x,
            workspace=self._workspace(x),
            pattern=kind.pattern,
            residual_in=residual,
            residual_out=total,
            rms_gamma=weight,
            rms_eps=eps,
            **named,
        )
        scales = (named["scale_out"],) if "scale_out" in named else ()
        return (result, *scales, total)

    def _workspace(self, x: torch.Tensor) -> Any:
        kind = x.shape[1], x.dtype
        if kind not in self._workspaces:
            self._workspaces[kind] = _flashinfer().create_allreduce_fusion_workspace(
                world_size=self._group.size(),
                rank=self._group.rank(),
                max_token_num=_WORKSPACE_BYTES // (x.shape[1] * x.element_size()),
                hidden_dim=x.shape[1],
                dtype=x.dtype,
                group=self._group,
            )
        return self._workspaces[kind]


def _pattern(norm: str, x: torch.Tensor, how: list[Any]) -> int:
    """Return flashinfer's pattern for a norm. `how` are the arguments of its quantisation."""
    if norm == f"{_QUANTIZE}fp4":
        return _FP4 if capability(x.device)[0] in _FP4_MAJORS else _NORM
    if not how or how[-1] != E4M3:
        return _NORM
    if norm == f"{_QUANTIZE}static":
        return _FP8
    return _DYNAMIC_FP8 if how[0] == x.shape[1] else _NORM


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _flashinfer() -> Any:
    return import_module("flashinfer.comm")
