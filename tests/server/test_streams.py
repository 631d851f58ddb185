"""What a stream writes at once, and what waits for a client that does not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
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
from piecework.server.core.errors import ApiError
from piecework.server.serving import sse
from piecework.server.serving.collector import Collector, Update
from piecework.server.serving.sse import CONNECTION, EventStream, event


class Connection:
    """Notes what is written to it, and what comes by ASGI."""

    def __init__(self) -> None:
        self.can_write = True
        self.written: list[bytes] = []
        self.by_asgi = 0

    def write_part(self, body: bytes) -> None:
        self.written.append(body)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.by_asgi += 1
            self.written.append(message["body"])


class Numbers:
    """An event is its token ids; 13 is too much for it."""

    def events(self, updates: list[Update]) -> bytes:
        return b"".join(self._event(output) for _, output in updates)

    def end(self) -> bytes:
        return b"end"

    def error(self, error: ApiError) -> bytes:
        return event(error.answer())

    def _event(self, output: RequestOutput) -> bytes:
        assert 13 not in output.token_ids
        return json.dumps(output.token_ids).encode()


class Stream:
    """A stream whose engine is the test."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        serving = make_app(scripted).state.serving
        scripted.script.held = True
        self.connection = Connection()
        self._state = RequestState("r", [5], SamplingParams(), scripted.tokenizer)
        collector = Collector(serving, [self._state])
        stream = EventStream(collector, Numbers(), serving.metrics)

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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEGIN_SECONDS", 0.05)
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_has_nothing_to_tell_says_that_it_goes_on(
    scripted: ScriptedEngine,
) -> None:
    stream = Stream(scripted)
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


@pytest.mark.usefixtures("impatient")
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
    async with client_of(make_app(scripted)) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200 and answer.text.startswith(sse.COMMENT.decode())
    assert "it broke" in answer.text.rstrip().rpartition("data: ")[2]
    if path == "responses":
        assert answer.text.partition("event: ")[2].startswith("response.created")


@pytest.mark.usefixtures("impatient")
def test_clients_pass_over_what_keeps_a_stream_open(scripted: ScriptedEngine) -> None:
    scripted.script.delay, scripted.script.tokens_per_step = 0.15, 4
    with serve(make_app(scripted)) as url:
        openai = OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
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
        raw = httpx.post(
            f"{url}/v1/messages", json={"messages": said, "max_tokens": 8, "stream": True}
        ).text
        assert raw.startswith(sse.COMMENT.decode()) and raw.count("event: ping") > 1
