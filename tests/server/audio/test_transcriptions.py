"""The audio endpoints: formats, streams, fields, and several files at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import error_of, events
from speech_here import SpeechHere, client_here, load, wav
from tiny_whisper import WINDOW_SECONDS, make_tiny_whisper, noise

from piecework.runtime.speech import windows
from piecework.runtime.speech.model import SpeechModel

FILE = wav(noise(5.0, 1))
PATH = "/v1/audio/transcriptions"


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models write nonsense, which would be written again at other temperatures."""
    monkeypatch.setattr(windows, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(windows, "_SILENT", 1.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return load(make_tiny_whisper(tmp_path_factory.mktemp("w") / "w"), max_running_requests=3)


@pytest.fixture
async def here(model: SpeechModel) -> AsyncIterator[tuple[httpx.AsyncClient, SpeechHere]]:
    client, engine = client_here(model)
    async with client:
        yield client, engine


async def ask(
    client: httpx.AsyncClient, path: str = PATH, file: bytes = FILE, **fields: Any
) -> httpx.Response:
    named = {
        name.replace("granularities", "granularities[]"): value for name, value in fields.items()
    }
    return await client.post(path, data=named, files={"file": ("a.wav", file)})


async def test_all_formats_have_the_same_text(here: tuple[httpx.AsyncClient, SpeechHere]) -> None:
    client, engine = here
    plain = (await ask(client)).json()
    text = plain["text"]
    assert len(text) > 3 and plain["usage"] == {"type": "duration", "seconds": 5}
    assert (await ask(client, response_format="text")).text == f"{text}\n"
    verbose = (await ask(client, response_format="verbose_json")).json()
    assert verbose["text"] == text and verbose["duration"] == 5 and verbose["task"] == "transcribe"
    assert verbose["language"] in ("english", "german", "japanese") and "words" not in verbose
    segments = verbose["segments"]
    assert "".join(each["text"] for each in segments).strip() == text
    assert [each["id"] for each in segments] == list(range(len(segments)))
    assert len({each["seek"] for each in segments}) >= 5 / WINDOW_SECONDS
    subtitles = (await ask(client, response_format="srt")).text.split("\n\n")[:-1]
    assert len(subtitles) == len(segments)
    time = r"\d\d:\d\d:\d\d,\d\d\d"
    for number, (subtitle, segment) in enumerate(zip(subtitles, segments, strict=True), 1):
        head, times, line = subtitle.split("\n")
        assert head == str(number) and re.fullmatch(f"{time} --> {time}", times)
        assert line == " ".join(segment["text"].split()).replace("-->", "->")
    answer = await ask(client, response_format="vtt")
    assert answer.headers["content-type"].startswith("text/vtt")
    assert answer.text.startswith("WEBVTT\n\n00:00:0") and answer.text.count(" --> ") == len(
        segments
    )
    assert engine.scheduler.stats().running_requests == 0


async def test_words_have_times(here: tuple[httpx.AsyncClient, SpeechHere]) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    found = (await ask(here[0], **fields)).json()
    assert "segments" not in found and found["words"]
    assert all(0 <= word["start"] <= word["end"] <= 6 for word in found["words"])
    fields["timestamp_granularities"] = ["word", "segment"]
    both = (await ask(here[0], **fields)).json()
    assert both["words"] == found["words"] and both["segments"]


async def test_a_stream_has_the_same_text_in_segments(
    here: tuple[httpx.AsyncClient, SpeechHere],
) -> None:
    text = (await ask(here[0])).json()["text"]
    answer = await ask(here[0], stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    *deltas, done = events(answer)
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done" and done["usage"]["seconds"] == 5
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert done["text"].strip() == text


async def test_the_first_piece_decides_the_language_and_a_given_one_is_used(
    here: tuple[httpx.AsyncClient, SpeechHere],
) -> None:
    client, engine = here
    await ask(client)
    first, *others = engine.requests
    assert first.language is None and {each.language for each in others} <= {"en", "de", "ja"}
    engine.requests.clear()
    found = (await ask(client, response_format="verbose_json", language="German")).json()
    assert found["language"] == "german" and {each.language for each in engine.requests} == {"de"}
    engine.requests.clear()
    fields = {"prompt": "Names.", "temperature": "0.5", "seed": "9"}
    answer = await ask(client, "/v1/audio/translations", **fields)
    assert answer.status_code == 200
    asked = engine.requests
    assert [each.seed for each in asked] == list(range(9, 9 + len(asked)))
    same = {(each.task, each.prompt, each.temperature) for each in asked}
    assert same == {("translate", "Names.", 0.5)}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "diarized_json"}, "response_format"),
    ({"temperature": "2"}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"language": "klingon"}, "language"),
    ({"stream": "perhaps"}, "stream"),
    ({"stream": "true", "response_format": "srt"}, "response_format"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
    ({"timestamp_granularities": ["letter"]}, "timestamp_granularities[0]"),
    ({"include[]": "logprobs"}, "include"),
    ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"seed": "1.5"}, "seed"),
    ({"file": b"abc"}, "file"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_wrong_field_is_named(
    here: tuple[httpx.AsyncClient, SpeechHere], fields: dict[str, Any], param: str
) -> None:
    error_of(await ask(here[0], **fields), 400, param)


async def test_a_wrong_form_is_refused(here: tuple[httpx.AsyncClient, SpeechHere]) -> None:
    client, _ = here
    error_of(await ask(client, model="other"), 404, "model")
    error_of(await client.post(PATH, data={"model": "tiny"}, files={"x": b"a"}), 400, "file")
    error_of(await client.post(PATH, json={"model": "tiny"}), 415, "Content-Type")
    head = {"Content-Type": "multipart/form-data; boundary=x"}
    error_of(await client.post(PATH, content=b"--x\r\nnonsense", headers=head), 400, "file")
    error_of(await client.post(PATH, content=bytes(26 * 2**20), headers=head), 413)
    for fields in ({"stream": "true"}, {}):
        error_of(await ask(client, file=b"abc", **fields), 400, "file")


async def test_longer_audio_than_allowed_is_refused(model: SpeechModel) -> None:
    client, _ = client_here(model, max_audio_seconds=4)
    async with client:
        assert "more than 4 s" in error_of(await ask(client), 400, "file")["message"]
        assert (await ask(client, file=wav(noise(3.0)))).status_code == 200


async def test_a_model_of_english_alone_does_not_translate(tmp_path: Path) -> None:
    client, engine = client_here(load(make_tiny_whisper(tmp_path / "w", english=True)))
    async with client:
        error_of(await ask(client, "/v1/audio/translations"), 400)
        found = (await ask(client, response_format="verbose_json", language="en")).json()
        assert found["language"] == "english" and len(engine.requests) >= 3
        error_of(await ask(client, language="de"), 400, "language")


async def test_several_files_at_a_time_have_the_texts_that_they_have_alone(
    here: tuple[httpx.AsyncClient, SpeechHere],
) -> None:
    files = [wav(noise(0.5 + seed / 2, seed)) for seed in range(3)]
    alone = [(await ask(here[0], file=file)).json()["text"] for file in files]
    together = await asyncio.gather(*(ask(here[0], file=file) for file in files))
    assert [answer.json()["text"] for answer in together] == alone
    assert len(set(alone)) == len(files)


async def test_a_client_that_leaves_ends_its_text(
    here: tuple[httpx.AsyncClient, SpeechHere],
) -> None:
    client, engine = here
    engine.paused = True
    for fields in ({}, {"stream": "true"}):
        task = asyncio.create_task(ask(client, **fields))
        while not engine.scheduler.has_work:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while engine.scheduler.has_work:
            await asyncio.sleep(0.02)


async def test_too_many_files_at_a_time_are_refused(model: SpeechModel) -> None:
    client, engine = client_here(model, max_queued_requests=0)
    engine.paused = True
    async with client:
        first = asyncio.create_task(ask(client))
        while not engine.scheduler.has_work:
            await asyncio.sleep(0.02)
        refused = await ask(client)
        assert error_of(refused, 503)["code"] == "queue_full" and refused.headers["retry-after"]
        engine.paused = False
        engine.step()
        assert (await first).status_code == 200
        assert (await ask(client)).status_code == 200


async def test_a_key_is_needed(model: SpeechModel) -> None:
    client, _ = client_here(model, api_key="secret")
    async with client:
        error_of(await ask(client), 401)
        client.headers["Authorization"] = "Bearer secret"
        assert (await ask(client)).status_code == 200


async def test_metrics_and_models(here: tuple[httpx.AsyncClient, SpeechHere]) -> None:
    client, _ = here
    await ask(client)
    metrics = (await client.get("/metrics")).text
    assert 'piecework:audio_seconds_total{model_name="tiny"} 5.0' in metrics
    assert 'piecework:num_requests_total{model_name="tiny"} 1.0' in metrics
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await client.get("/v1/status")).json()["kind"] == "speech"
