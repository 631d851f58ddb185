"""Tools through `/v1/chat/completions`: what the model is told, what its text becomes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest
from http_fixtures import error_of
from openai.types.chat import ChatCompletionToolParam
from scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _long_context(scripted: ScriptedEngine) -> None:
    assert scripted.info is not None
    scripted.info = dataclasses.replace(scripted.info, context_length=2048)


def says(engine: ScriptedEngine, text: str) -> None:
    """The engine says this, and ends."""
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    sent = {"messages": [USER], "tools": [WEATHER], "max_tokens": 100, **body}
    answer = await client.post(PATH, json=sent)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def test_a_call(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    says(scripted, "I look.\n" + CALL)
    choice = await chat(client)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "weather", "arguments": '{"city": "Bonn"}'},
    )
    prompt = scripted.tokenizer.decode(scripted.requests[0].prompt_ids)
    assert '"name": "weather"' in prompt and "of a city" in prompt


async def test_a_call_alone_has_no_content(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, CALL)
    assert (await chat(client))["message"]["content"] is None


async def test_no_call(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    says(scripted, "No tool.")
    choice = await chat(client)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "No tool.")
    assert "tool_calls" not in choice["message"]


async def test_a_call_that_is_cut_off_is_incomplete(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, CALL)
    count = len(scripted.tokenizer.encode(CALL.partition("Bonn")[0], add_special_tokens=False))
    choice = await chat(client, max_tokens=count)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert call["function"]["arguments"].startswith('{"city":')


async def test_choices(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for choice in (
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "other"}},
    ):
        await chat(client, tools=[WEATHER, other], tool_choice=choice)
    none, auto, required, named = scripted.requests
    assert none.params.grammar is None
    assert "weather" not in scripted.tokenizer.decode(none.prompt_ids)
    assert "TEXT" in (auto.params.grammar or "") and "TEXT" not in (required.params.grammar or "")
    assert "weather" in (required.params.grammar or "")
    assert "weather" not in (named.params.grammar or "")
    assert "weather" in scripted.tokenizer.decode(named.prompt_ids)


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_strict_belongs_to_each_function(
    client: httpx.AsyncClient, scripted: ScriptedEngine, choice: str
) -> None:
    whole = function("whole", {"x": {"type": "integer"}}, strict=True)
    odd = {"metadata": RECORD, "tags": {"type": "array", "uniqueItems": True}}
    await chat(client, tools=[whole, function("odd", odd)], tool_choice=choice)
    grammar = scripted.requests[0].params.grammar or ""
    assert "whole" in grammar and "metadata" in grammar and "uniqueItems" not in grammar
    for keyword, member in (("propertyNames", "metadata"), ("uniqueItems", "tags")):
        strict = function("odd", {member: odd[member]}, strict=True)
        body = {"messages": [USER], "tools": [whole, strict], "tool_choice": choice}
        error = error_of(await client.post(PATH, json=body), 400, "tools")
        assert error["code"] == "invalid_grammar"
        assert "'odd'" in error["message"] and f'"{keyword}"' in error["message"]
        assert "start:" not in error["message"] and "llguidance" not in error["message"]


async def test_a_schema_that_no_text_satisfies_is_any_object_if_it_is_not_strict(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    wrong = {"x": {"allOf": [{"type": "string"}, {"type": "integer"}]}}
    needed = {"type": "object", "properties": wrong, "required": ["x"]}
    await chat(client, tools=[WEATHER, function("odd", wrong, parameters=needed)])
    assert "city" in (scripted.requests[0].params.grammar or "")
    strict = function("odd", wrong, parameters=needed, strict=True)
    body = {"messages": [USER], "tools": [WEATHER, strict]}
    assert "'odd'" in error_of(await client.post(PATH, json=body), 400, "tools")["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_head_that_is_cut_off_is_no_text(
    client: httpx.AsyncClient, scripted: ScriptedEngine, stream: bool
) -> None:
    says(scripted, f"I look.\n{CALL}")
    tokens = scripted.tokenizer.encode(f"I look.\n{CALL}", add_special_tokens=False)
    head = len(scripted.tokenizer.encode("I look.\n" + CALL[:40], add_special_tokens=False))
    for count in range(1, min(head, len(tokens))):
        body = {"messages": [USER], "tools": [WEATHER], "max_tokens": count, "stream": stream}
        answer = (await client.post(PATH, json=body)).text
        said = "I look.".startswith
        if stream:
            events = [json.loads(line[6:]) for line in answer.split("\n\n") if "{" in line]
            parts = [each["choices"][0]["delta"].get("content") or "" for each in events]
            assert said("".join(parts).rstrip()), count
        else:
            content = json.loads(answer)["choices"][0]["message"]["content"]
            assert said((content or "").rstrip()), count


@pytest.mark.parametrize("kind", ["string", ["object", "null"], None])
async def test_arguments_are_an_object(
    client: httpx.AsyncClient, scripted: ScriptedEngine, kind: Any
) -> None:
    """What is no object would be no call."""
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"type": kind}}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    error_of(await client.post(PATH, json=body), 400, "tools[0].function.parameters")
    tool["function"]["parameters"] = {}  # type: ignore[index]
    await chat(client, tools=[tool], tool_choice="required")
    assert '"additionalProperties": false' in (scripted.requests[0].params.grammar or "")


async def test_tools_beside_a_form_of_the_text(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "required": ["zebra"]}},
    }
    await chat(client, response_format=form)
    grammar = scripted.requests[0].params.grammar or ""
    assert "zebra" in grammar and "weather" in grammar and "TEXT" not in grammar
    answer = await client.post(PATH, json={"messages": [USER], "tools": [WEATHER], "regex": "a+"})
    error_of(answer, 400, "tools")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "missing"}},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
async def test_bad_tools(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    error_of(await client.post(PATH, json={"messages": [USER], **body}), 400, param)


def test_calls_streamed_to_the_openai_client(url: str, scripted: ScriptedEngine) -> None:
    says(scripted, "So.\n" + CALL + "\n" + CALL.replace("Bonn", "Köln"))
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[WEATHER],
            max_tokens=200,
        ) as stream,
    ):
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    calls = [call.function for call in choice.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", '{"city": "Bonn"}'),
        ("weather", '{"city": "Köln"}'),
    ]
    ids = {call.id for call in choice.message.tool_calls or []}
    assert len(ids) == 2
