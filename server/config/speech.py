"""The settings of a server of a speech model.

The command line makes flags from them, so this file imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...runtime.config.options import option
from ...runtime.speech.config import SpeechConfig
from ..engine.spawn import SPEECH_MODEL
from .server import CommonServerConfig

AUDIO = "audio"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechServerConfig(CommonServerConfig):
    """Settings of a server of a speech model. Raises `ValueError` for invalid values."""

    engine_command = SPEECH_MODEL
    max_audio_seconds: float = option(
        7200.0, "length of the longest audio of a request", group=AUDIO, metavar="SECONDS"
    )
    engine: SpeechConfig = field(default_factory=SpeechConfig)

    def __post_init__(self) -> None:
        # super() does not work here: a dataclass with slots replaces the class.
        CommonServerConfig.__post_init__(self)
        if not 0 < self.max_audio_seconds < float("inf"):
            raise ValueError(
                f"--max-audio-seconds must be more than 0 seconds, got {self.max_audio_seconds}"
            )
