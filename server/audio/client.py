"""The client of a speech model's engine: sends pieces of audio and returns their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from ...runtime.core.speech_messages import SpeechInfo, SpeechOutput, SpeechRequest, SpeechStats
from ...runtime.speech.config import SpeechConfig
from ..engine.results import ResultClient
from ..engine.settings import SupervisorSettings
from ..engine.spawn import SPEECH_MODEL
from ..serving.raising_job import RaisingJob


class SpeechJob(RaisingJob[SpeechRequest, SpeechOutput]):
    """The text of a piece of audio."""

    def value(self, output: SpeechOutput) -> SpeechOutput:
        return output


class SpeechClient(ResultClient[SpeechJob]):
    """A supervised engine process of a speech model."""

    def __init__(
        self,
        config: SpeechConfig,
        *,
        command: Sequence[str] = SPEECH_MODEL,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings` are the keyword arguments of `EngineSupervisor`."""
        super().__init__(command, config, **settings)
        self.info: SpeechInfo | None = None
        self.stats = SpeechStats()

    async def write(self, request: SpeechRequest) -> SpeechOutput:
        """Return the text of a piece. Raises `InternalError`, and as `ResultClient`."""
        output: SpeechOutput
        (output,) = await self._results([SpeechJob(request)])
        return output
