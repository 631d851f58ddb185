"""The CPU as a platform."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from .. import ops
from ..attention import AttentionBackend, KVLayout
from ..collectives import Group
from ..graph import HostArguments
from ..memory_info import MemoryInfo
from ..paged_attention import TorchAttention
from ..platform.device import ALONE, Place
from ..platform.memory import MemoryUse
from ..platform.platform import Platform
from ..step_parts import StepKernels
from . import packed_linear
from .graph import CpuGraph, CpuGraphPool
from .machine.binding import bind, split_cores
from .machine.cores import Threads, choose_threads
from .machine.discard import discard
from .machine.host_memory import host_memory
from .matrix_units import panels_pay
from .native import compiler
from .native import ops as native_ops
from .native.attention import NativeAttention, native_or_torch
from .native.build import leave_out_missing, load_kernels, prepare_kernels
from .native.instruction_sets import instruction_sets
from .native.linear import NativeLinear
from .native.lora import PANEL
from .native.step import make_native_step
from .native.variants import runnable_variants
from .shared_memory import NoSharedMemory, shared_memory_group

try:
    import resource
except ImportError:  # Windows has no resource module.
    resource = None  # type: ignore[assignment]


logger = logging.getLogger(__name__)

_NICENESS = 5  # Used for compilers that run while an engine serves.


class CpuPlatform(Platform):
    """The CPU and the host's memory."""

    device_type = "cpu"
    dispatch_key = "CPU"
    default_max_running_requests = 64
    # The page cache, the web process and other servers need the rest of the host's memory.
    default_mem_fraction = 0.2
    default_encoder_budget = None
    # A layer of an image takes as long as many decodes, and fewer rows multiply more slowly.
    encoder_rows = 64
    runs_beside_host = False
    has_own_memory = False
    slow_dtypes = frozenset({torch.float16})
    ranks_share_memory = True
    cuts_head_groups = True
    graphs_are_real = False
    pieces_keep_bits = True
    allreduce_norm_backend = "shared memory"
    # A CPU is bound by arithmetic, so a padded token costs as much as a real one. Only steps of a
    # captured size are replayed.
    padding_limit = 1.0
    attention_backends = ("native", "torch")
    adapter_panel = PANEL
    _threads = Threads(1)
    _collectives: str | None = None
    _cores: str | None = None

    def identity(self) -> str:
        """Return the instruction sets: torch's name of the best one, and all that Linux lists."""
        return " ".join(
            ["cpu", torch.backends.cpu.get_cpu_capability(), *sorted(instruction_sets())]
        )

    def set_up(self, num_threads: int | None, place: Place = ALONE) -> None:
        bound, self._cores = split_cores(place.cpus, place.size)
        self._threads = choose_threads(num_threads, ranks=place.size, bound=bound)
        # Bind before torch starts threads and before memory is allocated, because memory comes from
        # the core's node.
        if bound:
            self._cores = bind(bound[place.rank], place.cpus) or self._cores
        torch.set_num_threads(self._threads.number)

    def remarks(self, layouts: Sequence[KVLayout] = ()) -> dict[str, str]:
        number, reason = self._threads
        lines = {
            "threads": reason and f"{number}: {reason}",
            "cores": self._cores,
            "collectives": self._collectives,
        }
        return {name: text for name, text in lines.items() if text}

    def check_ranks(self, number: int) -> None:
        if number > (cores := choose_threads().number):
            logger.warning(
                "%d ranks share %d cores and wait for one another: use %d ranks",
                number,
                cores,
                cores,
            )

    def make_group(self, store: Any, rank: int, size: int, *, seconds: float) -> Group:
        """Return a group over shared memory, which is faster than gloo even if ranks
        share cores.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        try:
            if not self.groups_of_torch:
                return shared_memory_group(
                    PrefixStore("shared memory", store), rank, size, seconds=seconds
                )
        except NoSharedMemory as error:
            self._collectives = f"gloo, because ranks share no memory: {error}"
        # By default, gloo would listen on the address of the machine's name.
        if loopback := next((name for _, name in socket.if_nameindex() if name[:2] == "lo"), None):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        return super().make_group(store, rank, size, seconds=seconds)

    def memory(self) -> MemoryInfo:
        """Return the host's memory, or what the control group of this process leaves of it."""
        return host_memory()

    def memory_use(self) -> MemoryUse:
        """Return the resident memory of the process. Linux reports its peak in KiB and with a
        delay, Windows under another name.
        """
        memory = psutil.Process().memory_info()
        past: int = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if resource
            else getattr(memory, "peak_wset", 0)
        )
        peak = max(memory.rss, past)
        return MemoryUse(memory.rss, peak, memory.rss, peak)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "can't allocate memory" in str(error)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # numpy lets the kernel zero pages when they are first touched. torch would write all of
        # them now.
        return (
            torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
            .view(dtype)
            .view(*shape)
        )

    keeps_addresses = sys.platform == "linux"

    def discard(self, tensors: Sequence[torch.Tensor]) -> None:
        discard(tensors)

    def choose_attention(self, name: str = "auto", layouts: Sequence[KVLayout] = ()) -> str:
        falls_back = name == "auto" and not (_has_vectors() and load_kernels() is not None)
        return super().choose_attention("torch" if falls_back else name, layouts)

    def quantized_attention_obstacle(self) -> str | None:
        compiled = _has_vectors() and load_kernels() is not None
        return None if compiled else "attention in plain torch writes 16 bits"

    def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)

    def allreduce_norm_obstacle(self, ranks: int) -> str | None:
        return None if load_kernels() is not None else "the C++ kernels are not compiled"

    def async_tp_obstacle(self) -> str | None:
        return "what is sent takes the cores that multiply"

    def make_attention_backend(self, name: str) -> AttentionBackend:
        backend = native_or_torch() if name == "native" else TorchAttention()
        if isinstance(backend, NativeAttention):
            ops.register(self.device_type, native_ops)
        return backend

    def step_kernels(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        layouts: Sequence[KVLayout],
        k_cache: Sequence[torch.Tensor],
        v_cache: Sequence[torch.Tensor],
        second: Sequence[bool] = (),
    ) -> StepKernels | None:
        return (
            make_native_step(model, layouts, k_cache, v_cache, second)
            if isinstance(backend, NativeAttention)
            else None
        )

    def leave_out_kernels(self) -> bool:
        return _has_vectors() and leave_out_missing()

    def prepare_kernels(
        self, names: Callable[[], Iterable[str]], *, at_low_priority: bool = False
    ) -> bool:
        compiler.niceness = _NICENESS if at_low_priority else 0
        prepare_kernels(names)
        return load_kernels() is not None

    def make_batch_invariant(self) -> bool:
        if (library := load_kernels()) is None:
            return False
        library.piecework_set_batch_invariant(1)
        return True

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> NativeLinear | None:
        # Torch's attention is chosen to get transformers' arithmetic, so use torch's products too.
        if dtype != torch.bfloat16 or not isinstance(backend, NativeAttention):
            return None
        library = load_kernels() if _has_vectors() else None
        if library is None:
            return None
        packs_numbers = panels_pay(library)
        return NativeLinear(library, packs_numbers=packs_numbers, activations=cpu_activations)

    def packs_linear(self, weight_bytes: int) -> bool:
        return 4 * weight_bytes <= self.memory().total and packed_linear.is_available()

    def packed_linear(self) -> torch._ops.OpOverload | None:
        return packed_linear.OP if packed_linear.is_available() else None

    def pack_linear_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return packed_linear.pack(weight)

    def graph(self, host_arguments: HostArguments | None = None) -> CpuGraph:
        return CpuGraph()

    def graph_pool(self) -> CpuGraphPool:
        return CpuGraphPool()

    def graph_bytes(self, pool: CpuGraphPool) -> int:
        return pool.num_bytes


def _has_vectors() -> bool:
    """Return whether the kernels use wider vectors than every CPU of this kind has. If not, torch's
    kernels are faster.
    """
    return runnable_variants()[0].needs != frozenset()
