"""LiteLLM, by OpenAI's API, by vLLM's and by Anthropic's."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
from client_tasks import QUESTION, WEATHER_SCHEMA, City, weather

# Else it asks a site for prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.slow
USER = {"role": "user", "content": QUESTION}
TOOL = {
    "type": "function",
    # It takes `additionalProperties` out of what it is given, in place.
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": copy.deepcopy(WEATHER_SCHEMA),
    },
}


@pytest.fixture(scope="module", params=["openai", "hosted_vllm", "anthropic"])
def ask(request: pytest.FixtureRequest, base_url: str) -> Any:
    place = base_url if request.param == "anthropic" else f"{base_url}/v1"
    return partial(
        litellm.completion,
        model=f"{request.param}/default",
        api_base=place,
        api_key="none",
        temperature=0,
        max_tokens=60,
    )


def test_a_chat(ask: Any) -> None:
    assert ask(messages=[USER]).choices[0].message.content


def test_a_stream(ask: Any) -> None:
    chunks = list(ask(messages=[USER], stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 3
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens


def test_a_tool_loop(ask: Any) -> None:
    called = ask(messages=[USER], tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = called.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Bonn")}
    messages = [USER, message, result]
    assert ask(messages=messages, tools=[TOOL], tool_choice="none").choices[0].message.content


def test_a_pydantic_model(ask: Any) -> None:
    answer = ask(messages=[USER], response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content)
