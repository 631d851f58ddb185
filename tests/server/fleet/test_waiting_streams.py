"""A stream whose model is being loaded says that it goes on, in the events of its family."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fleet_fixtures import ScriptedFleet, served, until

COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
FAMILIES: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": (CHAT, COMMENT),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 3}, COMMENT),
    "/v1/responses": ({"input": "Hi", "max_output_tokens": 3}, COMMENT),
    "/v1/messages": (CHAT, PING),
    "/generate": ({"text": "Hi", "sampling_params": {"max_new_tokens": 3}}, COMMENT),
}


async def ask_while_it_loads(
    client: httpx.AsyncClient, scripted: ScriptedFleet, path: str, **more: Any
) -> httpx.Response:
    """Ask for a stream of a model whose engine starts only after a while."""
    scripted.prepare = lambda engine: engine.may_start.clear()
    body = {**FAMILIES[path][0], "model": "b", "stream": True, **more}
    url = path if path != "/generate" else "/generate?model=b"
    asked = asyncio.create_task(client.post(url, json=body))
    await until(lambda: "b" in scripted.engines)
    await asyncio.sleep(0.15)
    scripted.engines["b"].may_start.set()
    return await asked


def events_of(content: bytes) -> list[Any]:
    lines = content.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("path", FAMILIES)
async def test_a_stream_is_kept_open_and_then_answered(scripted: ScriptedFleet, path: str) -> None:
    async with served(scripted, "a", "b", sse_ping_interval=0.03) as client:
        answer = await ask_while_it_loads(client, scripted, path)
        loaded = await client.post(
            path if path != "/generate" else "/generate?model=b",
            json={**FAMILIES[path][0], "model": "b", "stream": True},
        )
    sign = FAMILIES[path][1]
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content.startswith(sign * 2)
    rest = answer.content
    while rest.startswith(sign):
        rest = rest.removeprefix(sign)
    kinds = [
        [one.get("type", one.get("object")) for one in events_of(c)] for c in (rest, loaded.content)
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 1


@pytest.mark.parametrize("path", FAMILIES)
async def test_an_error_behind_the_sign_is_the_last_event(
    scripted: ScriptedFleet, path: str
) -> None:
    async with served(scripted, "a", "b", sse_ping_interval=0.03) as client:
        wrong = {"temperature": -1} if path != "/generate" else {"sampling_params": {"top_p": 5}}
        answer = await ask_while_it_loads(client, scripted, path, **wrong)
        assert answer.status_code == 200
        told = events_of(answer.content)[-1]
        parameter = "temperature" if "temperature" in wrong else "top_p"
        assert parameter in told.get("error", told)["message"]
        if path in ("/v1/messages", "/v1/responses"):
            assert told["type"] == "error" and b"event: error\n" in answer.content


async def test_a_model_that_cannot_be_loaded_is_told_in_the_stream(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b", sse_ping_interval=0.03) as client:
        asked = asyncio.create_task(ask_while_it_loads(client, scripted, "/v1/chat/completions"))
        await until(lambda: "b" in scripted.engines)
        scripted.engines["b"].fault = "no memory"
        answer = await asked
        metrics = (await client.get("/metrics")).text
    assert events_of(answer.content)[-1]["error"]["code"] == "model_failed"
    assert "errors_total" in metrics


async def test_what_is_no_stream_is_answered_as_ever(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", sse_ping_interval=0.03) as client:
        answer = await ask_while_it_loads(client, scripted, "/v1/completions", stream=False)
    assert answer.json()["model"] == "b" and answer.headers["x-queue-place"] == "1"
