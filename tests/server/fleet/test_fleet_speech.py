"""A model of speech in a fleet: its streams are kept open, and a file that is being written down
keeps its model loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fleet_fixtures import ScriptedFleet, served, states, until
from speech_here import SpeechHere, load, wav
from tiny_whisper import make_tiny_whisper, noise

from piecework.runtime.speech.model import SpeechModel
from piecework.server import fleet_service as fleet_service_module
from piecework.server.audio import stream
from piecework.server.config.fleet import MemberConfig
from piecework.server.config.speech import SpeechServerConfig
from piecework.server.fleet import fleet as fleet_module
from piecework.server.serving.service import Service
from piecework.server.speech_service import create_speech_app

COMMENT = b": keep-alive\n\n"


class Loadable(SpeechHere):
    """Is ready once `may_start` is set, and counts how often it was stopped."""

    def __init__(self, model: SpeechModel) -> None:
        super().__init__(model)
        self.may_start = asyncio.Event()
        self.stops = 0

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> bool:
        return await self.may_start.wait()

    async def stop(self, *, at_once: bool = False) -> None:
        self.stops += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return load(make_tiny_whisper(tmp_path_factory.mktemp("fleet") / "w", english=True))


@pytest.fixture
def engines(
    scripted: ScriptedFleet, model: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> list[Loadable]:
    """The engines that the fleet has made. Its only model is called speech."""
    made: list[Loadable] = []
    server = SpeechServerConfig(served_model_name="speech", engine=model.config)
    config = scripted.config

    def configured(*names: str, **settings: Any) -> Any:
        members = (MemberConfig(name="speech", server=server),)
        return replace(config("a", **settings), members=members)

    def service_of(config: SpeechServerConfig, process: Any) -> Callable[[], Service]:
        process.kill()
        process.communicate()

        def make() -> Service:
            made.append(Loadable(model))
            return Service(made[-1], create_speech_app(made[-1], config), lambda *_: "")  # type: ignore[arg-type]

        return make

    monkeypatch.setattr(scripted, "config", configured)
    monkeypatch.setattr(fleet_service_module, "service_of", service_of)
    return made


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    form = {"model": "speech", "stream": "true"}
    files = {"file": ("a.wav", wav(noise(0.5)))}
    return await client.post("/v1/audio/transcriptions", data=form, files=files)


async def test_a_stream_is_kept_open_while_its_model_loads(
    scripted: ScriptedFleet, engines: list[Loadable]
) -> None:
    async with served(scripted, sse_ping_interval=0.03) as client:
        asked = asyncio.create_task(ask(client))
        await until(lambda: bool(engines))
        await asyncio.sleep(0.15)
        engines[0].may_start.set()
        answer = await asked
    assert answer.status_code == 200 and answer.content.startswith(COMMENT * 2)
    assert answer.text.count('"type":"transcript.text.done"') == 1


async def test_a_running_transcription_keeps_its_stream_and_its_model(
    scripted: ScriptedFleet, engines: list[Loadable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(stream, "_PING_SECONDS", 0.03)
    async with served(scripted, idle_unload=0.1) as client:
        asked = asyncio.create_task(ask(client))
        await until(lambda: bool(engines))
        engine = engines[0]
        engine.paused = True
        engine.may_start.set()
        await until(lambda: bool(engine.requests))
        await asyncio.sleep(0.5)
        assert await states(client) == {"speech": "ready"} and engine.stops == 0
        engine.paused = False
        engine.step()
        answer = await asked
        assert answer.status_code == 200 and answer.content.startswith(COMMENT * 2)
        assert answer.text.count('"type":"transcript.text.done"') == 1
        # Without a request the model is unloaded.
        await until(lambda: engine.stops == 1)
