"""An engine of speech in the process of the test: the real scheduler and model, behind the real
client, without sockets.
"""

from __future__ import annotations

import asyncio
import io
import wave
from typing import Any

import av
import httpx
from http_fixtures import client_of

from piecework.runtime.core.messages import AbortRequests
from piecework.runtime.core.speech_messages import SpeechReady, SpeechRequest
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.speech.config import SpeechConfig
from piecework.runtime.speech.model import SpeechModel
from piecework.runtime.speech.scheduler import SpeechScheduler
from piecework.server.audio.client import SpeechClient
from piecework.server.config.speech import SpeechServerConfig
from piecework.server.speech_service import create_speech_app


class SpeechHere(SpeechClient):
    """Each message goes over the wire's format; a step runs once the loop is free."""

    def __init__(self, model: SpeechModel, **settings: Any) -> None:
        super().__init__(model.config, **settings)
        self.scheduler = SpeechScheduler(model)
        self.requests: list[SpeechRequest] = []
        self.paused = False
        self._handle(SpeechReady(info=model.info()))

    def _send(self, message: Any) -> None:
        match decode(encode(message)):
            case SpeechRequest() as request:
                self.requests.append(request)
                self.scheduler.add(request)
                asyncio.get_running_loop().call_soon(self.step)
            case AbortRequests(rids=rids):
                self.scheduler.abort(rids)

    def step(self) -> None:
        if self.scheduler.has_work and not self.paused:
            self._handle(decode(encode(self.scheduler.step())))
            asyncio.get_running_loop().call_soon(self.step)


def load(folder: object, **settings: Any) -> SpeechModel:
    return SpeechModel(
        SpeechConfig(model_path=str(folder), num_threads=1, dtype="float32", **settings)
    )


def client_here(model: SpeechModel, **settings: Any) -> tuple[httpx.AsyncClient, SpeechHere]:
    """A client of an application over the model, which is called tiny; and its engine."""
    of_server = ("api_keys", "api_key", "max_audio_seconds")
    own = {name: settings.pop(name) for name in of_server if name in settings}
    engine = SpeechHere(model, **settings)
    config = SpeechServerConfig(served_model_name="tiny", engine=model.config, **own)
    return client_of(create_speech_app(engine, config)), engine


def wav(samples: bytes, rate: int = 16_000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples)
    return file.getvalue()


def encoded(samples: bytes, container: str, codec: str, rate: int = 16_000) -> bytes:
    """The samples as a file of another format."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output, av.open(io.BytesIO(wav(samples))) as given:
        stream = output.add_stream(codec, rate=rate)
        stream.layout = "mono"
        resampler = av.AudioResampler(format=stream.format.name, layout="mono", rate=rate)
        for frame in [*given.decode(audio=0), None]:
            for part in resampler.resample(frame):
                output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()
