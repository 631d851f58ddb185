"""Compiled code for a device: its compilers, and the rewrites that are faster there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .linear_packing import LinearPacking


class CompileOptions(NamedTuple):
    """How `torch.compile` compiles for a device.

    `backend` is "inductor", or a function that takes a graph and its example inputs. `mode` and
    `settings` are inductor's. A setting that the installed version does not have is left out.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    settings: Mapping[str, Any] = MappingProxyType({})


class Compilation(LinearPacking):
    """What passes and compilers of pieces ask a device.

        compiler = compilation.piece_compilers[0]
        splits_rows = compilation.sequence_parallel_obstacle() is None

    A method whose name ends with `obstacle` returns why a rewrite is not faster here, or None if it
    is.
    """

    piece_compilers: tuple[str, ...] = ("inductor", "eager")  # Compilers of pieces, default first.
    # Most device memory that a process takes to trace and compile pieces.
    compiler_bytes: int = 2**30
    # Inductor's mode for whole models. $PIECEWORK_TORCH_COMPILE_MODE overrides it.
    compile_mode: str = "default"
    # Whether a compiled piece gives the same bits as its ops one by one. If not, a piece that is
    # loaded while the engine serves changes the last bits of later results.
    pieces_keep_bits: bool = False
    # What reduces over ranks and normalises at once.
    allreduce_norm_backend: str = "separate kernels"
    # Whether its group may fuse a product and an all_reduce (`fused_collectives.Pipelines`).
    reduces_products: bool = False
    sequence_parallel_tokens: int = 1024  # Least tokens of a step for sequence parallelism.

    def compile_options(self) -> CompileOptions:
        """Return the options for models that `torch.compile` compiles. Raise `ValueError` if this
        device's compiler is not installed.
        """
        return CompileOptions(
            mode=os.environ.get("PIECEWORK_TORCH_COMPILE_MODE") or self.compile_mode,
            settings={"reorder_for_compute_comm_overlap": True},
        )

    def quantized_attention_obstacle(self) -> str | None:
        """Return why attention that writes FP8 (`QuantizedAttention`) is not faster here, or None
        if it is.
        """
        return f"attention on {self.device_type} writes 16 bits"

    def split_norm_rotary(self) -> torch._ops.OpOverload | str:
        """Return the op that splits queries, keys and values and normalises and rotates heads, or
        why there is none.
        """
        return f"{self.device_type} has no kernel"

    def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that `allreduce_norm_backend` reduces and normalises at once."""
        return ()

    def allreduce_norm_obstacle(self, ranks: int) -> str | None:
        """Return why reducing over so many ranks and normalising at once is not faster here, or
        None if it is (`fused_collectives.FusesNorms`).
        """
        return f"no gain was measured on {self.device_type}"

    def sequence_parallel_obstacle(self) -> str | None:
        """Return why sequence parallelism is not faster here, or None if it is for long steps."""
        return f"no gain was measured on {self.device_type}"

    def async_tp_obstacle(self) -> str | None:
        """Return why multiplying while parts are sent (`fused_collectives.Pipelines`) is not faster
        here, or None if it is.
        """
        return f"no gain was measured on {self.device_type}"
