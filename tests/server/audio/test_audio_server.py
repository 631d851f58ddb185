"""`piecework serve` of a speech model: the process, its client, a crash, and a fleet."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_fixtures import client_of, error_of
from server_process import IMAGE_FLAGS, ServerProcess
from speech_here import wav
from tiny_models import make_tiny_model
from tiny_whisper import make_tiny_whisper, noise

from piecework.runtime.speech.config import SpeechConfig
from piecework.server.audio.client import SpeechClient
from piecework.server.config.speech import SpeechServerConfig
from piecework.server.speech_service import create_speech_app

FILE = wav(noise(1.5, 2))
POISON = noise(1.0, 9)
FAULTY_ENGINE = """
import os, sys
from piecework.runtime.engine import process
from piecework.runtime.speech import engine
from piecework.runtime.speech.model import SpeechModel

plain = SpeechModel.spectrogram

def spectrogram(self, audio):
    if len(audio) == {poison}:
        os._exit(7)
    return plain(self, audio)

SpeechModel.spectrogram = spectrogram
sys.exit(process.run_engine(lambda: engine))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_whisper(tmp_path_factory.mktemp("served") / "w", english=True)


def ask(server: ServerProcess, model: str) -> str:
    form = {"model": model, "response_format": "text"}
    answer = server.client.post(
        "/v1/audio/transcriptions", data=form, files={"file": ("a.wav", FILE)}
    )
    assert answer.status_code == 200, answer.text
    return answer.text


def test_the_openai_client_gets_its_text(folder: Path) -> None:
    from openai import OpenAI

    server = ServerProcess(str(folder), common=IMAGE_FLAGS)
    try:
        server.wait_ready()
        audio = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60).audio
        text = audio.transcriptions.create(model="tiny", file=("a.wav", FILE)).text
        assert text
        with audio.transcriptions.create(
            model="tiny", file=("a.wav", io.BytesIO(FILE)), stream=True
        ) as stream:
            *_, done = stream
        assert done.type == "transcript.text.done" and done.text.strip() == text
        assert server.client.get("/health").status_code == 200
        server.process.terminate()
        code, out, _ = server.finish()
        assert code == 0
        assert "text of speech" in out and "-F file=@speech.wav" in out
    finally:
        server.process.kill()
        server.finish()


@pytest.mark.slow
async def test_audio_that_ends_the_engine_is_found_and_the_others_are_answered(
    folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_ENGINE.format(poison=len(POISON)))
    config = SpeechServerConfig(engine=SpeechConfig(model_path=str(folder), num_threads=1))
    engine = SpeechClient(config.engine, log_level="error", command=(sys.executable, str(script)))
    await engine.start()
    try:
        assert await engine.wait_ready(), engine.failure
        async with client_of(create_speech_app(engine, config)) as http:
            answers = await asyncio.gather(
                *(
                    http.post("/v1/audio/transcriptions", files={"file": ("a.wav", file)})
                    for file in (FILE, wav(POISON), FILE)
                )
            )
        assert [answer.status_code for answer in answers] == [200, 500, 200]
        assert answers[0].json() == answers[2].json()
        assert "ended twice" in error_of(answers[1], 500)["message"]
    finally:
        await engine.stop()


@pytest.fixture
def fleet(folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "a").mkdir()
    make_tiny_model(tmp_path / "a")
    flags = ["--model-path", f"text={tmp_path / 'a'}", "--model-path", f"speech={folder}"]
    server = ServerProcess("", *flags, common=IMAGE_FLAGS[:2] + IMAGE_FLAGS[4:])
    yield server
    server.process.kill()
    server.finish()


@pytest.mark.slow
def test_a_fleet_finds_the_model_in_the_form(fleet: ServerProcess) -> None:
    fleet.wait_ready()
    text = ask(fleet, "speech")
    assert text.strip() and ask(fleet, "default") == text
    kinds = {
        each["id"]: each["status"]["kind"] for each in fleet.client.get("/v1/models").json()["data"]
    }
    assert kinds == {"text": "text", "speech": "speech"}
    form = {"file": ("a.wav", FILE)}
    path = "/v1/audio/transcriptions"
    error_of(fleet.client.post(path, data={"model": "other"}, files=form), 404, "model")
    error_of(fleet.client.post(path, data={"model": "text"}, files=form), 404, "model")
    error_of(fleet.client.post(path, json={"model": "speech"}), 415, "Content-Type")
