"""Every message between the web process and the engine process.

Messages are plain dataclasses, so that the engine runs in process (`piecework.LLM`) on a machine
without msgspec; `ipc` puts them on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .image_params import DiffusionParams
from .pooling_messages import PoolingReady, PoolRequest, PoolStep
from .sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Generate a continuation of `input_ids`.

    `output_ids` are tokens that were already delivered before an engine restart: they are
    recomputed, never sampled or sent again. `priority`: higher runs first. `arrival_time`:
    `time.monotonic()` seconds, the order among equals. `eos_token_ids`: what ends a text by the
    tokenizer's files and the chat template, which the engine does not read; the model's own do so
    besides.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    arrival_time: float = 0.0
    eos_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """Free these requests; no further output is sent for them. Unknown ids are ignored."""

    rids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Drop every cached prefix that no request uses."""


MOST_PROFILED_STEPS = 200
"""Of one profile: each step has thousands of events, which are kept in memory until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProfile:
    """Profile the next steps, `num_steps` of them or until `StopProfile`; the trace comes into
    `folder`. `activities`: CPU, GPU.
    """

    folder: str
    num_steps: int | None = None
    activities: list[str] = field(default_factory=lambda: ["CPU", "GPU"])
    with_stack: bool = False
    record_shapes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProfile:
    """End the profile, and write its trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End the engine process with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One position: its token's log-probability and the likeliest alternatives, best first, as (id,
    log-probability). `rank`: how many tokens are as likely or likelier, itself counted; of prompts.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What one step gave one request.

    `token_ids` are new. `logprobs` has one entry per new token where asked for. `prompt_logprobs`
    comes once, with the first token, one entry per prompt position from `prompt_logprobs_start`
    (position 0 has none, so None). `stop_token_id` is the token that ended the sequence with
    `FinishReason.STOP`; it is the last of `token_ids`. `cached_tokens` counts the prompt's tokens
    that were found in the prefix cache. `error` explains `FinishReason.ERROR`; where the client can
    mend it there is a `code`.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges at one moment and totals since the engine process began. `states`: slots of recurrent
    states.
    """

    running_requests: int = 0
    queued_requests: int = 0
    kv_tokens_used: int = 0
    kv_tokens_cached: int = 0
    kv_tokens_touched: int = 0
    kv_tokens_total: int = 0
    states_used: int = 0
    states_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    discarded_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    overlapped_steps_total: int = 0
    piecewise_steps_total: int = 0
    graph_replays_total: int = 0
    padded_tokens_total: int = 0
    graph_fallbacks_total: dict[str, int] = field(default_factory=dict)

    @property
    def cache_share(self) -> float:
        """Of the KV cache, or of recurrent states where more of those are held, the share that
        running requests hold.
        """
        return max(
            self.kv_tokens_used / (self.kv_tokens_total or 1),
            self.states_used / (self.states_total or 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything one step delivered. `stats` may come later, for some steps are short; `started`:
    the requests that it was the first to compute, and when that began, by `time.monotonic()`, which
    all processes of a machine share.
    """

    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    started: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCalls:
    """`times` times in a row: distinct piece number `piece`, then split op `op`; either may be
    missing. `kinds`: how many kinds of ops the piece is made of.
    """

    piece: int | None
    op: str | None
    times: int
    kinds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """How steps run: what was asked for, and what is there so far.

    `prefill_sizes` in tokens, `decode_sizes` in requests: what is captured. `failed_sizes`: those
    that run without a graph, and why. `pending_sizes`: those of both that are still to be captured.
    `calls`: of the forward in pieces, in order.
    """

    prefill_backend: str = "disabled"
    decode_backend: str = "disabled"
    distinct_pieces: int = 0
    prefill_sizes: list[int] = field(default_factory=list)
    decode_sizes: list[int] = field(default_factory=list)
    failed_sizes: dict[str, str] = field(default_factory=dict)
    pending_sizes: list[int] = field(default_factory=list)
    calls: list[PieceCalls] = field(default_factory=list)
    num_graphs: int = 0
    graph_bytes: int = 0
    capture_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What one rank holds, in bytes."""

    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a ready engine is, for the start-up summary and `/server_info`. Sizes in tokens, memory
    in bytes.
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
    """Of each phase of the start: the device's kernels, weights, what steps take of the memory,
    first steps, pieces.
    """
    kv_cache_dtype: str = "auto"
    quantization: list[str] = field(default_factory=list)
    """How many linear layers are kept in which format, and their bytes; empty where none is
    quantised.
    """
    ranks: list[RankInfo] = field(default_factory=list)
    """In order; `weight_bytes` and `kv_bytes` are the first one's."""
    overlap_schedule: bool = False
    """Whether the next step is planned while one runs."""
    graphs: GraphInfo = field(default_factory=GraphInfo)
    remarks: dict[str, str] = field(default_factory=dict)
    """What the machine or the model makes other than one would expect, by a name each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine serves from now on."""

    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    """Graphs came in, or were given up, since the engine was ready."""

    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAlive:
    """The engine's loop goes on. `doing`: what it does next.

    `may_build`: until the next message it may load or compile for longer than any step takes, and
    give no other sign than that it uses the processor.
    """

    doing: str
    may_build: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine cannot start, for a reason the user can mend; one line."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlushed:
    """Answer to `FlushCache`: how many cached tokens were freed."""

    freed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """Answer to `StartProfile` and `StopProfile`: where the trace will be, or why there is none."""

    path: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateImage:
    """Make one image."""

    rid: str
    params: DiffusionParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutput:
    """How a `GenerateImage` ended.

    `FinishReason.STOP`: `pixels` are `height` rows of `width` pixels of red, green and blue, a byte
    each, and `warnings` say what was not done as asked. `FinishReason.ERROR`: `error` says why;
    where the client can mend it there is a `code`, and `param` names the parameter if it is one.
    """

    rid: str
    finish_reason: FinishReason
    pixels: bytes = b""
    width: int = 0
    height: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStats:
    """Gauges at one moment and totals since the engine process began. `stage_seconds_total` by the
    stage's name.
    """

    running_requests: int = 0
    queued_requests: int = 0
    steps_total: int = 0
    images_total: int = 0
    recompiles_total: int = 0
    stage_seconds_total: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStep:
    """What has ended since the last message, and the figures. `progress`: of images in the making,
    by the ids of their requests, how many denoising steps are done, and of how many.
    """

    outputs: list[ImageOutput]
    stats: ImageStats
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionInfo:
    """What a ready diffusion engine is. `default_size`: width and height in pixels, where the
    pipeline has one.

    `compiled`: one line about what was compiled, None where nothing was asked for.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    max_running_requests: int
    default_size: tuple[int, int] | None
    default_steps: int | None
    weight_bytes: int
    load_seconds: float
    warm_up_seconds: float
    compiled: str | None = None
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionReady:
    """The diffusion engine serves from now on."""

    info: DiffusionInfo


ToEngine = (
    GenerateRequest
    | GenerateImage
    | PoolRequest
    | AbortRequests
    | FlushCache
    | StartProfile
    | StopProfile
    | Shutdown
)
FromEngine = (
    StepOutput
    | ImageStep
    | PoolStep
    | EngineReady
    | DiffusionReady
    | PoolingReady
    | EngineChanged
    | EngineAlive
    | EngineFailed
    | CacheFlushed
    | ProfileAnswer
)
