"""What a stream writes at once, and what waits for a client that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_fixtures import MODEL, client_of, make_app, serve
from openai import OpenAI
from scripted_engine import REPLY, ScriptedEngine
from starlette.types import Message

from piecework.runtime.core.generation import FinishReason, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.tokenizer.output_processor import (
    RequestOutput,
    RequestState,
    process_outputs,
)
from piecework.server.anthropic.messages import PING
from piecework.server.core.answers import LINES
from piecework.server.core.errors import ApiError
from piecework.server.ollama.generation import BLANK
from piecework.server.serving import sse
from piecework.server.serving.collector import Collector, Update
from piecework.server.serving.sse import CONNECTION, EventStream, event


class Connection:
    """Notes what is written to it, and what comes by ASGI."""

    def __init__(self) -> None:
        self.can_write = True
        self.written: list[bytes] = []
        self.by_asgi = 0
        self.began = False

    def write_part(self, body: bytes) -> None:
        self.written.append(body)

    async def send(self, message: Message) -> None:
        self.began = True
        if message["type"] == "http.response.body":
            self.by_asgi += 1
            self.written.append(message["body"])


class Numbers:
    """An event is its token ids; 13 is too much for it, and 0 is no event."""

    def events(self, updates: list[Update]) -> bytes:
        return b"".join(self._event(output) for _, output in updates)

    def end(self) -> bytes:
        return b"end"

    def error(self, error: ApiError) -> bytes:
        return event(error.answer())

    def _event(self, output: RequestOutput) -> bytes:
        assert 13 not in output.token_ids
        return b"" if output.token_ids == [0] else json.dumps(output.token_ids).encode()


class Stream:
    """A stream whose engine is the test."""

    def __init__(self, scripted: ScriptedEngine, **settings: Any) -> None:
        serving = make_app(scripted, **settings).state.serving
        scripted.script.held = True
        self.connection = Connection()
        self._state = RequestState("r", [5], SamplingParams(), scripted.tokenizer)
        collector = Collector(serving, [self._state])
        stream = EventStream(collector, Numbers(), serving)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {CONNECTION: self.connection}
        self.task = asyncio.create_task(stream(scope, receive, self.connection.send))

    async def give(self, token: int, reason: FinishReason | None = None, turn: bool = True) -> None:
        process_outputs(
            {"r": self._state}, [TokenOutput(rid="r", token_ids=[token], finish_reason=reason)]
        )
        if turn:
            await asyncio.sleep(0.01)


@pytest.fixture
async def stream(scripted: ScriptedEngine) -> Stream:
    stream = Stream(scripted)
    await asyncio.sleep(0.01)
    await stream.give(1)
    return stream


async def test_what_comes_while_the_client_reads_is_written_where_it_comes(stream: Stream) -> None:
    await stream.give(2, turn=False)
    await stream.give(3, turn=False)
    assert stream.connection.written == [b"[1]", b"[2]", b"[3]"]
    await stream.give(4, FinishReason.LENGTH)
    assert stream.connection.written[3:] == [b"[4]", b"end"]
    assert stream.connection.by_asgi == 3
    await stream.task


async def test_what_waits_for_the_client_is_merged_and_not_overtaken(stream: Stream) -> None:
    stream.connection.can_write = False
    await stream.give(2, turn=False)
    await stream.give(3, turn=False)
    stream.connection.can_write = True
    await stream.give(4, turn=False)
    await stream.give(5)
    await stream.give(6)
    assert stream.connection.written == [b"[1]", b"[2, 3, 4, 5]", b"[6]"]


async def test_an_event_that_cannot_be_made_ends_its_stream(
    stream: Stream, scripted: ScriptedEngine
) -> None:
    await stream.give(13)
    assert b'"type":"server_error"' in stream.connection.written[-1]
    await stream.task


IMPATIENT = {"sse_ping_interval": 0.05}


async def test_a_stream_that_has_nothing_to_tell_says_that_it_goes_on(
    scripted: ScriptedEngine,
) -> None:
    stream = Stream(scripted, **IMPATIENT)
    written = stream.connection.written
    while len(written) < 3:
        await asyncio.sleep(0.01)
    assert written == [sse.COMMENT] * len(written)
    await stream.give(1)
    assert written[-1] == b"[1]"
    while written[-1] == b"[1]":
        await asyncio.sleep(0.01)
    assert written[-1] == sse.COMMENT
    await stream.give(2, FinishReason.LENGTH)
    assert [each for each in written if each != sse.COMMENT] == [b"[1]", b"[2]", b"end"]
    await stream.task


async def test_output_without_an_event_does_not_count_as_a_sign(scripted: ScriptedEngine) -> None:
    stream = Stream(scripted, **IMPATIENT)
    stream.connection.can_write = False
    await asyncio.sleep(0.01)
    for _ in range(20):
        await stream.give(0)
    assert len(stream.connection.written) > 1 and b"" not in stream.connection.written
    await stream.give(1, FinishReason.LENGTH)
    await stream.task


async def test_without_an_interval_a_stream_is_silent_but_has_its_status_line(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "BEGIN_SECONDS", 0.02)
    stream = Stream(scripted, sse_ping_interval=0)
    await asyncio.sleep(0.2)
    assert stream.connection.began and not stream.connection.written
    await stream.give(1, FinishReason.LENGTH)
    assert stream.connection.written == [b"[1]", b"end"]
    await stream.task


async def test_an_error_behind_a_blank_is_the_last_line(scripted: ScriptedEngine) -> None:
    scripted.script.fail_after, scripted.script.delay = 0, 0.15
    async with client_of(make_app(scripted, **IMPATIENT)) as client:
        answer = await client.post("/api/generate", json={"model": "toy", "prompt": "Hi"})
    assert answer.status_code == 200 and answer.text.startswith(" ")
    assert list(json.loads(answer.text)) == ["error"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_an_error_behind_a_keep_alive_is_the_last_event(
    scripted: ScriptedEngine, path: str
) -> None:
    scripted.script.fail_after, scripted.script.delay = 0, 0.15
    said = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {"model": "toy", "messages": said, "max_tokens": 4}
    if path == "responses":
        body = {"model": "toy", "input": said}
    body |= {"prompt": "Hi", "stream": True} if path == "completions" else {"stream": True}
    async with client_of(make_app(scripted, **IMPATIENT)) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    sign = PING if path == "messages" else sse.COMMENT
    assert answer.status_code == 200 and answer.content.startswith(sign)
    assert "it broke" in answer.text.rstrip().rpartition("data: ")[2]
    if path == "responses":
        assert answer.text.partition("event: ")[2].startswith("response.created")


# What each streaming endpoint sends while it has no token.
SIGNS = {
    "/v1/chat/completions": sse.COMMENT,
    "/v1/completions": sse.COMMENT,
    "/v1/responses": sse.COMMENT,
    "/v1/responses in the background": sse.COMMENT,
    "/v1/messages": PING,
    "/generate": sse.COMMENT,
    "/api/chat": BLANK,
    "/api/generate": BLANK,
    "/completion": sse.COMMENT,
    "/completions": sse.COMMENT,
}


def test_every_streaming_endpoint_has_a_sign(scripted: ScriptedEngine) -> None:
    app = make_app(scripted)
    streaming = {
        path
        for path, methods in app.openapi()["paths"].items()
        for answer in (methods.get("post") or {"responses": {}})["responses"].values()
        if {"text/event-stream", LINES} & answer.get("content", {}).keys()
    }
    # /infill needs a tokenizer with its tokens, and streams as /completion does.
    assert streaming - {"/infill"} == {path for path in SIGNS if " " not in path}


@pytest.mark.parametrize("endpoint", SIGNS)
async def test_a_slow_first_token_leaves_no_stream_silent(
    scripted: ScriptedEngine, endpoint: str
) -> None:
    scripted.script.delay = 0.3
    path, _, in_background = endpoint.partition(" ")
    said = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {"messages": said, "max_tokens": 1}
    if "completion" in path and "chat" not in path:
        body = {"prompt": "Hi", "max_tokens": 1}
    elif path.startswith("/api/"):
        body |= {"prompt": "Hi", "options": {"num_predict": 1}}
    elif path == "/v1/responses":
        body = {"input": "Hi", "max_output_tokens": 1, "background": bool(in_background)}
    elif path == "/generate":
        body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}
    async with client_of(make_app(scripted, **IMPATIENT)) as client:
        answer = await client.post(path, json={**body, "model": MODEL, "stream": True})
    assert answer.status_code == 200 and answer.content.count(SIGNS[endpoint]) >= 3


@pytest.fixture
def slow_server(scripted: ScriptedEngine) -> Iterator[str]:
    """The URL of a server whose tokens take three times the interval."""
    scripted.script.delay, scripted.script.tokens_per_step = 0.15, 4
    with serve(make_app(scripted, **IMPATIENT)) as url:
        yield url


def test_openai_ignores_the_signs(slow_server: str) -> None:
    openai = OpenAI(base_url=f"{slow_server}/v1", api_key="x", max_retries=0)
    said = [{"role": "user", "content": "Hi"}]
    chat = openai.chat.completions.create(
        model=MODEL,
        messages=said,
        stream=True,
        max_tokens=8,  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    with openai.responses.stream(model=MODEL, input="Hi", max_output_tokens=8) as events:
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert text and REPLY.startswith(text) and "".join(deltas) == text


def test_anthropic_ignores_the_signs(slow_server: str) -> None:
    # Without the package, the folder of these tests has its name.
    pytest.importorskip("anthropic.types")
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=slow_server, api_key="x", max_retries=0) as client:
        said = [{"role": "user", "content": "Hi"}]
        with client.messages.stream(model=MODEL, max_tokens=8, messages=said) as stream:
            text = "".join(stream.text_stream)
        assert text and REPLY.startswith(text)
        assert stream.get_final_message().usage.output_tokens == 8
