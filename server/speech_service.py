"""The service of `piecework serve` for a speech model: engine, application and summary."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from ..runtime.core.speech_messages import SpeechInfo
from ..runtime.files.resolve import find_model
from ..runtime.speech.folder import read_speech_folder
from .app import COMMON_ROUTERS, build_app
from .audio import transcriptions
from .audio.client import SpeechClient
from .audio.decoding import Decoders, check_installed
from .audio.state import SpeechMetrics, SpeechServing
from .config.speech import SpeechServerConfig
from .engine.settings import settings_of
from .serving.service import Service
from .summary import table

_MIB = 2**20
SPEECH_ROUTERS = (transcriptions.router, *COMMON_ROUTERS)


def speech_service(
    config: SpeechServerConfig, process: subprocess.Popen[bytes] | None
) -> Callable[[], Service]:
    """Check the folder. Return a function that makes the service in its event loop.

    `process` is an engine process that waits for its job, or None. Raises `ValueError`.
    """
    check_installed()
    read_speech_folder(find_model(config.engine.model_path))

    def make() -> Service:
        engine = SpeechClient(config.engine, **settings_of(config, process))
        return Service(engine, create_speech_app(engine, config), partial(speech_summary, config))

    return make


def create_speech_app(engine: SpeechClient, config: SpeechServerConfig) -> FastAPI:
    """Return an application for a speech model. The caller starts and stops the engine."""
    name = config.model_names[0]
    metrics = SpeechMetrics(engine, name)
    serving = SpeechServing(
        engine=engine,
        config=config,
        metrics=metrics,
        model_name=name,
        decoders=Decoders(config.max_audio_seconds),
    )
    return build_app(serving, SPEECH_ROUTERS)


def speech_summary(config: SpeechServerConfig, info: SpeechInfo, port: int, seconds: float) -> str:
    """Return what is served, its limits, and a command to try it."""
    languages = f"{len(info.languages)} languages" if info.languages else "English"
    rows = {
        "task": "text of speech",
        "model": f"{info.architecture}, {info.dtype} on {info.device}, weights "
        f"{info.weight_bytes / _MIB:,.0f} MiB; {languages}",
        "longest audio": f"{config.max_audio_seconds:,g} s, in pieces of {info.window_seconds:g} s",
        "running limit": f"{info.max_running_requests:,} pieces, {config.max_queued_requests:,} "
        "more may wait",
    }
    flags = f"-F model={config.model_names[0]} -F file=@speech.wav"
    return table(config, port, seconds, rows | info.remarks, "audio/transcriptions", flags)
