"""Below `/v1/messages` every error has Anthropic's shape, whoever gives it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_fixtures import client_of, events, make_app
from scripted_engine import ScriptedEngine

from piecework.server.engine.supervisor import EngineState

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
GOOD: dict[str, Any] = {"messages": [USER], "max_tokens": 5}


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) - {"retry_after", "phase"} == {"type", "message"}
    assert ("retry_after" in body["error"]) == (status in (503, 529))
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALLED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text:"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": CALLED["content"]}]}, "tool_use"),
        ({"messages": [USER, CALLED]}, "tool_result"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "z", "content": "x"}],
                    }
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "custum", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "same name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "less than max_tokens"),
        ({"messages": [{"role": "user", "content": "Hi " * 999}]}, "prompt is too long"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, body: dict[str, Any], named: str
) -> None:
    answer = await client.post(PATH, json={**GOOD, **body})
    assert named in error_of(answer, 400, "invalid_request_error")


async def test_errors_of_every_layer(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    headers = {"Content-Type": "application/json"}
    for answer, status, kind in (
        (await client.post(PATH, content=b"x"), 415, "invalid_request_error"),
        (await client.post(PATH, content=b"{", headers=headers), 400, "invalid_request_error"),
        (
            await client.post(PATH, content=b" " * 2**23, headers=headers),
            413,
            "request_too_large",
        ),
        (await client.get(PATH), 405, "invalid_request_error"),
        (await client.get(f"{PATH}/batches"), 404, "not_found_error"),
        (await client.post(PATH, json={**GOOD, "model": "claude"}), 404, "not_found_error"),
    ):
        error_of(answer, status, kind)
    scripted.script.fail_after = 0
    broken = await client.post(PATH, json=GOOD)
    assert "it broke" in error_of(broken, 500, "api_error")
    scripted.script.room = 0
    full = await client.post(PATH, json=GOOD)
    error_of(full, 529, "overloaded_error")
    assert full.headers["retry-after"] == "1"
    scripted.state = EngineState.FAILED
    error_of(await client.post(PATH, json=GOOD), 503, "api_error")


async def test_an_error_in_a_stream_is_an_event(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.fail_after = 2
    answer = await client.post(PATH, json={**GOOD, "stream": True})
    error = events(answer)[-1]
    assert error["type"] == "error" and error["error"]["type"] == "api_error"
    assert error["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "sesame"}, 200),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"Authorization": "Bearer other", "x-api-key": "sesame"}, 200),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
    ],
)
async def test_the_key_under_anthropics_name(
    scripted: ScriptedEngine, headers: dict[str, str], status: int
) -> None:
    async with client_of(make_app(scripted, api_key="sesame"), headers=headers) as client:
        answer = await client.post(PATH, json=GOOD, headers={"anthropic-version": "2023-06-01"})
        if status == 401:
            error_of(answer, 401, "authentication_error")
        assert answer.status_code == status
