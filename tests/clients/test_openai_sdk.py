"""OpenAI's own client, by its helpers for tools and Pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from client_tasks import QUESTION, WEATHER_SCHEMA, City, weather

pytestmark = pytest.mark.slow
USER = {"role": "user", "content": QUESTION}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": WEATHER_SCHEMA},
}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(client: Any, streamed: bool) -> None:
    asked = {"model": "default", "max_tokens": 60, "temperature": 0, "tools": [TOOL]}
    call = {"messages": [USER], "tool_choice": "required", "parallel_tool_calls": False}
    if streamed:
        with client.chat.completions.stream(**asked, **call) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**asked, **call).choices[0].message
    (called,) = message.tool_calls
    told = weather(**called.function.parsed_arguments)
    result = {"role": "tool", "tool_call_id": called.id, "content": told}
    answer = client.chat.completions.create(
        **asked, messages=[USER, message, result], tool_choice="none"
    )
    assert answer.choices[0].message.content


def test_a_pydantic_model(client: Any) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=[USER], max_tokens=60, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model="default", messages=[USER], max_tokens=60, response_format=City
    ) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.done"]
    assert isinstance(parsed[0], City)
