"""NVIDIA GPUs as a platform."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from typing import Any

import torch

from .. import ops, reference
from ..attention import AttentionBackend, KVLayout
from ..graph import DeviceGraph, HostArguments, side_stream
from ..linear import LinearKernels
from ..memory_info import MemoryInfo
from ..paged_attention import TorchAttention
from ..platform.memory import MemoryUse
from ..platform.platform import Platform
from . import fused_norms
from .attention import FlashInferAttention, obstacle
from .collectives import CudaGroup
from .libraries import has_flashinfer, installed, names
from .trial_process import TRIALS

logger = logging.getLogger(__name__)


def _installed_weak_ref() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return sgl-kernel's op if sgl-kernel was imported, which happens only after its trial."""
    try:
        found: Callable[[torch.Tensor], torch.Tensor] | None = getattr(
            sys.modules.get("sgl_kernel"), "weak_ref_tensor", None
        )
    except RuntimeError:
        return None
    return found


class CudaPlatform(Platform):
    """The first visible GPU, and CUDA graphs."""

    device_type = "cuda"
    collectives = "nccl"
    group_type = CudaGroup
    allreduce_norm_backend = "flashinfer"
    dispatch_key = "CUDA"
    # Eager pieces start at once. Compiled ones are faster, but the first start takes a minute
    # longer.
    piece_compilers = ("eager", "inductor")
    compile_mode = "max-autotune-no-cudagraphs"
    compiles_kernels = True
    # A CUDA context, and tensors to time kernels on.
    compiler_bytes = 3 * 2**29

    def __init__(self) -> None:
        # Why flashinfer cannot compute a layer, by the request of its trial.
        self._obstacles: dict[str, str | None] = {}
        self.attention_backends = (
            ("flashinfer",) * has_flashinfer()
            + ("triton",) * bool(find_spec("triton"))
            + ("torch",)
        )
        if find_spec("triton"):
            from . import ops as cuda_ops

            ops.register(self.device_type, cuda_ops)

    def remarks(self, layouts: Sequence[KVLayout] = ()) -> dict[str, str]:
        if not find_spec("triton"):
            return {}
        from ..triton.linear import widening

        if self.device() not in widening:
            return {}
        major, minor = torch.cuda.get_device_capability()
        return {
            "fp8": "widened to float16 where it is multiplied: this GPU (compute capability "
            f"{major}.{minor}) has no FP8, which those from 8.9 have; int8 is faster here"
        }

    def check_ranks(self, number: int) -> None:
        if number > (found := torch.cuda.device_count()):
            raise ValueError(
                f"{number} ranks need {number} GPUs, but this machine has {found}; use at most "
                f"{found} ranks"
            )

    def use_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def begin_trials(self) -> None:
        if find_spec("triton"):
            TRIALS.begin(names())

    def end_trials(self) -> None:
        TRIALS.end()

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def identity(self) -> str:
        device = (
            f"cuda {torch.version.cuda} {torch.cuda.get_device_name()} "
            f"{torch.cuda.get_device_capability()}"
        )
        if not find_spec("triton"):
            return device
        import triton

        return f"{device} triton {triton.__version__}"

    def memory(self) -> MemoryInfo:
        return MemoryInfo(*torch.cuda.mem_get_info())

    def memory_use(self) -> MemoryUse:
        return MemoryUse(
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_reserved(),
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> LinearKernels | None:
        if not find_spec("triton"):
            return None
        from ..triton.packed_linear import PackedLinear

        return PackedLinear(dtype, self.device())

    def op_versions(self) -> Mapping[str, Any]:
        versions = {library.name: library for library in installed()}
        if not find_spec("triton"):
            return super().op_versions()
        from ..triton import ops as triton_ops

        return {"torch": reference, "triton": triton_ops, **versions}

    def choose_attention(self, name: str = "auto", layouts: Sequence[KVLayout] = ()) -> str:
        if name == "flashinfer" and name not in self.attention_backends:
            raise ValueError(
                "--attention-backend flashinfer needs flashinfer-python with nvcc, which builds "
                "its kernels, or flashinfer-jit-cache, which contains built ones: install them "
                "(pip install 'piecework[flashinfer]'), or choose auto"
            )
        return super().choose_attention(name, layouts)

    def attention_obstacle(self, name: str, layout: KVLayout) -> str | None:
        if name == "torch":
            return None
        if layout.key_size != layout.value_size and (name == "triton" or not layout.latent):
            return f"{name} needs values of the size of keys"
        if name == "triton":
            from ..triton.attention import obstacle as refusal

            return refusal(layout, torch.device(self.device_type))
        if (reason := obstacle(layout)) is not None:
            return reason
        request = {
            "library": name,
            "call": "attention",
            "heads": [
                layout.num_heads,
                layout.num_kv_heads,
                layout.key_size,
                layout.value_size,
            ],
            "dtype": str(layout.dtype).removeprefix("torch."),
            "cache_dtype": str(layout.cache_dtype or layout.dtype).removeprefix("torch."),
        }
        if str(request) not in self._obstacles:
            reason = self._obstacles[str(request)] = TRIALS.failure(request)
            if reason is not None:
                logger.warning("flashinfer is not used: %s", reason)
        reason = self._obstacles[str(request)]
        if reason is None and layout.latent:
            # Long prompts are expanded to keys and values of each head.
            longest = max(FlashInferAttention.head_sizes)
            plain = KVLayout.of_heads(layout.num_heads, layout.num_heads, longest, layout.dtype)
            return self.attention_obstacle(name, plain)
        return reason

    def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
        return fused_norms.HALVES

    def allreduce_norm_obstacle(self, ranks: int) -> str | None:
        return fused_norms.obstacle(ranks)

    def quantized_attention_obstacle(self) -> str | None:
        first = self.attention_backends[0]
        return None if first == "triton" else f"attention by {first} writes 16 bits"

    def make_attention_backend(self, name: str) -> AttentionBackend:
        if name == "torch":
            return TorchAttention()
        from ..triton.attention import TritonAttention, store_keys_and_values

        return (
            FlashInferAttention(store_keys_and_values)
            if name == "flashinfer"
            else TritonAttention()
        )

    def graph(self, host_arguments: HostArguments | None = None) -> DeviceGraph:
        # Restrict only this thread's calls during a capture. Other threads may copy and allocate
        # meanwhile.
        return DeviceGraph(torch.cuda.CUDAGraph(), torch.cuda.stream, "thread_local")

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def abandon_graph_pool(self, pool: Any) -> None:
        # If the end of a capture raises, torch leaves the pool in capture mode and counts the lost
        # graph as one of its users.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)

    def graph_bytes(self, pool: Any) -> int:
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool, include_traces=False)  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    def graph_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return side_stream(stream, torch.cuda.current_stream(), torch.cuda.stream)

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        reference: torch.Tensor = (_installed_weak_ref() or super().weak_ref_tensor)(tensor)
        return reference

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()
