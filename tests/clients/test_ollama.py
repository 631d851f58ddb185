"""Ollama's own Python client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from client_tasks import QUESTION, WEATHER_SCHEMA, City

ollama = pytest.importorskip("ollama")
pytestmark = pytest.mark.slow
USER = {"role": "user", "content": QUESTION}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    yield ollama.Client(base_url)


def test_a_chat_a_stream_and_a_generation_are_the_same_text(client: Any) -> None:
    whole = client.chat("default", [USER], options=GREEDY)
    parts = list(client.chat("default", [USER], options=GREEDY, stream=True))
    assert whole.message.content == "".join([part.message.content for part in parts])
    assert client.generate("default", QUESTION, options=GREEDY).response == whole.message.content
    assert whole.done_reason == "length" and whole.eval_count == parts[-1].eval_count == 8
    assert 0 < whole.prompt_eval_duration + whole.eval_duration <= whole.total_duration


def test_a_format_and_a_tool(client: Any) -> None:
    options = {**GREEDY, "num_predict": 60}
    answer = client.chat("default", [USER], format=City.model_json_schema(), options=options)
    assert City.model_validate_json(answer.message.content)
    assert client.chat("default", [USER], tools=[TOOL], options=options).done


def test_models(client: Any) -> None:
    (listed,) = client.list().models
    assert client.show(listed.model).modelinfo and client.ps().models[0].model == listed.model
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat("llama3.2", [USER])
