"""What a ready engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from .adapter_info import AdapterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCalls:
    """A run of equal calls: `times` times distinct piece number `piece`, then split op `op`.

    Either may be missing. `kinds` is the number of kinds of ops in the piece.
    """

    piece: int | None
    op: str | None
    times: int
    kinds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """How steps run: the graphs that were asked for and those that exist so far.

    Attributes:
        prefill_sizes: Captured sizes of prefill graphs, in tokens.
        decode_sizes: Captured sizes of decode graphs, in requests.
        failed_sizes: Sizes that run without a graph, with the reason.
        pending_sizes: Sizes of both kinds that are not captured yet.
        calls: The calls of the forward in pieces, in order.
        passes: Number of matches of each pass over the forward. Empty until pieces are loaded. If
            long steps have another forward, the larger number.
        passes_off: Why each other pass did not run.
    """

    prefill_backend: str = "disabled"
    decode_backend: str = "disabled"
    distinct_pieces: int = 0
    prefill_sizes: list[int] = field(default_factory=list)
    decode_sizes: list[int] = field(default_factory=list)
    failed_sizes: dict[str, str] = field(default_factory=dict)
    pending_sizes: list[int] = field(default_factory=list)
    calls: list[PieceCalls] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)
    passes_off: dict[str, str] = field(default_factory=dict)
    num_graphs: int = 0
    graph_bytes: int = 0
    capture_seconds: float = 0.0


def describe_passes(graphs: GraphInfo) -> str:
    """Return one line: the passes that matched, those without a match, and those that are off."""
    matched = [f"{name} x {count}" for name, count in graphs.passes.items() if count]
    idle = [name for name, count in graphs.passes.items() if not count]
    off = [f"{name} ({reason})" for name, reason in graphs.passes_off.items()]
    parts = ((matched, ""), (idle, "no match: "), (off, "off: "))
    return "; ".join(head + ", ".join(names) for names, head in parts if names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Memory of one rank in bytes."""

    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Describes a ready engine, for the start-up summary and `/server_info`.

    Sizes are in tokens, memory is in bytes.

    Attributes:
        weight_bytes, kv_bytes: Memory of the first rank.
        start_seconds: Seconds of each phase of the start: kernels, weights, memory profile, first
            steps, pieces.
        quantization: For each format of linear layers, how many layers have it and their bytes;
            empty if no layer is quantised.
        ranks: Memory of each rank, in order.
        overlap_schedule: Whether the next step is planned while one runs.
        awaits_kernels: Whether kernels that are not compiled yet would be faster. A process that is
            started to compile them will have them.
        adapters: The adapters that were loaded at the start. None: adapters are off.
        adapter_slots: Number of adapters that steps can use at once.
        adapter_rank, adapter_bytes: Largest rank of an adapter, and memory of all slots of the
            first rank.
        remarks: What the machine or the model changes against expectations, by a short name.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    attention_backend: str
    vocab_size: int
    context_length: int
    kv_tokens: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    weight_bytes: int
    kv_bytes: int
    start_seconds: dict[str, float]
    kv_cache_dtype: str = "auto"
    quantization: list[str] = field(default_factory=list)
    ranks: list[RankInfo] = field(default_factory=list)
    overlap_schedule: bool = False
    graphs: GraphInfo = field(default_factory=GraphInfo)
    awaits_kernels: bool = False
    adapters: list[AdapterInfo] | None = None
    adapter_slots: int = 0
    adapter_rank: int = 0
    adapter_bytes: int = 0
    remarks: dict[str, str] = field(default_factory=dict)
