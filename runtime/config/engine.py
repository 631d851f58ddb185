"""The engine's settings as the user gives them, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...compilation.passes.config import PassConfig as PassConfig
from ...compilation.sizes import parse_list, parse_sizes
from ...kernels.cpu.machine.core_lists import check_lists
from .kv_events import KVEventsConfig
from .lora import LoRAConfig
from .model_registry import ModelCode
from .nodes import check_experts, check_nodes
from .options import check_options, check_seconds, check_threads, option
from .plug_ins import PlugInsConfig
from .quantization_registry import ON_LOAD, find_formats
from .speculation import HEADS, SpeculationConfig
from .tiers import TiersConfig
from .vision import VisionConfig

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


PREFILL_BACKENDS = ("piecewise", "breakable", "full", "disabled")
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
class EngineConfig(SpeculationConfig, TiersConfig, LoRAConfig, PlugInsConfig, VisionConfig):
    """Settings of one engine. None means: chosen for this machine. Raises `ValueError`."""

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
        "model code: piecework (its own), transformers (transformers' model with piecework's "
        "attention and cache); auto: piecework if it has the architecture",
        group=MODEL,
        choices=MODEL_IMPLS,
    )
    trust_remote_code: bool = option(
        False,
        "run the Python code in the model's folder; only for folders that you trust",
        group=MODEL,
    )
    dtype: str = option(
        "auto",
        "number format of weights, activations and, unless --kv-cache-dtype is given, the KV "
        "cache; auto: bfloat16",
        group=MODEL,
        choices=DTYPES,
    )
    device: str = option("auto", "device that the model runs on", group=MODEL, choices=DEVICES)
    attention_backend: str = option(
        "auto",
        "kernel of attention; auto: on a GPU flashinfer if it is installed and supports the model, "
        "else triton; on an NPU ascend; on a CPU native (compiled C++); else torch",
        group=MODEL,
        choices=ATTENTION_BACKENDS,
    )
    load_format: str = option(
        "auto",
        "auto: the model's weights; dummy: random weights made on the device, for measurements",
        group=MODEL,
        choices=LOAD_FORMATS,
    )
    quantization: str = option(
        "auto",
        "auto: keep the 2 to 8 bits of a checkpoint or .gguf file if the device can multiply "
        "them; none: widen all weights to --dtype; fp8, int8: quantise 16-bit weights while "
        "loading, and activations when they are multiplied; q8_0, q4_0: quantise weights alone, "
        "in blocks of 32 numbers; a checkpoint format (awq, gptq, ...): as auto, and an error if "
        "the model has another format",
        group=MODEL,
        choices=QUANTIZATIONS,
    )
    cpu_activations: str = option(
        "auto",
        "activations on a CPU when weights are quantised in blocks: bf16; int8: rounded to 8 bits "
        "in groups of 32 and multiplied as integers; auto: int8 if that is faster",
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
        "tensor parallelism: number of ranks that split each layer; each rank is a process with "
        "its own device, or on a CPU with a share of the cores",
        group=RANKS,
        metavar="N",
    )
    ep_size: int = option(
        1,
        "expert parallelism: number of groups of ranks that split the experts; divides --tp-size",
        group=RANKS,
        metavar="N",
    )
    nnodes: int = option(
        1,
        "number of machines with ranks; each runs the same command with its own --node-rank",
        group=RANKS,
        metavar="N",
    )
    node_rank: int = option(
        0,
        "number of this machine; 0 answers requests, the others only run ranks",
        group=RANKS,
        metavar="N",
    )
    dist_init_addr: str | None = option(
        None,
        "address of node 0 that the ranks of other nodes connect to; all nodes need the same "
        "--dist-key-file or PIECEWORK_DIST_KEY; default: no other nodes",
        group=RANKS,
        metavar="HOST:PORT",
    )
    dist_key_file: str | None = option(
        None,
        "file with the key that all nodes share, at least 16 bytes; default: PIECEWORK_DIST_KEY",
        group=RANKS,
        metavar="FILE",
    )
    dist_timeout: float = option(
        DIST_TIMEOUT,
        "seconds that ranks wait for a missing rank, in a collective or at the start, before the "
        "engine is restarted; at most half of --watchdog-timeout",
        group=RANKS,
        metavar="SECONDS",
    )
    mem_fraction_static: float | None = option(
        None,
        "share of the memory left after loading the weights that the KV cache takes; default: 0.2 "
        "on a CPU, elsewhere all that steps and graphs do not need",
        group=MEMORY,
        metavar="F",
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto: as --dtype; fp8_e4m3, fp8_e5m2: with the "
        "checkpoint's scales, else with scale 1; int8: with a scale per token and head",
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
        "maximum number of requests in one step; default: by device",
        group=MEMORY,
        metavar="N",
    )
    chunked_prefill_size: int | None = option(
        None,
        "maximum number of new tokens in one step; longer prompts are computed in chunks of this "
        "size, together with running decodes; default: by device",
        group=MEMORY,
        metavar="N",
    )
    mixed_step_seconds: float = option(
        1.0,
        "time of a step with prompts while answers wait for it, or of four decodes; 0: no limit",
        group=MEMORY,
        metavar="S",
    )
    disable_overlap_schedule: bool | None = option(
        None,
        "plan a step only after the previous one is done; default: by device; always on for a CPU",
        group=MEMORY,
    )
    disable_radix_cache: bool = option(
        False, "do not reuse the KV cache of shared prompt prefixes", group=MEMORY
    )
    kv_events_config: str | None = option(
        None,
        "publish over ZeroMQ, as vLLM does, which blocks enter and leave the prefix cache: JSON "
        "with endpoint, replay_endpoint, topic, buffer_steps, hwm; default: no events",
        group=MEMORY,
        metavar="JSON",
    )
    batch_invariant: bool = option(
        False,
        "sum in the same order whatever else is in the batch, so that a request's text depends "
        "neither on other requests nor on prompt chunks; on a CPU, for models with native decodes",
        group=GRAPHS,
    )
    piecewise_cuda_graph: bool | None = option(
        None,
        "run steps in compiled pieces, split at attention; on a GPU each piece is captured as a "
        "graph for each number of tokens; default: on",
        group=GRAPHS,
    )
    disable_piecewise_cuda_graph: bool = option(
        False, "run prefills and mixed steps eagerly, whatever other flags say", group=GRAPHS
    )
    piecewise_cuda_graph_compiler: str | None = option(
        None,
        "compiler of the pieces; default: the first that the device supports",
        group=GRAPHS,
        choices=PIECE_COMPILERS,
    )
    piecewise_cuda_graph_tokens: str | None = option(
        None,
        "numbers of tokens to capture (16,64,256), or auto:K for the K sizes with the least "
        "padding on the lengths seen so far; default: by device",
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
        "recorded while the model runs, without a compiler, with a break at each attention; full: "
        "one graph for short steps, attention included; default: piecewise",
        group=GRAPHS,
        choices=PREFILL_BACKENDS,
    )
    cuda_graph_backend_decode: str | None = option(
        None,
        "graphs of decode steps: full records the whole forward for each batch size; native runs "
        "decodes and short prompts as one C++ call (CPU); default: by device",
        group=GRAPHS,
        choices=DECODE_BACKENDS,
    )
    cuda_graph_bs: str | None = option(
        None,
        "decode batch sizes to capture (1,2,4,8); default: chosen up to --cuda-graph-max-bs",
        group=GRAPHS,
        metavar="LIST",
        items=r"[\d,]+",
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest decode batch size to capture; default: --max-running-requests",
        group=GRAPHS,
        metavar="N",
    )
    disable_cuda_graph: bool = option(False, "do not use graphs of any kind", group=GRAPHS)
    passes: str = option(
        "auto",
        "passes over the traced forward. auto: those that help on this machine; none; or changes "
        "to auto: +norm_quant,-noop. `piecework explain` shows how often each matched",
        group=GRAPHS,
        metavar="LIST",
        items=r"[+]\w+(,.*)?",
    )
    startup: str = option(
        "fast",
        "fast: ready once the weights are loaded; pieces and graphs are loaded between batches; "
        "full: ready after all pieces and graphs are loaded",
        group=GRAPHS,
        choices=STARTUPS,
    )
    debug_cuda_graph: bool = option(
        False, "check at each replay that no input of the graph has moved in memory", group=GRAPHS
    )
    random_seed: int | None = option(
        None,
        "seed for requests that do not set one; default: drawn at start",
        group=MODEL,
        metavar="N",
    )
    num_threads: int | None = option(
        None,
        "compute threads on a CPU, for all ranks of this machine together; default: one per "
        "allowed core, within the CPU quota",
        group=MODEL,
        metavar="N",
    )
    cpu_bind: str = option(
        "auto",
        "cores of each rank on a CPU: one list per rank (0-15,16-31, or 0-7,32-39|8-15,40-47); "
        "auto: with several ranks, one NUMA node per rank, or an even share if there is one node; "
        "none: the operating system chooses",
        group=MODEL,
        metavar="LISTS",
        items=r"[\d,|-]+",
    )

    # The number of this engine, and how many engines the server runs (`--dp-size`). They share the
    # machine's cores, devices and memory.
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        check_options(self, _POSITIVE)
        self.check_speculation()
        self.check_tiers(self.tp_size)
        self.check_lora()
        self.check_vision()
        check_threads(self.num_threads)
        check_experts(self.tp_size, self.ep_size)
        self.check_plug_ins(self.tp_size, self.speculative_algorithm)
        if self.speculative_algorithm in HEADS and self.tp_size > 1:
            raise ValueError(
                f"--speculative-algorithm {self.speculative_algorithm} runs on one rank, because "
                "the head reads whole embeddings and gives whole logits: leave --tp-size out, or "
                "take auto"
            )
        check_nodes(self.tp_size, self.nnodes, self.node_rank, self.dist_init_addr)
        check_seconds("--dist-timeout", self.dist_timeout, 1)
        check_seconds("--mixed-step-seconds", self.mixed_step_seconds, 0)
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
        """Which code computes the model."""
        return ModelCode(self.model_impl, self.trust_remote_code)

    @property
    def prefill_backend(self) -> Backend:
        """The requested backend of prefills and mixed steps."""
        if self.disable_cuda_graph or self.disable_piecewise_cuda_graph or self.batch_invariant:
            return Backend.DISABLED
        if self.cuda_graph_backend_prefill is not None:
            return Backend(self.cuda_graph_backend_prefill)
        return Backend.DISABLED if self.piecewise_cuda_graph is False else Backend.PIECEWISE

    @property
    def decode_backend(self) -> Backend | None:
        """The requested backend of decode steps. None: the device's choice."""
        if self.disable_cuda_graph:
            return Backend.DISABLED
        return Backend(self.cuda_graph_backend_decode) if self.cuda_graph_backend_decode else None
