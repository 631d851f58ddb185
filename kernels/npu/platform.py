"""Ascend NPUs as a platform. torch_npu is imported when the platform is made, not before."""

# mypy: disable-error-code="attr-defined"
# torch.npu exists after the import of torch_npu.

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from .. import ops
from ..attention import AttentionBackend, KVLayout
from ..graph import DeviceGraph, HostArguments, side_stream
from ..linear import LinearKernels
from ..memory_info import MemoryInfo
from ..platform.compilation import CompileOptions
from ..platform.device import ALONE, Place
from ..platform.memory import MemoryUse
from ..platform.platform import Platform
from . import ops as npu_ops
from . import sgl_kernels, split_norm_rotary
from .attention import AscendAttention
from .collectives import NpuGroup
from .graph import UpdatedGraph
from .refusals import refused as refused_ops
from .weight_only import WeightOnlyKernels

_LEVEL_WITHOUT_GRAPHS = 2  # Level of torch_npu's task queue at which its `capture_begin` raises.


class NpuPlatform(Platform):
    """The first visible NPU, and NPU graphs. Raises `ImportError` if torch_npu is not installed."""

    device_type = "npu"
    collectives = "hccl"
    group_type = NpuGroup
    reduces_products = True
    # None of torch_npu's ops for the Ascend 910 supports float8.
    lacking_dtypes = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
    dispatch_key = "PrivateUse1"
    # Ascend's cache writes need 32-bit slots, its attention kernels pages of 128 tokens.
    slot_dtype = torch.int32
    default_page_size = 128
    shares_pages = False  # Unknown for torch_npu's operators.
    piece_compilers = ("eager",)
    attention_backends = ("ascend",)
    # `npu_fused_infer_attention_score` supports int8 with scales in another layout, and no float8.
    kv_cache_dtypes = ()
    # Each graph holds streams of the device. They run out near 1,800-2,000 graphs.
    graph_budget = 1800

    def __init__(self) -> None:
        import torch_npu

        self._weak_ref_tensor = torch_npu._C._weak_ref_tensor
        self._end_allocate_to_pool = torch_npu._C._npu_endAllocateToPool
        self._release_pool = torch_npu._C._npu_releasePool
        self._reserved_before_graphs = 0

    def set_up(self, num_threads: int | None, place: Place = ALONE) -> None:
        ops.register(self.device_type, npu_ops)

    def remarks(self, layouts: Sequence[KVLayout] = ()) -> dict[str, str]:
        refused = [reason for each in layouts if (reason := AscendAttention.obstacle(each))]
        layers = "all" if len(refused) == len(layouts) else f"{len(refused)} of {len(layouts)}"
        lines = {
            "attention": f"plain torch for {layers} layers, which reads whole contexts: "
            f"{refused[0]}"
            if refused
            else None,
            "task queue": self.graph_obstacle(),
            "kernels": f"plain torch for {', '.join(refused_ops)}, which torch_npu refuses: "
            f"{next(iter(refused_ops.values()))}"
            if refused_ops
            else None,
        }
        return {name: text for name, text in lines.items() if text}

    def check_ranks(self, number: int) -> None:
        if number > (found := torch.npu.device_count()):
            raise ValueError(
                f"{number} ranks need {number} NPUs, but this machine has {found}; use at most "
                f"{found} ranks"
            )

    def use_device(self, index: int) -> None:
        torch.npu.set_device(index)

    def graph_obstacle(self) -> str | None:
        # Older versions only have the variable.
        level = getattr(torch.npu, "get_task_queue_enable", _level_of_environment)()
        if level != _LEVEL_WITHOUT_GRAPHS:
            return None
        return (
            f"TASK_QUEUE_ENABLE={level} prevents torch_npu from capturing graphs, so steps run "
            "without graphs: export TASK_QUEUE_ENABLE=1"
        )

    def device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def identity(self) -> str:
        return f"npu {torch.npu.get_device_name()}"

    def memory(self) -> MemoryInfo:
        return MemoryInfo(*torch.npu.mem_get_info())

    def memory_use(self) -> MemoryUse:
        reserved = torch.npu.memory_reserved()
        # Not every version counts the peak of reserved memory.
        peak_reserved = getattr(torch.npu, "max_memory_reserved", lambda: reserved)()
        return MemoryUse(
            torch.npu.memory_allocated(), torch.npu.max_memory_allocated(), reserved, peak_reserved
        )

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def compile_options(self) -> CompileOptions:
        try:
            import torchair
            from torchair.configs.compiler_config import CompilerConfig
        except ImportError as error:
            raise ValueError(
                "torch.compile on an NPU needs torchair, which comes with CANN's torch_npu "
                f"({error})"
            ) from None
        return CompileOptions(
            backend=torchair.get_npu_backend(compiler_config=CompilerConfig()), dynamic=False
        )

    def split_norm_rotary(self) -> torch._ops.OpOverload | str:
        return sgl_kernels.obstacle() or split_norm_rotary.OP

    def quantized_attention_obstacle(self) -> str | None:
        return "no attention kernel of Ascend writes FP8"

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> LinearKernels | None:
        return WeightOnlyKernels(dtype) if dtype in (torch.bfloat16, torch.float16) else None

    def make_attention_backend(self, name: str) -> AttentionBackend:
        return AscendAttention()

    def graph(self, host_arguments: HostArguments | None = None) -> DeviceGraph:
        if host_arguments is None:
            return DeviceGraph(torch.npu.NPUGraph(), torch.npu.stream, "thread_local")
        return UpdatedGraph(torch.npu.NPUGraph(), "thread_local", host_arguments, torch.npu)

    def graph_pool(self) -> Any:
        self._reserved_before_graphs = torch.npu.memory_reserved()
        return torch.npu.graph_pool_handle()

    def abandon_graph_pool(self, pool: Any) -> None:
        # If the end of a capture raises, torch_npu leaves the pool in capture mode and counts the
        # lost graph as one of its users.
        with suppress(RuntimeError):
            self._end_allocate_to_pool(torch.npu.current_device(), pool)
            self._release_pool(torch.npu.current_device(), pool)

    def graph_bytes(self, pool: Any) -> int:
        """Return what the allocator has reserved since the last pool was made. Weights and KV cache
        were allocated before.
        """
        reserved: int = torch.npu.memory_reserved()
        return max(0, reserved - self._reserved_before_graphs)

    def graph_stream(self) -> Any:
        return torch.npu.Stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        return side_stream(stream, torch.npu.current_stream(), torch.npu.stream)

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        reference: torch.Tensor = self._weak_ref_tensor(tensor)
        return reference

    def empty_cache(self) -> None:
        torch.npu.empty_cache()


def _level_of_environment() -> int:
    blocking = os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"
    return (
        _LEVEL_WITHOUT_GRAPHS if os.environ.get("TASK_QUEUE_ENABLE") == "2" and not blocking else 1
    )
