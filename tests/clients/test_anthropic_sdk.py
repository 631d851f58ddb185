"""Anthropic's own client against `/v1/messages`, and its types, which parse every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_tasks import QUESTION, WEATHER_SCHEMA, City, weather

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.slow

USER = {"role": "user", "content": QUESTION}
TOOL = {"name": "weather", "description": weather.__doc__, "input_schema": WEATHER_SCHEMA}
GREEDY = {"temperature": 0}
CALLS = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat(client: Any) -> None:
    message = client.messages.create(model="default", max_tokens=8, messages=[USER])
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.content[0].text
    counted = client.messages.count_tokens(model="default", messages=[USER]).input_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted


def test_a_stream(client: Any) -> None:
    with client.messages.stream(model="default", max_tokens=8, messages=[USER]) as stream:
        text = "".join(stream.text_stream)
    assert text == stream.get_final_message().content[0].text
    assert stream.get_final_message().usage.output_tokens == 8


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(client: Any, streamed: bool) -> None:
    asked = {"model": "default", "max_tokens": 60, "extra_body": GREEDY}
    if streamed:
        with client.messages.stream(**asked, **CALLS, messages=[USER]) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked, **CALLS, messages=[USER])
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.name == "weather"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(
        **asked, messages=messages, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text" and answer.content[0].text


def test_a_pydantic_model(client: Any) -> None:
    message = client.messages.parse(
        model="default", max_tokens=60, messages=[USER], output_format=City
    )
    assert isinstance(message.parsed_output, City)


def test_errors_are_of_the_clients_kinds(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=8, messages=[USER])
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(
            model="default", max_tokens=8, messages=[{"role": "user", "content": [image]}]
        )


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert model.type == "model" and model.max_input_tokens
    assert client.models.retrieve(model.id) == model


def test_strict_types_parse_every_answer(base_url: str) -> None:
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
    from anthropic.types.shared import ErrorResponse
    from pydantic import TypeAdapter

    body = {"messages": [USER], "max_tokens": 40, **GREEDY}
    event_type = TypeAdapter(RawMessageStreamEvent)
    with httpx.Client(base_url=f"{base_url}/v1", timeout=60) as http:
        for asked in (body, {**body, **CALLS}, {**body, "stop_sequences": ["e"]}):
            Message.model_validate(http.post("/messages", json=asked).json(), strict=True)
            streamed = http.post("/messages", json={**asked, "stream": True}).text
            events = [
                json.loads(part.partition("data: ")[2]) for part in streamed.split("\n\n")[:-1]
            ]
            assert events.pop(1) == {"type": "ping"}
            for event in events:
                event_type.validate_python(event, strict=True)
        counted = http.post("/messages/count_tokens", json={"messages": [USER]})
        MessageTokensCount.model_validate(counted.json(), strict=True)
        for bad in ({}, {**body, "model": "claude"}):
            ErrorResponse.model_validate(http.post("/messages", json=bad).json(), strict=True)
