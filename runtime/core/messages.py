"""Every message between the web process and the engine process.

Messages are plain dataclasses, so that the engine runs in process (`piecework.LLM`) on a machine
without msgspec. `process.ipc` encodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .adapter_info import AdapterInfo
from .control_messages import Control, Controlled
from .engine_info import EngineInfo
from .generation import FinishReason, GenerateRequest, TokenOutput
from .image_params import DiffusionParams
from .pooling_messages import PoolingReady, PoolRequest, PoolStep
from .speech_messages import SpeechReady, SpeechRequest, SpeechStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End these requests and send no more output for them. Unknown ids are ignored."""

    rids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Drop every cached prefix that no request uses."""


# Steps of one profile. Each step has thousands of events, which stay in memory until the end.
MOST_PROFILED_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProfile:
    """Profile the next `num_steps` steps, or all steps until `StopProfile`.

    The trace is written into `folder`. `activities` are "CPU" and "GPU".
    """

    folder: str
    num_steps: int | None = None
    activities: list[str] = field(default_factory=lambda: ["CPU", "GPU"])
    with_stack: bool = False
    record_shapes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProfile:
    """End the profile and write its trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Load an adapter (LoRA) for later requests. Requests go on meanwhile.

    `path` is a folder of PEFT or a .gguf file. If the engine has the same contents already, it
    only learns the name. If `identity` is given, other contents are an error.
    """

    name: str
    path: str
    identity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapter:
    """Drop an adapter when its requests have ended. Later requests must not use it."""

    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAdapters:
    """Ask which adapters the engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End the engine process with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges at one moment, and totals since the engine process started.

    `states_used` and `states_total` count slots of recurrent states. `drafts_total` counts
    sequences in steps that verified proposals for them, `draft_tokens_total` the proposals, and
    `accepted_by_position_total` the accepted ones by their position after the known tokens.
    `loaded_tokens_total` counts tokens that tiers below the KV cache had, `lost_blocks_total` the
    evicted blocks that could not be written there, `dropped_blocks_total` those that were not
    written because saving had taken enough time. `prefill_...` count steps that are not decodes
    alone, their tokens, and those of both that replayed a captured size. `encoded_images_total`
    counts images that the vision encoder computed, `image_hits_total` those of new requests whose
    result was kept. `encoder_bytes` is the memory of kept results.
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
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    accepted_by_position_total: dict[str, int] = field(default_factory=dict)
    piecewise_steps_total: int = 0
    graph_replays_total: int = 0
    padded_tokens_total: int = 0
    graph_fallbacks_total: dict[str, int] = field(default_factory=dict)
    prefill_steps_total: int = 0
    prefill_step_tokens_total: int = 0
    prefill_replays_total: int = 0
    prefill_replayed_tokens_total: int = 0
    loaded_tokens_total: int = 0
    lost_blocks_total: int = 0
    dropped_blocks_total: int = 0
    encoded_images_total: int = 0
    image_hits_total: int = 0
    encoder_seconds_total: float = 0.0
    encoder_bytes: int = 0

    @property
    def prefill_replay_share(self) -> float:
        """The share of batches with prompts that replayed a captured size."""
        return self.prefill_replays_total / (self.prefill_steps_total or 1)

    @property
    def prefill_replay_token_share(self) -> float:
        """The share of the tokens of such batches that were in replays."""
        return self.prefill_replayed_tokens_total / (self.prefill_step_tokens_total or 1)

    @property
    def cache_share(self) -> float:
        """The share of the KV cache that running requests hold, or that of the recurrent states if
        it is larger.
        """
        return max(
            self.kv_tokens_used / (self.kv_tokens_total or 1),
            self.states_used / (self.states_total or 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """All results of one step.

    `stats` is None in most of many short steps. `started` maps the requests that the step was the
    first to compute to the time of their start, by `time.monotonic()`, which all processes of a
    machine share.
    """

    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    started: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine serves requests from now on."""

    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    """Graphs were loaded, captured or dropped since the engine was ready."""

    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAlive:
    """The engine's loop is alive. `doing` says what it does next.

    If `may_build` is set, the engine may load or compile until the next message, for longer than
    any step takes. Its processor time is then the only sign of life.
    """

    doing: str
    may_build: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine cannot start for a reason that the user can correct. `message` is one line."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlushed:
    """The answer to `FlushCache`: the number of cached tokens that were freed."""

    freed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """The answer to `StartProfile` and `StopProfile`: the path of the trace, or an error."""

    path: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterAnswer:
    """The answer to `LoadAdapter` and `UnloadAdapter`, in the order of these messages.

    `adapter` is what was loaded or dropped. Without it, `error` is a reason that the client can
    correct, and `code` its kind: "invalid_adapter", "adapter_not_found" or "lora_disabled".
    """

    adapter: AdapterInfo | None = None
    error: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterList:
    """The answer to `ListAdapters`."""

    adapters: list[AdapterInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateImage:
    """Make one image."""

    rid: str
    params: DiffusionParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutput:
    """The result of a `GenerateImage`.

    Attributes:
        pixels: `height` rows of `width` pixels, each a byte of red, of green and of blue.
        warnings: What was done otherwise than asked.
        error: Explains `FinishReason.ERROR`.
        code: Set if the client can correct the error.
        param: The name of the parameter that is wrong, if it is one.
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
    """Gauges at one moment, and totals since the engine process started.

    `stage_seconds_total` is by the name of the stage.
    """

    running_requests: int = 0
    queued_requests: int = 0
    steps_total: int = 0
    images_total: int = 0
    recompiles_total: int = 0
    stage_seconds_total: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStep:
    """The results since the last message, and the metrics.

    `progress` maps the id of a running request to (denoising steps done, denoising steps in all).
    """

    outputs: list[ImageOutput]
    stats: ImageStats
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionInfo:
    """Describes a ready diffusion engine.

    `default_size` is width and height in pixels, if the pipeline has a default. `compiled` is one
    line about what was compiled, or None if compilation was not asked for.
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
    """The diffusion engine serves requests from now on."""

    info: DiffusionInfo


ToEngine = (
    GenerateRequest
    | GenerateImage
    | PoolRequest
    | SpeechRequest
    | AbortRequests
    | FlushCache
    | StartProfile
    | StopProfile
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Control
    | Shutdown
)
FromEngine = (
    StepOutput
    | ImageStep
    | PoolStep
    | SpeechStep
    | EngineReady
    | DiffusionReady
    | PoolingReady
    | SpeechReady
    | EngineChanged
    | EngineAlive
    | EngineFailed
    | CacheFlushed
    | ProfileAnswer
    | AdapterAnswer
    | AdapterList
    | Controlled
)
