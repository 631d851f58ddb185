"""A request may be given up at any moment of its life, by its client or by another one: nothing of
it remains, here or in the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_in_process import EngineInProcess
from fastapi import FastAPI
from http_fixtures import client_of, make_app
from starlette.types import Message
from toy_runner import continuation

from piecework.server.engine.state import EngineUnavailable

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [[5, 6, 7], [5, 6, 8]], "max_tokens": 2, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/generate": {"input_ids": [5] * 40, "sampling_params": {"max_new_tokens": 2, "n": 5}},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/api/chat": {
        "model": "toy",
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {"num_predict": 2},
    },
    "/v1/responses": {"model": "toy", "input": "Hi", "max_output_tokens": 2},
}
_MOST_TURNS = 400


@pytest.fixture
def engine() -> EngineInProcess:
    return EngineInProcess()


@pytest.fixture
async def app(engine: EngineInProcess) -> AsyncIterator[FastAPI]:
    app = make_app(engine, responses_store="memory")  # type: ignore[arg-type]
    yield app
    await app.state.responses.close()
    await app.state.kept.close()


class Visit:
    """One request by hand, whose client leaves when `leave` is called."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._content: bytes | None = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self.sent: list[Message] = []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "root_path": "", "query_string": b"", "path": path, "raw_path": path.encode(),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        content, self._content = self._content, None
        if content is not None and not self._gone.is_set():
            return {"type": "http.request", "body": content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._gone.is_set():
            self.sent.append(message)

    def leave(self) -> None:
        self._gone.set()


async def turn(engine: EngineInProcess, number: int) -> None:
    """A turn of the event loop; the engine has one now and then, and its words take a while."""
    await asyncio.sleep(0)
    if number % 3 == 2:
        engine.step()
    if number % 11 == 10:
        engine.deliver()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_may_leave_at_any_moment(
    engine: EngineInProcess, app: FastAPI, path: str, stream: bool
) -> None:
    serving, ended_by_itself = app.state.serving, False
    moments = iter(range(_MOST_TURNS))
    while not ended_by_itself:
        leaves_at = next(moments)
        visit = Visit(app, path, {**BODIES[path], "stream": stream})
        for number in range(leaves_at):
            await turn(engine, number)
            ended_by_itself = visit.task.done()
        visit.leave()
        await asyncio.wait_for(visit.task, 5)
        engine.step()
        engine.deliver()
        assert not serving.live_rids
        engine.assert_nothing_left()
    assert leaves_at > 10 and visit.sent[0]["status"] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_may_be_aborted_at_any_moment(
    engine: EngineInProcess, app: FastAPI, stream: bool
) -> None:
    """By its id, which is free for the next request at once."""
    ended_by_itself, reasons = False, set()
    moments = iter(range(_MOST_TURNS))
    async with client_of(app) as client:
        while not ended_by_itself:
            aborts_at = next(moments)
            prompt = [5, 6, aborts_at % 50]
            sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
            body = {"rid": "r", "input_ids": prompt, "stream": stream, "sampling_params": sampling}
            visit = Visit(app, "/generate", body)
            for number in range(aborts_at):
                await turn(engine, number)
                ended_by_itself = visit.task.done()
            await client.post("/abort_request", json={"rid": "r"})
            for number in range(aborts_at, aborts_at + _MOST_TURNS):
                if visit.task.done():
                    break
                await turn(engine, number)
            answer = _generated(visit, stream)
            reasons.add(answer["meta_info"]["finish_reason"]["type"])
            assert answer["output_ids"] == continuation(prompt, len(answer["output_ids"]))
    engine.step()
    engine.deliver()
    engine.assert_nothing_left()
    assert reasons == {"abort", "length"}


async def test_what_waits_for_a_flush_ends_with_the_engine(engine: EngineInProcess) -> None:
    """Else an engine that is started again would answer it in place of the next one."""
    flush = asyncio.create_task(engine.flush_cache())
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineUnavailable, match="stopped"):
        await asyncio.wait_for(flush, 5)


def _generated(visit: Visit, stream: bool) -> Any:
    assert visit.task.done() and visit.sent[0]["status"] == 200
    text = b"".join(message.get("body", b"") for message in visit.sent).decode()
    return json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)
