"""Every answer is what the types of the `openai` client say, in strict mode: no member of another
type, no value that they do not name, none that they do not know but those listed here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from batch_fixtures import create, ended, line, served, upload
from http_fixtures import MODEL, client_of, events, make_app
from openai import BaseModel
from openai.types import (
    Batch,
    Completion,
    FileDeleted,
    FileObject,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OWN = {
    # Those of OpenAI and of Open Responses that the types lack.
    "Response": {"store", "presence_penalty", "frequency_penalty"},
    # vLLM's and SGLang's; docs/serving.md and docs/agents.md tell of them.
    "Model": {"root", "parent", "max_model_len"},
    "ChatCompletion": {"prompt_logprobs"},
    "CompletionChoice": {"prompt_logprobs"},
    "ChatCompletionMessage": {"reasoning", "reasoning_content"},
    "ChoiceDelta": {"reasoning", "reasoning_content"},
}
"""Members beyond OpenAI's, by the client's type."""
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
RESPONSE = {"model": MODEL, "input": "Hi", "max_output_tokens": 5}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2}


def check(kind: Any, value: Any) -> None:
    """Raises where the JSON value is not of the client's type, and fails for unknown members."""
    found = _adapter(kind).validate_json(json.dumps(value), strict=True)
    unknown = {(name, member) for name, member in _extras(found)}
    assert unknown <= {(name, member) for name, members in OWN.items() for member in members}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _extras(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        for member in value.model_extra or ():
            yield type(value).__name__, member
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from _extras(each)


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer())
    engine.info = dataclasses.replace(INFO, context_length=2048)
    return engine


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, USER, ChatCompletion),
        (CHAT, USER | LOGPROBS | {"prompt_logprobs": 1}, ChatCompletion),
        (CHAT, USER | {"tools": TOOLS, "n": 2}, ChatCompletion),
        (CHAT, USER | STREAM | LOGPROBS, ChatCompletionChunk),
        (CHAT, USER | STREAM | {"tools": TOOLS}, ChatCompletionChunk),
        (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 2, "echo": True}, Completion),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 2, "n": 2}, Completion),
        (COMPLETIONS, {"prompt": "a", "logprobs": 2, **STREAM}, Completion),
        (RESPONSES, RESPONSE, Response),
    ],
    ids=str,
)
async def test_answers_are_of_the_clients_types(
    engine: ScriptedEngine, path: str, body: dict[str, Any], kind: Any
) -> None:
    if "tools" in body:
        ids = engine.tokenizer.encode(f"I look.{CALL}", add_special_tokens=False)
        engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]
    async with client_of(make_app(engine)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    for value in events(answer) if body.get("stream") else [answer.json()]:
        check(kind, _with_nulls_of_completions(value) if kind is Completion else value)


def _with_nulls_of_completions(answer: dict[str, Any]) -> dict[str, Any]:
    """The type has no null where OpenAI sends one: as the reason of what goes on, and for the first
    token of a prompt.
    """
    for choice in answer["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] is not None:
            for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
                values = choice["logprobs"][name]
                choice["logprobs"][name] = [empty if each is None else each for each in values]
    return answer


async def test_events_of_a_response(engine: ScriptedEngine) -> None:
    async with client_of(make_app(engine)) as client:
        answer = await client.post(RESPONSES, json=RESPONSE | {"stream": True})
    data = [part.partition("data: ")[2] for part in answer.text.strip().split("\n\n")]
    assert data
    for event in data:
        if event != "[DONE]":
            check(ResponseStreamEvent, json.loads(event))


async def test_models(engine: ScriptedEngine) -> None:
    async with client_of(make_app(engine)) as client:
        listed = (await client.get("/v1/models")).json()
        check(Model, (await client.get(f"/v1/models/{MODEL}")).json())
    for model in listed["data"]:
        check(Model, model)


async def test_files_and_batches(engine: ScriptedEngine, tmp_path: Path) -> None:
    async with served(engine, tmp_path) as (_, client):
        for lines in ([line("a"), line("b", model="other")], b"x"):
            file_id = await upload(client, lines)
            batch = await create(client, file_id, metadata={"a": "b"})
            check(Batch, batch)
            check(Batch, await ended(client, batch["id"]))
            check(FileObject, (await client.get(f"/v1/files/{file_id}")).json())
            check(FileDeleted, (await client.delete(f"/v1/files/{file_id}")).json())
        for path, kind in (("/v1/files", FileObject), ("/v1/batches", Batch)):
            listed = (await client.get(path)).json()
            assert listed["object"] == "list" and listed["has_more"] is False and listed["data"]
            for each in listed["data"]:
                check(kind, each)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, USER | {"model": "other"}),
        (COMPLETIONS, {"prompt": "x", "temperature": 9000}),
        ("/v1/nothing", {}),
        ("/v1/batches", {}),
        ("/v1/files", {}),
    ],
)
async def test_errors(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> None:
    async with client_of(make_app(engine)) as client:
        answer = await client.post(path, json=body)
    assert 400 <= answer.status_code < 500 and list(answer.json()) == ["error"]
    check(ErrorObject, answer.json()["error"])


@pytest.mark.parametrize(
    "bent",
    [
        {"created": "now"},
        {"object": "chat"},
        {"strange": 1},
        {"choices": [{"index": 0, "finish_reason": "abort"}]},
    ],
    ids=str,
)
async def test_what_is_not_of_the_types_would_be_found(
    engine: ScriptedEngine, bent: dict[str, Any]
) -> None:
    async with client_of(make_app(engine)) as client:
        answer = (await client.post(CHAT, json=USER)).json()
    with pytest.raises((ValueError, AssertionError)):
        check(ChatCompletion, answer | bent)
