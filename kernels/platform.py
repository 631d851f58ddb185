"""`Platform`: everything that differs between devices. `detect` chooses one per process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import reference
from .attention import AttentionBackend, KVLayout
from .cache_format import CACHE_DTYPES
from .collectives import Group, TorchGroup
from .graph import Graph, HostArguments, weak_ref_tensor
from .linear import LinearKernels
from .memory_info import MemoryInfo as MemoryInfo
from .paged_attention import TorchAttention
from .step_parts import StepKernels


class MemoryUse(NamedTuple):
    """Bytes that this process holds, now and at the peak: in tensors (allocated), and including
    what the allocator keeps for later (reserved).
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


class Place(NamedTuple):
    """A process among the `size` ranks of an engine on this machine. `cpus` is the value of
    `--cpu-bind`.
    """

    rank: int = 0
    size: int = 1
    cpus: str = "auto"


ALONE = Place()


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


class Platform:
    """One kind of device. Subclasses override what differs. No other code asks which machine this
    is.
    """

    device_type: str
    dispatch_key: str  # Where `torch.library` registers our ops.
    slot_dtype: torch.dtype = torch.int64  # For slot mappings and page numbers.
    default_dtype: torch.dtype = torch.bfloat16
    default_page_size: int = 16
    default_chunked_prefill_size: int = 2048
    default_max_running_requests: int = 256
    # Share of the memory left after loading weights that the KV cache takes. None: measure what
    # steps need, and take the rest.
    default_mem_fraction: float | None = None
    # Whether tensors of the device lie in another memory than those of the CPU.
    has_own_memory: bool = True
    ranks_share_memory: bool = False  # Whether all ranks of a machine allocate from one memory.
    # Whether attention supports key/value heads that are read by unequal numbers of query heads.
    cuts_head_groups: bool = False
    # Whether `make_group` must make torch.distributed's default group, because a library uses that.
    groups_of_torch: bool = False
    group_type: type[TorchGroup] = TorchGroup
    # Whether its group may fuse a product and an all_reduce (`fused_collectives.Pipelines`).
    reduces_products: bool = False
    collectives: str = "gloo"  # Backend of torch.distributed for the collectives of ranks.
    # Most device memory that a process takes to trace and compile pieces.
    compiler_bytes: int = 2**30
    piece_compilers: tuple[str, ...] = ("inductor", "eager")  # Compilers of pieces, default first.
    attention_backends: tuple[str, ...] = ("torch",)  # Attention backends, default first.
    # Whether attention can address pages anywhere in a cache of more than 2**31 numbers that holds
    # pages of several kinds of layers.
    shares_pages: bool = True
    kv_cache_dtypes: tuple[str, ...] = tuple(CACHE_DTYPES)  # 8-bit cache formats of attention.
    # dtypes that the device does not have. Weights in these are widened to 16 bits when loaded.
    lacking_dtypes: frozenset[torch.dtype] = frozenset()
    # dtypes that multiply more slowly than float32.
    slow_dtypes: frozenset[torch.dtype] = frozenset()
    # Whether the host can plan the next step while launched work runs.
    runs_beside_host: bool = True
    # Whether kernels are compiled at their first launch, which should happen before a request
    # waits.
    compiles_kernels: bool = False
    # Inductor's mode for whole models. $PIECEWORK_TORCH_COMPILE_MODE overrides it.
    compile_mode: str = "default"
    # Whether a graph captures launches. If not, a graph can only call its work again, and the work
    # must be a callable.
    graphs_are_real: bool = True
    # Most graphs that may exist at once. None: as many as fit the memory.
    graph_budget: int | None = None
    sequence_parallel_tokens: int = 1024  # Least tokens of a step for sequence parallelism.
    # Whether a compiled piece gives the same bits as its ops one by one. If not, a piece that is
    # loaded while the engine serves changes the last bits of later results.
    pieces_keep_bits: bool = False
    # A step is padded to a captured size up to this multiple of its tokens.
    padding_limit: float = 2.0

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def identity(self) -> str:
        """Return what compiled code depends on: the kind of device and its capabilities."""
        return self.device_type

    def set_up(self, num_threads: int | None, place: Place = ALONE) -> None:
        """Prepare this process of an engine, before anything is allocated. `num_threads` is the
        total of all ranks on this machine. Raise `ValueError` with a remedy.
        """

    def check_ranks(self, number: int) -> None:
        """Raise `ValueError` with a remedy if there are not enough devices for `number` ranks."""

    def use_device(self, index: int) -> None:
        """Compute on the device with this index from now on."""

    def make_group(self, store: Any, rank: int, size: int, *, seconds: float) -> Group:
        """Return the `torch.distributed` group of the ranks that meet at `store`. Wait for all of
        them.

        Call it once per process. `seconds` is the timeout for a rank.
        """
        dist.init_process_group(
            self.collectives,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        assert dist.group.WORLD is not None
        return self.group_type(dist.group.WORLD, store, seconds)

    def remarks(self, layouts: Sequence[KVLayout] = ()) -> dict[str, str]:
        """Return lines for the start-up summary, by name: what is unexpected about this machine.
        `layouts` are those of the model's layers with our attention.
        """
        return {}

    def begin_trials(self) -> None:
        """Start the trials of libraries' kernels, if they are needed, so that they are ready when
        the weights are loaded.
        """

    def end_trials(self) -> None:
        """End the trials and free their memory."""

    def memory(self) -> MemoryInfo:
        raise NotImplementedError

    def memory_use(self) -> MemoryUse:
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an allocation failed, so that less work at a time may succeed."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a large tensor of zeros, much of which may never be touched."""
        return torch.zeros(*shape, dtype=dtype, device=self.device())

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> LinearKernels | None:
        """Return kernels that multiply by packed weights, which are packed when loaded. None: torch
        multiplies by the weights as they are.

        `backend` is the chosen attention backend. `cpu_activations` is "bf16", "int8" (in groups,
        if a CPU multiplies by weights in blocks), or "auto".
        """
        return None

    def packs_linear(self, weight_bytes: int) -> bool:
        """Return whether pieces use `packed_linear` in place of `linear`. Ask once per model, and
        pass the answer to the code that makes its pieces.

        `weight_bytes` is the size of all weights that would be packed. The unpacked weights stay in
        memory too, so a machine may have too little.
        """
        return False

    def packed_linear(self) -> torch._ops.OpOverload | None:
        """Return an op (x, weight, bias) that is faster than `linear` on a weight from
        `pack_linear_weight`, or None.
        """
        return None

    def pack_linear_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight [out, in] bfloat16 in the layout of `packed_linear`."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until all launched work has run."""

    def compile_options(self) -> CompileOptions:
        """Return the options for models that `torch.compile` compiles. Raise `ValueError` if this
        device's compiler is not installed.
        """
        return CompileOptions(
            mode=os.environ.get("PIECEWORK_TORCH_COMPILE_MODE") or self.compile_mode,
            settings={"reorder_for_compute_comm_overlap": True},
        )

    def op_versions(self) -> Mapping[str, Any]:
        """Return all versions of the ops that layers call, by name, for comparison.

        A version has some of the ops of `reference`. If an op returns None, it does not support
        that call.
        """
        return {"torch": reference}

    def attention_backend(
        self, name: str = "auto", layouts: Sequence[KVLayout] = ()
    ) -> AttentionBackend:
        """Return the backend that `choose_attention` chooses."""
        return self.make_attention_backend(self.choose_attention(name, layouts))

    def choose_attention(self, name: str = "auto", layouts: Sequence[KVLayout] = ()) -> str:
        """Return the name of the backend to use: `name`, or for "auto" the first that supports all
        `layouts`.

        Raise `ValueError` with a remedy if there is no such backend.
        """
        if name not in ("auto", *self.attention_backends):
            raise ValueError(
                f"--attention-backend {name} is not available on {self.device_type}; choose "
                f"{', '.join(self.attention_backends)}"
            )
        reason = None
        for backend in self.attention_backends if name == "auto" else (name,):
            obstacles = (self.attention_obstacle(backend, each) for each in dict.fromkeys(layouts))
            reason = next(filter(None, obstacles), None)
            if reason is None:
                return backend
        raise ValueError(f"--attention-backend {name}: {reason}; choose auto")

    def check_kv_cache_dtype(self, name: str) -> None:
        """Raise `ValueError` with a remedy if no attention here stores keys and values in this
        format.
        """
        if name not in ("auto", *self.kv_cache_dtypes):
            raise ValueError(
                f"--kv-cache-dtype {name} is not available on {self.device_type}, which supports "
                f"{', '.join(self.kv_cache_dtypes) or '16 bits only'}; choose auto"
            )

    def attention_obstacle(self, name: str, layout: KVLayout) -> str | None:
        """Return why the backend `name` cannot compute such a layer here, or None if it can. This
        may run a trial.
        """
        return None

    def quantized_attention_obstacle(self) -> str | None:
        """Return why attention that writes FP8 (`QuantizedAttention`) is not faster here, or None
        if it is.
        """
        return f"attention on {self.device_type} writes 16 bits"

    def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes for which reducing over ranks and normalising at once is faster
        (`fused_collectives.FusesNorms`).
        """
        return ()

    def sequence_parallel_obstacle(self) -> str | None:
        """Return why sequence parallelism is not faster here, or None if it is for long steps."""
        return f"no gain was measured on {self.device_type}"

    def async_tp_obstacle(self) -> str | None:
        """Return why multiplying while parts are sent (`fused_collectives.Pipelines`) is not faster
        here, or None if it is.
        """
        return f"no gain was measured on {self.device_type}"

    def make_attention_backend(self, name: str) -> AttentionBackend:
        """Return a new backend `name`, one of `attention_backends`."""
        return TorchAttention()

    def step_kernels(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        layouts: Sequence[KVLayout],
        k_cache: Sequence[torch.Tensor],
        v_cache: Sequence[torch.Tensor],
        second: Sequence[bool] = (),
    ) -> StepKernels | None:
        """Return kernels that run whole decodes of `model` faster than op by op, or None. The
        tensors must stay at their addresses.

        `backend` is the chosen attention backend. `layouts`, `k_cache` and `v_cache` have one entry
        per layer. `second` tells whether its pages are those of `AttentionMetadata.window`.
        """
        return None

    def leave_out_kernels(self) -> bool:
        """Compute without kernels that must be compiled first, in this process.

        Return whether a process that is started later has better ones.
        """
        return False

    def prepare_kernels(
        self, formats: Callable[[], Iterable[str]], *, at_low_priority: bool = False
    ) -> bool:
        """Compile missing kernels, together with those for weights in these formats of GGUF files.

        Return whether this process has the device's kernels.
        """
        return True

    def make_batch_invariant(self) -> bool:
        """Make `step_kernels` and products of this process give a row the same bits whatever rows
        are beside it, if each token is a request of its own. Return False if this device has no
        such kernels.
        """
        return False

    def graph_obstacle(self) -> str | None:
        """Return why no graph can be captured in this process and the remedy, or None."""
        return None

    def graph(self, host_arguments: HostArguments | None = None) -> Graph:
        """Return a new graph. `host_arguments` is called before each replay. None: all that changes
        lies in tensors.
        """
        raise NotImplementedError

    def graph_pool(self) -> Any:
        """Return a handle of memory for graphs that are replayed in the order of their captures."""
        raise NotImplementedError

    def abandon_graph_pool(self, pool: Any) -> None:
        """Free what a failed capture left in a pool. Its graphs stay, but nothing may be captured
        into it any more.
        """

    def graph_bytes(self, pool: Any) -> int:
        """Return the bytes that the graphs of a pool take, including their outputs."""
        raise NotImplementedError

    def graph_stream(self) -> Any:
        """Return a stream for warm-up and captures, separate from the serving stream. None if the
        device has no streams.
        """
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on `stream` inside the block: after earlier work, and before later work."""
        return nullcontext()

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory that does not keep the memory alive."""
        return weak_ref_tensor(tensor)

    def empty_cache(self) -> None:
        """Return unused memory to the device."""

    def give_back_memory(self) -> None:
        """Return freed host memory to the system. Loading and steps use host memory on every
        device.

        glibc's allocator keeps freed heap memory below a block that is in use. Device memory stays
        allocated for the next step.
        """
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(ctypes.c_size_t(0))
