"""Messages between the web process and the engine of a speech model.

`core.messages` lists them among all messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SAMPLE_RATE = 16_000
Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """Write the text of a piece of audio that is at most as long as the model's window.

    Attributes:
        audio: One channel of `SAMPLE_RATE` samples per second, as little-endian int16.
        task: "translate" writes English.
        language: Code of the spoken language. None: the model detects it.
        prompt: Text that comes before the audio. Only its end fits.
        temperature: 0: the most likely tokens; if the text looks wrong, it is written again with
            rising temperatures. Other values are used as they are.
        words: Whether the answer has the times of words.
    """

    rid: str
    audio: bytes
    task: Task = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechWord:
    """A word with its times in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSegment:
    """A sentence or a part of one. Times are seconds after the start of the request's audio."""

    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[SpeechWord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOutput:
    """The result of a `SpeechRequest`. `error` says why there is none."""

    rid: str
    language: str = ""
    segments: list[SpeechSegment] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStats:
    """Gauges at one moment and totals since the engine process began.

    `fallbacks_total` counts texts that were written again with a higher temperature.
    """

    running_requests: int = 0
    queued_requests: int = 0
    steps_total: int = 0
    audio_seconds_total: float = 0.0
    tokens_total: int = 0
    fallbacks_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStep:
    """The results since the last message, and the metrics."""

    outputs: list[SpeechOutput]
    stats: SpeechStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechInfo:
    """Describes a ready engine of a speech model. Memory is in bytes.

    Attributes:
        window_seconds: Longest audio of a request.
        languages: Names of the languages by their codes. Empty if the model knows only English.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    window_seconds: float
    languages: dict[str, str]
    vocab_size: int
    max_running_requests: int
    weight_bytes: int
    load_seconds: float
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechReady:
    """The engine serves requests from now on."""

    info: SpeechInfo
