"""The state of the audio endpoints, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends

from ...runtime.core.speech_messages import SpeechInfo
from ..config.speech import SpeechServerConfig
from ..core.errors import InvalidRequest
from ..engine.interface import unavailable
from ..engine.state import QueueFull
from ..http.form import Uploads
from ..observability.metrics import Figure, MetricRegistry
from ..observability.request_record import current_record
from ..serving.state import AnyServing, serving_of
from .client import SpeechClient
from .decoding import Decoders


class SpeechMetrics(MetricRegistry):
    """The metrics of the engine of a speech model."""

    unit = "Files of audio"

    def __init__(self, engine: SpeechClient, model_name: str) -> None:
        super().__init__(engine, model_name)
        self._speech = engine

    def totals(self) -> list[Figure]:
        stats = self._speech.stats
        again = "Texts that looked wrong and were written again."
        return [
            *super().totals(),
            (
                "audio_seconds",
                "Audio whose text was written.",
                stats.audio_seconds_total,
            ),
            ("generation_tokens", "Tokens that were written.", stats.tokens_total),
            ("num_speech_fallbacks", again, stats.fallbacks_total),
        ]


@dataclass(slots=True)
class OpenFiles:
    """The number of requests that have not ended."""

    number: int = 0


@dataclass(frozen=True, kw_only=True)
class SpeechServing(AnyServing):
    """The state of a server of a speech model."""

    purpose = (
        "This server has a speech model, for POST /v1/audio/transcriptions and "
        "/v1/audio/translations"
    )
    kind = "speech"

    engine: SpeechClient
    config: SpeechServerConfig
    metrics: SpeechMetrics
    decoders: Decoders
    uploads: Uploads = field(default_factory=Uploads)
    open_files: OpenFiles = field(default_factory=OpenFiles)

    @property
    def info(self) -> SpeechInfo:
        """The engine's info. Raises `EngineUnavailable` before the engine was first ready."""
        if self.engine.info is None:
            raise unavailable(self.engine)
        return self.engine.info

    @property
    def ahead(self) -> int:
        """Pieces of one request that are in the engine at once."""
        return self.info.max_running_requests

    def check_room(self) -> None:
        """Raise `QueueFull` or `EngineUnavailable` if no further request is taken."""
        self.engine.require_room(1)
        most = max(1, self.engine.capacity // self.ahead)
        if self.open_files.number >= most:
            raise QueueFull(f"{self.open_files.number} files are running or waiting already")

    def language_code(self, given: str | None) -> str | None:
        """Return the code of a language that is given by its code or its name.

        Raises `InvalidRequest` if the model does not know it.
        """
        if given is None:
            return None
        languages = self.info.languages or {"en": "english"}
        wanted = given.strip().lower()
        for code, name in languages.items():
            if wanted in (code, name):
                return code if self.info.languages else None
        known = ", ".join(list(languages)[:100])
        raise InvalidRequest(
            f"language: this model does not know {given!r:.40}; it knows {known}.",
            param="language",
            code="invalid_value",
        )

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count a request, and measure its time."""
        start, ended = time.monotonic(), False
        if (record := current_record.get()) is not None:
            record.model = self.model_name
        self.open_files.number += 1
        try:
            yield
            ended = True
            self.metrics.end_to_end.observe(time.monotonic() - start)
        finally:
            self.open_files.number -= 1
            self.metrics.requests.value += 1
            self.metrics.aborted.value += 0 if ended else 1


# Parameter of the audio endpoints.
SpeechServingDep = Annotated[SpeechServing, Depends(serving_of)]
