"""Anthropic's `/v1/messages`: what the model is told, and what its text becomes."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import httpx
import pytest
from declared import check_answer, default_document
from http_fixtures import client_of, events, make_app
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}]"
    "{% endfor %}{{ '-' if not enable_thinking }}{{ reasoning_effort or '' }}{# </think> #}"
)


@pytest.fixture(autouse=True)
def _long_context(scripted: ScriptedEngine) -> None:
    scripted.info = dataclasses.replace(INFO, context_length=2048)


def says(engine: ScriptedEngine, text: str) -> None:
    """The engine says this, and ends."""
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]


def thinker(text: str) -> ScriptedEngine:
    """An engine whose model thinks and says this."""
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = dataclasses.replace(INFO, context_length=2048)
    says(engine, text)
    return engine


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    """An answer, held to what is declared."""
    answer = await client.post(PATH, json={"messages": [USER], "max_tokens": 200, **body})
    check_answer(default_document(), "POST", PATH, answer)
    return answer


async def told(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The message, the same streamed as whole but for its ids."""
    answer = await post(client, **body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    streamed = streamed_message(await post(client, **body, stream=True))
    assert without_ids(streamed) == without_ids(message)
    return message


def streamed_message(answer: httpx.Response) -> dict[str, Any]:
    """The message that the events of a stream add up to."""
    told = events(answer)
    message: dict[str, Any] = told[0]["message"]
    blocks, pieces = message["content"], dict[int, str]()
    for event in told[1:-1]:
        name = event["type"]
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif name == "content_block_delta":
            index, (kind, value) = event["index"], list(event["delta"].items())[1]
            if kind == "partial_json":
                pieces[index] = pieces.get(index, "") + value
            else:
                blocks[index][kind] += value
        elif name == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for index, text in pieces.items():
        blocks[index]["input"] = json.loads(text)
    assert told[-1] == {"type": "message_stop"}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": None} for block in message["content"]]
    return {**message, "id": None, "content": content}


async def test_a_message(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    says(scripted, "Hello")
    message = await told(
        client,
        system=[{"type": "text", "text": "Be kind."}],
        temperature=0.5,
        top_k=7,
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    assert message["content"] == [{"type": "text", "text": "Hello", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    request = scripted.requests[0]
    assert (request.params.temperature, request.params.top_k) == (0.5, 7)
    prompt = scripted.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert "system\nBe kind." in prompt and prompt.endswith("assistant\n")
    usage, tokens = message["usage"], len(request.prompt_ids)
    assert usage["cache_read_input_tokens"] == tokens // 2
    assert usage["input_tokens"] == tokens - tokens // 2
    assert usage["output_tokens"] == len(request.output_ids)


async def test_why_it_stops(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    cut = await told(client, max_tokens=2)
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 2
    stopped = await told(client, stop_sequences=["friend"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "friend")
    assert stopped["content"][0]["text"] == "Hello there, old "


async def test_max_tokens_beyond_the_context(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    message = await told(client, max_tokens=100_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 2048 - len(scripted.requests[0].prompt_ids)


async def test_tool_use(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    says(scripted, "I look.\n" + CALL + "\n" + CALL.replace("Bonn", "Köln"))
    message = await told(client, tools=[WEATHER])
    text, bonn, köln = message["content"]
    assert text == {"type": "text", "text": "I look.", "citations": None}
    assert [(call["name"], call["input"]) for call in (bonn, köln)] == [
        ("weather", {"city": "Bonn"}),
        ("weather", {"city": "Köln"}),
    ]
    assert bonn["id"] != köln["id"]
    assert message["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_off(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    says(scripted, CALL)
    count = len(scripted.tokenizer.encode(CALL.partition(": {")[0], add_special_tokens=False))
    message = (await post(client, tools=[WEATHER], max_tokens=count + 4)).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


async def test_tool_choices(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    other = {**WEATHER, "name": "other"}
    for choice in (
        {"type": "none"},
        {"type": "auto"},
        {"type": "any"},
        {"type": "tool", "name": "other"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        await post(client, tools=[WEATHER, other], tool_choice=choice, max_tokens=1)
    none, auto, any_, tool, single = (one.params.grammar or "" for one in scripted.requests)
    assert none == "" and "TEXT" in auto and "TEXT" not in any_
    assert "weather" in any_ and "weather" not in tool and "other" in tool
    assert single != any_


async def test_results_of_tools_are_messages_of_their_own() -> None:
    engine = thinker("So.")
    calls = [{"type": "tool_use", "id": f"toolu_{i}", "name": "weather", "input": {}} for i in "12"]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_2",
            "content": [{"type": "text", "text": "no city"}],
            "is_error": True,
        },
    ]
    thoughts = [
        {"type": "thinking", "thinking": "Hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
    ]
    messages = [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "you"}]},
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Let"}, *calls]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    async with client_of(make_app(engine)) as client:
        await post(client, messages=messages, tools=[WEATHER])
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
    said = prompt.partition("[user|")[2]
    assert said.startswith("|Hi\nyou][assistant|Hm|Let\n<tool_call>")
    assert "\nrain\n" in said and "\nError: no city\n" in said and "|And?]" in said


async def test_a_begun_answer_goes_on(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    await post(client, messages=[USER, {"role": "assistant", "content": "Well,"}], max_tokens=1)
    prompt = scripted.tokenizer.decode(scripted.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("assistant\nWell,")


async def test_thoughts_are_blocks_of_their_own() -> None:
    async with client_of(make_app(thinker("<think>Hm.</think>Yes."))) as client:
        message = await told(client, thinking={"type": "enabled", "budget_tokens": 100})
    thought, text = message["content"]
    assert (thought["thinking"], text["text"]) == ("Hm.", "Yes.")
    assert thought["signature"] and message["usage"]["output_tokens_details"]["thinking_tokens"]


async def test_a_budget_bounds_the_thought() -> None:
    engine = thinker("<think>Hm.</think>Yes.")
    async with client_of(make_app(engine)) as client:
        await post(client, thinking={"type": "enabled", "budget_tokens": 7})
        await post(client, thinking={"type": "adaptive"})
    bounded, free = (request.params.thinking_budget for request in engine.requests)
    assert (bounded, free) == (7, None)


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, "-"),
        ({"thinking": {"type": "disabled"}}, "-"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
    ],
)
async def test_the_template_hears_whether_to_think(body: dict[str, Any], end: str) -> None:
    engine = thinker("Yes.")
    async with client_of(make_app(engine)) as client:
        await post(client, **body)
    assert engine.tokenizer.decode(engine.requests[0].prompt_ids).endswith(f"[user||Hi]{end}")


@pytest.mark.parametrize("place", ["output_format", "output_config"])
async def test_an_answer_of_a_schema(
    client: httpx.AsyncClient, scripted: ScriptedEngine, place: str
) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "required": ["zebra"]}}
    await post(client, max_tokens=1, **{place: {"format": form, **form}})
    assert "zebra" in (scripted.requests[0].params.grammar or "")


async def test_models_as_anthropics_clients_list_them(client: httpx.AsyncClient) -> None:
    document = default_document()
    headers = {"anthropic-version": "2023-06-01"}
    listed = await client.get("/v1/models", headers=headers)
    check_answer(document, "GET", "/v1/models", listed)
    (model,) = listed.json()["data"]
    one = await client.get("/v1/models/toy", headers=headers)
    check_answer(document, "GET", "/v1/models/{model_id}", one)
    assert one.json() == model and model["type"] == "model"
    missing = await client.get("/v1/models/nobody", headers=headers)
    check_answer(document, "GET", "/v1/models/{model_id}", missing)
    assert missing.status_code == 404 and missing.json()["type"] == "error"
    assert missing.json()["error"]["type"] == "not_found_error"
    assert missing.json()["request_id"] == missing.headers["request-id"]


async def test_tokens_are_counted_as_they_would_be_told(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    body = {"messages": [USER], "system": "Be kind.", "tools": [WEATHER], "model": "toy"}
    counted = await client.post(f"{PATH}/count_tokens", json=body)
    await post(client, **body)
    assert counted.json() == {"input_tokens": len(scripted.requests[0].prompt_ids)}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ],
)
async def test_a_tool_of_a_server_is_left_out_with_a_line_in_the_log(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    tool: dict[str, Any],
) -> None:
    caplog.set_level(logging.INFO)
    says(scripted, "Hi")
    answer = await post(client, tools=[WEATHER, tool])
    assert answer.status_code == 200, answer.text
    prompt = scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)
    assert "weather" in prompt and tool["type"] not in prompt
    assert [tool["type"] in line for line in caplog.messages if "left out" in line] == [True]
    assert (await post(client, tools=[tool])).status_code == 200
    assert (await post(client, tools=[{**tool, "type": "custum"}])).status_code == 400


async def test_what_a_model_cannot_read_in_a_result_is_told(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, "Hi")
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [
        {"type": "text", "text": "seen"},
        {"type": "image", "source": image},
        {"type": "tool_reference", "tool_name": "other"},
    ]
    searched = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                searched,
                {"type": "tool_use", "id": "a", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks}],
        },
    ]
    answer = await post(client, messages=messages, tools=[WEATHER])
    assert answer.status_code == 200, answer.text
    prompt = scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)
    assert "seen" in prompt and "image" in prompt and "other" in prompt and "AAAA" not in prompt
    shown = [{"role": "user", "content": [{"type": "image", "source": image}]}]
    assert (await post(client, messages=shown)).status_code == 400
