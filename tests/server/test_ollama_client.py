"""Ollama's own Python client against the application in process: its types parse every answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest
from http_fixtures import make_app
from scripted_engine import INFO, REPLY, ScriptedEngine

ollama = pytest.importorskip("ollama")
USER = {"role": "user", "content": "Hi"}
FEW = {"num_predict": 4, "temperature": 0.5}


@pytest.fixture
def client(scripted: ScriptedEngine) -> Any:
    transport = httpx.ASGITransport(make_app(scripted))
    return ollama.AsyncClient("http://test", transport=transport)


async def test_chats_and_generations(client: Any) -> None:
    whole = await client.chat("toy", [USER], options=FEW, logprobs=True, top_logprobs=1)
    parts = [part async for part in await client.chat("toy", [USER], options=FEW, stream=True)]
    assert whole.message.content == "".join([part.message.content for part in parts])
    assert REPLY.startswith(whole.message.content) and whole.logprobs[0].top_logprobs
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count == 4
    made = await client.generate("toy:latest", "Hi", options=FEW)
    assert made.response == whole.message.content and made.total_duration > 0


async def test_a_tool_loop(client: Any, scripted: ScriptedEngine) -> None:
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"rain in {city}"

    scripted.info = dataclasses.replace(INFO, context_length=2048)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    ids = scripted.tokenizer.encode(text, add_special_tokens=False)
    scripted.script.reply = lambda _: [*ids, scripted.tokenizer.eos_token_ids[0]]
    message = (await client.chat("toy", [USER], tools=[weather])).message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    await client.chat("toy", [USER, message, result], tools=[weather])
    assert "rain in Bonn" in scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)


async def test_models(client: Any) -> None:
    (listed,) = (await client.list()).models
    (running,) = (await client.ps()).models
    assert listed.model == running.model == "toy:latest" and listed.digest == running.digest
    shown = await client.show(listed.model)
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo and shown.template


async def test_errors(client: Any) -> None:
    for work, status, named in (
        (client.chat("x", [USER]), 404, "does not exist"),
        (client.chat("toy", [{**USER, "images": [b"x"]}]), 400, "images"),
        (client.pull("x"), 501, "piecework pull"),
        (client.delete("toy"), 501, "piecework pull"),
        (client.copy("a", "b"), 501, "piecework pull"),
    ):
        with pytest.raises(ollama.ResponseError, match=named) as error:
            await work
        assert error.value.status_code == status
