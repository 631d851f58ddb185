"""`Platform`: everything that differs between devices, one class to override, chosen once by
`detect`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
    """Bytes that this process holds: in tensors, and with what the allocator keeps for later; each
    now and at its peak.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


class Place(NamedTuple):
    """A process among the `size` ranks of an engine that this machine has. `cpus`: which cores they
    are bound to, as `--cpu-bind` says it.
    """

    rank: int = 0
    size: int = 1
    cpus: str = "auto"


ALONE = Place()


class CompileOptions(NamedTuple):
    """How `torch.compile` compiles for a device.

    `backend`: inductor, or what takes a graph and its example inputs. `mode` and `settings` are
    inductor's; a setting that a version does not have is left out.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    settings: Mapping[str, Any] = MappingProxyType({})


class Platform:
    """One kind of device. Subclasses override what differs; nobody else asks what machine this
    is.
    """

    device_type: str
    dispatch_key: str
    """Where `torch.library` registers our custom ops."""
    slot_dtype: torch.dtype = torch.int64
    """dtype of slot mappings and page numbers."""
    default_dtype: torch.dtype = torch.bfloat16
    default_page_size: int = 16
    default_chunked_prefill_size: int = 2048
    default_max_running_requests: int = 256
    default_mem_fraction: float | None = None
    """Share of the memory that is free once the weights are loaded that the KV cache takes; None:
    what steps leave, which is tried out.
    """
    has_own_memory: bool = True
    """Whether tensors of the device lie elsewhere than those of the CPU."""
    ranks_share_memory: bool = False
    """Whether the ranks of one machine take their weights and caches from one memory."""
    cuts_head_groups: bool = False
    """Whether attention takes layers whose key/value heads are read by unequal numbers of heads."""
    groups_of_torch: bool = False
    """Set where `make_group` must make torch.distributed's default group, which a library uses."""
    group_type: type[TorchGroup] = TorchGroup
    reduces_products: bool = False
    """Whether the group of its ranks may multiply and all_reduce in one go
    (`fused_collectives.Pipelines`).
    """
    collectives: str = "gloo"
    """torch.distributed's backend for what the ranks of an engine compute together."""
    compiler_bytes: int = 2**30
    """Most that a process that traces and compiles pieces takes of the device's memory."""
    piece_compilers: tuple[str, ...] = ("inductor", "eager")
    """How pieces of a model may be compiled; the first is the default."""
    attention_backends: tuple[str, ...] = ("torch",)
    """How attention may be computed; the first is the default."""
    shares_pages: bool = True
    """Whether attention finds pages anywhere in a cache of more than 2**31 numbers, in which pages
    of several kinds of layers lie.
    """
    kv_cache_dtypes: tuple[str, ...] = tuple(CACHE_DTYPES)
    """In which 8-bit formats attention can keep keys and values."""
    lacking_dtypes: frozenset[torch.dtype] = frozenset()
    """Of which there are no numbers on this device: weights that are stored in such are widened to
    16 bits when they are loaded.
    """
    slow_dtypes: frozenset[torch.dtype] = frozenset()
    """In which numbers are multiplied so slowly that float32 is better."""
    runs_beside_host: bool = True
    """Whether what is launched runs while the host goes on, so that the host can plan the next step
    meanwhile.
    """
    compiles_kernels: bool = False
    """Whether kernels are compiled when they are first launched, which no request should wait for.
    """
    compile_mode: str = "default"
    """Inductor's mode for whole models, unless $PIECEWORK_TORCH_COMPILE_MODE names another."""
    graphs_are_real: bool = True
    """Whether a graph records what is launched. If not, it can only call work again, and must know
    it as a callable.
    """
    graph_budget: int | None = None
    """Most graphs that may exist at once; None: as many as fit the memory."""
    sequence_parallel_tokens: int = 1024
    """From how many tokens on a step's rows are split over ranks, where they are."""
    # Whether a compiled piece gives the bits of the same ops one by one: it calls the device's
    # kernels, and what it fuses rounds as it does alone. Else a piece that comes in while the
    # engine serves changes the last bits of what follows.
    pieces_keep_bits: bool = False
    padding_limit: float = 2.0
    """Padding a step to a captured size pays up to this many times its tokens."""

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def identity(self) -> str:
        """What code that was compiled for this device depends on: its kind and what it can do."""
        return self.device_type

    def set_up(self, num_threads: int | None, place: Place = ALONE) -> None:
        """Called once in each process of an engine before anything is allocated. `num_threads`: of
        all ranks of this machine together. Raises `ValueError` with a remedy.
        """

    def check_ranks(self, number: int) -> None:
        """Raises `ValueError` with a remedy where so many ranks do not find a device each."""

    def use_device(self, index: int) -> None:
        """This process computes on this device of the machine from now on."""

    def make_group(self, store: Any, rank: int, size: int, *, seconds: float) -> Group:
        """The group of the ranks that meet at `store`, one of torch.distributed; waits for all.
        Once a process. `seconds`: how long a rank is waited for.
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
        """What the start-up summary says about this machine, each line by its name: what is other
        than one would expect.

        `layouts`: of the model's layers, where it has attention of ours.
        """
        return {}

    def begin_trials(self) -> None:
        """Start what tries out libraries' kernels, if that is to be done, so that it is ready when
        the weights are loaded.
        """

    def end_trials(self) -> None:
        """All that will be tried has been: give its memory back."""

    def memory(self) -> MemoryInfo:
        raise NotImplementedError

    def memory_use(self) -> MemoryUse:
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an allocation failed, so that less work at a time may succeed."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A large tensor of zeros, of which much may never be touched."""
        return torch.zeros(*shape, dtype=dtype, device=self.device())

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> LinearKernels | None:
        """What multiplies by weights in a layout of its own, into which they are brought when they
        are loaded; None: torch, as they are.

        `backend`: the attention that was chosen. `cpu_activations`: "bf16", "int8" in groups where
        a CPU multiplies them by weights in blocks, or "auto".
        """
        return None

    def packs_linear(self, weight_bytes: int) -> bool:
        """Whether pieces are to take `packed_linear` in the place of `linear`. To be asked once a
        model, and told to who makes its pieces.

        `weight_bytes`: of all weights that would be packed. They stay as they were too, so not
        every machine has the memory.
        """
        return False

    def packed_linear(self) -> torch._ops.OpOverload | None:
        """An op (x, weight, bias) that is faster than `linear` on a weight that
        `pack_linear_weight` has laid out anew; None: no such.
        """
        return None

    def pack_linear_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [out, in] bfloat16 as `packed_linear` takes it."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until everything that was launched has run."""

    def compile_options(self) -> CompileOptions:
        """For models that `torch.compile` compiles. Raises `ValueError` where this device's
        compiler is not installed.
        """
        return CompileOptions(
            mode=os.environ.get("PIECEWORK_TORCH_COMPILE_MODE") or self.compile_mode,
            settings={"reorder_for_compute_comm_overlap": True},
        )

    def op_versions(self) -> Mapping[str, Any]:
        """Everything that could compute the ops that layers call, by name, to be compared.

        A version has some of the ops of `reference`; None as a result: not this call.
        """
        return {"torch": reference}

    def attention_backend(
        self, name: str = "auto", layouts: Sequence[KVLayout] = ()
    ) -> AttentionBackend:
        """The backend that `choose_attention` chooses."""
        return self.make_attention_backend(self.choose_attention(name, layouts))

    def choose_attention(self, name: str = "auto", layouts: Sequence[KVLayout] = ()) -> str:
        """The name of the backend to take: `name`, or for auto the first that can compute all
        layers of a model, where their layouts are known.

        Raises `ValueError` with a remedy where this machine has none such, or it cannot.
        """
        if name not in ("auto", *self.attention_backends):
            raise ValueError(
                f"--attention-backend {name} is not to be had on {self.device_type}; choose "
                f"{', '.join(self.attention_backends)}"
            )
        reason = None
        for backend in self.attention_backends if name == "auto" else (name,):
            obstacles = (self.attention_obstacle(backend, each) for each in dict.fromkeys(layouts))
            reason = next(filter(None, obstacles), None)
            if reason is None:
                return backend
        raise ValueError(f"--attention-backend {name}: {reason}; take auto")

    def check_kv_cache_dtype(self, name: str) -> None:
        """Raises `ValueError` with a remedy where no attention here keeps keys and values so."""
        if name not in ("auto", *self.kv_cache_dtypes):
            raise ValueError(
                f"--kv-cache-dtype {name} is not to be had on {self.device_type}, whose attention "
                f"takes {', '.join(self.kv_cache_dtypes) or '16 bits alone'}; take auto"
            )

    def attention_obstacle(self, name: str, layout: KVLayout) -> str | None:
        """Why the backend `name`, one of `attention_backends`, cannot compute such a layer here,
        which may be tried out; None: it can.
        """
        return None

    def quantized_attention_obstacle(self) -> str | None:
        """Why no attention of this device gains by writing FP8 itself; None: it does
        (`QuantizedAttention`).
        """
        return f"attention on {self.device_type} writes 16 bits"

    def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
        """Of what sums over ranks this device gains by reducing and normalising at once
        (`fused_collectives.FusesNorms`).
        """
        return ()

    def sequence_parallel_obstacle(self) -> str | None:
        """Why this device gains nothing by norms of a rank's own rows; None: long steps do."""
        return f"no gain was measured on {self.device_type}"

    def async_tp_obstacle(self) -> str | None:
        """Why this device gains nothing by multiplying while parts are sent; None: it does
        (`fused_collectives.Pipelines`).
        """
        return f"no gain was measured on {self.device_type}"

    def make_attention_backend(self, name: str) -> AttentionBackend:
        """The backend `name`, one of `attention_backends`."""
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
        """What runs the decodes of `model` whole, faster than op by op; None: no such. The tensors
        must stay where they are.

        `backend`: the attention that was chosen; `layouts`, `k_cache`, `v_cache`: of each layer;
        `second`: whether its pages are those of `AttentionMetadata.window`.
        """
        return None

    def make_batch_invariant(self) -> bool:
        """From now on `step_kernels` and products of this process give a row the same beside any
        others, where each token is a request of its own; False: this device has no such kernels."""
        return False

    def graph_obstacle(self) -> str | None:
        """Why nothing can be recorded in this process, and what to do; None: it can."""
        return None

    def graph(self, host_arguments: HostArguments | None = None) -> Graph:
        """A new graph with nothing recorded. `host_arguments`: asked for at each replay; None: all
        that changes lies in tensors.
        """
        raise NotImplementedError

    def graph_pool(self) -> Any:
        """A handle of memory that graphs share if they are replayed in the order of their
        captures.
        """
        raise NotImplementedError

    def abandon_graph_pool(self, pool: Any) -> None:
        """Give back what a capture that failed has left in a pool. Its graphs stay; nothing may be
        captured into it any more.
        """

    def graph_bytes(self, pool: Any) -> int:
        """Bytes that the graphs of a pool take, their outputs included."""
        raise NotImplementedError

    def graph_stream(self) -> Any:
        """A stream to warm up and capture on, beside the one that serves; None where there are no
        streams.
        """
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on `stream` inside the block, after all that was launched before it, and before
        all that follows it.
        """
        return nullcontext()

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it."""
        return weak_ref_tensor(tensor)

    def empty_cache(self) -> None:
        """Give memory that nothing uses back to the device."""

    def give_back_memory(self) -> None:
        """Give the system what this process has freed of the host's memory, which loading and steps
        use on every device; the device's stays for the next step. glibc's allocator keeps what lies
        in its heap below something in use.
        """
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(ctypes.c_size_t(0))
