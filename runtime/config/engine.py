"""What the engine is told: a frozen dataclass, validated once, and the same with every number
chosen (`resolve_config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...compilation.passes.config import PassConfig as PassConfig
from ...compilation.sizes import parse_list, parse_sizes
from ...kernels.cpu.machine.core_lists import check_lists
from ..cache.kv_events import KVEventsConfig
from .model_registry import ModelCode
from .nodes import check_experts, check_nodes
from .options import check_options, check_threads, option
from .quantization_registry import ON_LOAD, find_formats

MODEL_IMPLS = ("auto", "piecework", "transformers")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cuda", "npu", "cpu")
ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "ascend", "native", "torch")
PIECE_COMPILERS = ("eager", "inductor")
STARTUPS = ("fast", "full")
LOAD_FORMATS = ("auto", "dummy")
CPU_ACTIVATIONS = ("auto", "bf16", "int8")
QUANTIZATIONS = tuple(dict.fromkeys(("auto", "none", *ON_LOAD, "gguf", *find_formats())))
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")


class Backend(StrEnum):
    """How the steps of a phase become graphs."""

    PIECEWISE = "piecewise"
    BREAKABLE = "breakable"
    FULL = "full"
    NATIVE = "native"
    DISABLED = "disabled"


PREFILL_BACKENDS = ("piecewise", "breakable", "disabled")
DECODE_BACKENDS = ("full", "native", "disabled")
BATCH_SIZES_FLAG = "--cuda-graph-bs"
BATCH_SIZES = "batch sizes (1,2,4,8)"

MODEL = "model"
RANKS = "several devices"
DIST_TIMEOUT = 120.0
MEMORY = "memory and batching"
GRAPHS = "pieces and graphs"
_POSITIVE = (
    "context_length", "max_total_tokens", "page_size", "max_running_requests",
    "chunked_prefill_size", "num_threads", "tp_size", "ep_size", "nnodes",
    "piecewise_cuda_graph_max_tokens", "cuda_graph_max_bs",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None: chosen for this machine. Raises `ValueError` with a remedy."""

    model_path: str = option(
        "smollm2-135m",
        "the model: a Hugging Face folder, a .gguf file, a built-in alias (smollm2-135m), or a hub "
        "id",
        group=MODEL,
        metavar="PATH",
    )
    tokenizer_path: str | None = option(
        None, "folder or file of the tokenizer; default: the model's", group=MODEL, metavar="PATH"
    )
    gguf_pre_tokenizer: str | None = option(
        None, "pre-tokenizer of a .gguf file; default: the file's", group=MODEL, metavar="NAME"
    )
    model_impl: str = option(
        "auto",
        "whose code computes the model: piecework (ours), transformers (its own model with our "
        "attention and cache), auto: ours where there is one",
        group=MODEL,
        choices=MODEL_IMPLS,
    )
    trust_remote_code: bool = option(
        False,
        "run Python code that the model's folder brings; only of folders that you trust",
        group=MODEL,
    )
    dtype: str = option(
        "auto",
        "number format of weights, activations and, unless --kv-cache-dtype says otherwise, KV "
        "cache; auto: bfloat16",
        group=MODEL,
        choices=DTYPES,
    )
    device: str = option("auto", "where the model runs", group=MODEL, choices=DEVICES)
    attention_backend: str = option(
        "auto",
        "what computes attention; auto: on a GPU flashinfer, where it is installed and takes the "
        "model, else triton; ascend on an NPU; native (compiled C++) on a CPU; else torch",
        group=MODEL,
        choices=ATTENTION_BACKENDS,
    )
    load_format: str = option(
        "auto",
        "auto: the model's weights; dummy: random ones made on the device, for measurements",
        group=MODEL,
        choices=LOAD_FORMATS,
    )
    quantization: str = option(
        "auto",
        "auto: weights stay in the 2 to 8 bits that a checkpoint or .gguf file holds them in, "
        "where the device can multiply by such; none: all are widened to --dtype; "
        "fp8, int8: weights of 16 bits are quantised while they are loaded, and activations "
        "when they are multiplied; q8_0, q4_0: weights alone, in blocks of 32 numbers; a format of "
        "checkpoints (awq, gptq, ...): as auto, and refused if the model has another one",
        group=MODEL,
        choices=QUANTIZATIONS,
    )
    cpu_activations: str = option(
        "auto",
        "what activations are on a CPU where weights have few bits in blocks: bf16; int8: rounded "
        "to 8 bits in groups of 32, which whole numbers multiply; auto: int8 where that is faster",
        group=MODEL,
        choices=CPU_ACTIVATIONS,
    )
    context_length: int | None = option(
        None,
        "longest prompt plus output, in tokens; default: the model's own",
        group=MODEL,
        metavar="N",
    )
    tp_size: int = option(
        1,
        "tensor parallelism: how many ranks hold a part of each layer, a process and a device "
        "each; on a CPU they share the cores",
        group=RANKS,
        metavar="N",
    )
    ep_size: int = option(
        1,
        "groups of ranks, each with a part of the experts of a mixture; a divisor of --tp-size",
        group=RANKS,
        metavar="N",
    )
    nnodes: int = option(
        1,
        "machines that the ranks are spread over; each runs the same command with its --node-rank",
        group=RANKS,
        metavar="N",
    )
    node_rank: int = option(
        0,
        "which of the machines this is; 0 answers requests, the others hold their ranks",
        group=RANKS,
        metavar="N",
    )
    dist_init_addr: str | None = option(
        None,
        "where node 0 takes the ranks of other nodes; all need the same --dist-key-file or "
        "PIECEWORK_DIST_KEY; default: there are no other nodes",
        group=RANKS,
        metavar="HOST:PORT",
    )
    dist_key_file: str | None = option(
        None,
        "file with the key of all nodes, 16 bytes or more; default: PIECEWORK_DIST_KEY",
        group=RANKS,
        metavar="FILE",
    )
    dist_timeout: float = option(
        DIST_TIMEOUT,
        "seconds that ranks wait for one that does not come, to what they compute together or at "
        "the start, before the engine is started again; at most half of --watchdog-timeout",
        group=RANKS,
        metavar="SECONDS",
    )
    mem_fraction_static: float | None = option(
        None,
        "share of the memory that is free once the weights are loaded that the KV cache may take; "
        "default: on a CPU 0.2, elsewhere all that steps and graphs leave",
        group=MEMORY,
        metavar="F",
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto: as --dtype; fp8_e4m3, fp8_e5m2: by the scales that a "
        "checkpoint has for its layers, else by 1; int8: by a scale of each token and head",
        group=MEMORY,
        choices=KV_CACHE_DTYPES,
    )
    max_total_tokens: int | None = option(
        None,
        "size of the KV cache in tokens, instead of --mem-fraction-static; default: what fits",
        group=MEMORY,
        metavar="N",
    )
    page_size: int | None = option(
        None, "tokens in a page of the KV cache; default: by device", group=MEMORY, metavar="N"
    )
    max_running_requests: int | None = option(
        None,
        "most requests that are computed in one step; default: by device",
        group=MEMORY,
        metavar="N",
    )
    chunked_prefill_size: int | None = option(
        None,
        "most new tokens of one step: longer prompts are computed in chunks of this size, beside "
        "running decodes; default: by device",
        group=MEMORY,
        metavar="N",
    )
    disable_overlap_schedule: bool | None = option(
        None,
        "plan a step only when the one before it is done; default: by device, and always so on a "
        "CPU",
        group=MEMORY,
    )
    disable_radix_cache: bool = option(
        False, "do not reuse the KV cache of prompts that begin alike", group=MEMORY
    )
    kv_events_config: str | None = option(
        None,
        "tell routers over ZeroMQ, as vLLM does, what comes into the prefix cache and leaves it: "
        "JSON with endpoint, replay_endpoint, topic, buffer_steps, hwm; default: no events",
        group=MEMORY,
        metavar="JSON",
    )
    batch_invariant: bool = option(
        False,
        "compute each token in the same order whatever else its step holds, so that a request's "
        "text depends neither on other requests nor on chunks of prompts; on a CPU, for models "
        "whose decodes are native",
        group=GRAPHS,
    )
    piecewise_cuda_graph: bool | None = option(
        None,
        "run steps in pieces, cut at attention, compiled by another process; on a GPU each piece "
        "is captured as a graph for each number of tokens; a server does so by default",
        group=GRAPHS,
    )
    disable_piecewise_cuda_graph: bool = option(
        False, "run prefills and mixed steps eagerly, whatever else is asked for", group=GRAPHS
    )
    piecewise_cuda_graph_compiler: str | None = option(
        None,
        "what compiles the pieces; default: the first that the device allows",
        group=GRAPHS,
        choices=PIECE_COMPILERS,
    )
    piecewise_cuda_graph_tokens: str | None = option(
        None,
        "numbers of tokens to capture (16,64,256), or auto:K for the K that waste least padding on "
        "the lengths seen so far; default: by device",
        group=GRAPHS,
        metavar="LIST",
        items=r"[\d,]+",
    )
    piecewise_cuda_graph_max_tokens: int | None = option(
        None,
        "largest number of tokens to capture; default: --chunked-prefill-size",
        group=GRAPHS,
        metavar="N",
    )
    cuda_graph_backend_prefill: str | None = option(
        None,
        "graphs of prefills and mixed steps. piecewise: as --piecewise-cuda-graph; breakable: "
        "recorded as the model runs, without a compiler, with a break at each attention; default: "
        "piecewise",
        group=GRAPHS,
        choices=PREFILL_BACKENDS,
    )
    cuda_graph_backend_decode: str | None = option(
        None,
        "graphs of steps of nothing but decodes: full records the whole forward for each batch "
        "size; native runs it and short prompts as one call of C++ (CPU); default: by device",
        group=GRAPHS,
        choices=DECODE_BACKENDS,
    )
    cuda_graph_bs: str | None = option(
        None,
        "batch sizes of decodes to capture (1,2,4,8); default: those up to --cuda-graph-max-bs",
        group=GRAPHS,
        metavar="LIST",
        items=r"[\d,]+",
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch of decodes to capture; default: --max-running-requests",
        group=GRAPHS,
        metavar="N",
    )
    disable_cuda_graph: bool = option(False, "no graphs of any kind", group=GRAPHS)
    passes: str = option(
        "auto",
        "passes over the traced forward. auto: those that the machine gains by; none; or changes "
        "to that: +norm_quant,-noop. `piecework explain` tells how often each matched",
        group=GRAPHS,
        metavar="LIST",
        items=r"[+]\w+(,.*)?",
    )
    startup: str = option(
        "fast",
        "fast: ready once the weights are loaded, pieces and graphs come between batches; full: "
        "ready with all of them",
        group=GRAPHS,
        choices=STARTUPS,
    )
    debug_cuda_graph: bool = option(
        False, "check at each replay that no input of a graph has moved in memory", group=GRAPHS
    )
    random_seed: int | None = option(
        None, "seed of requests that bring none; default: drawn at start", group=MODEL, metavar="N"
    )
    num_threads: int | None = option(
        None,
        "compute threads on a CPU, of all ranks of this machine; default: one a core that is "
        "allowed, within the CPU quota",
        group=MODEL,
        metavar="N",
    )
    cpu_bind: str = option(
        "auto",
        "cores of each rank on a CPU: a list a rank (0-15,16-31, or 0-7,32-39|8-15,40-47); auto: "
        "with several ranks a NUMA node each where there are several, else an even part; none: "
        "the system's choice",
        group=MODEL,
        metavar="LISTS",
        items=r"[\d,|-]+",
    )

    replica: int = 0
    replicas: int = 1
    """Which of how many engines of one server this is (`--dp-size`): they share a machine's cores,
    devices and memory.
    """

    def __post_init__(self) -> None:
        check_options(self, _POSITIVE)
        check_threads(self.num_threads)
        check_experts(self.tp_size, self.ep_size)
        check_nodes(self.tp_size, self.nnodes, self.node_rank, self.dist_init_addr)
        if not 1 <= self.dist_timeout < float("inf"):
            raise ValueError(f"--dist-timeout must be at least 1 second, got {self.dist_timeout}")
        check_lists(self.cpu_bind)
        if self.mem_fraction_static is not None and not 0.0 < self.mem_fraction_static < 1.0:
            raise ValueError(
                f"--mem-fraction-static must lie between 0 and 1, got {self.mem_fraction_static}"
            )
        if self.kv_events_config is not None:
            KVEventsConfig.parse(self.kv_events_config)
        parse_sizes(self.piecewise_cuda_graph_tokens)
        PassConfig.parse(self.passes)
        if self.cuda_graph_bs is not None:
            parse_list(self.cuda_graph_bs, BATCH_SIZES_FLAG, BATCH_SIZES)
        if self.piecewise_cuda_graph and self.cuda_graph_backend_prefill not in (None, "piecewise"):
            raise ValueError(
                "--piecewise-cuda-graph contradicts --cuda-graph-backend-prefill "
                f"{self.cuda_graph_backend_prefill}: give one"
            )

    @property
    def model_code(self) -> ModelCode:
        """Whose code computes the model."""
        return ModelCode(self.model_impl, self.trust_remote_code)

    @property
    def prefill_backend(self) -> Backend:
        """What prefills and mixed steps are asked to run with."""
        if self.disable_cuda_graph or self.disable_piecewise_cuda_graph or self.batch_invariant:
            return Backend.DISABLED
        if self.cuda_graph_backend_prefill is not None:
            return Backend(self.cuda_graph_backend_prefill)
        return Backend.DISABLED if self.piecewise_cuda_graph is False else Backend.PIECEWISE

    @property
    def decode_backend(self) -> Backend | None:
        """What steps of nothing but decodes are asked to run with; None: the device's choice."""
        if self.disable_cuda_graph:
            return Backend.DISABLED
        return Backend(self.cuda_graph_backend_decode) if self.cuda_graph_backend_decode else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The settings with every number chosen that the engine's parts need."""

    page_size: int
    context_length: int
    chunked_prefill_size: int
    max_running_requests: int
    max_total_tokens: int
    piecewise_cuda_graph_max_tokens: int
    cuda_graph_max_bs: int
    disable_overlap_schedule: bool
    state_slots: int = 0
    """Of the pool of recurrent states, the reserved one among them; 0: the model has none."""
    window_pages: int = 0
    """Of layers with a sliding window, if they have memory of their own, the reserved one too."""
    kv_slabs: int = 0
    """Of memory that those share with the other layers, the reserved one among them."""
