"""Chat completions that are stored, listed, changed and deleted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app, serve
from openai.types.chat import ChatCompletion
from scripted_engine import INFO, ScriptedEngine, say_once
from toy_tokenizer import toy_tokenizer

from piecework.server.config.keys import hash_of
from piecework.server.openai.stored import database

PATH = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer())


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(engine, responses_store="memory")
    async with client_of(app) as client:
        yield client
    await app.state.kept.close()


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    asked = {"messages": HI, "max_tokens": 2, "store": True, **body}
    answer = await client.post(PATH, json=asked)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_a_stored_completion_is_returned_as_it_was(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "Kind."}, {"role": "user", "content": parts}]
    told = await chat(client, messages=messages, metadata={"a": "b"}, service_tier="flex")
    assert told["metadata"] == {"a": "b"} and told["service_tier"] == "default"
    ChatCompletion.model_validate(told)
    assert (await client.get(f"{PATH}/{told['id']}")).json() == told
    shown = (await client.get(f"{PATH}/{told['id']}/messages")).json()["data"]
    assert shown[0] == {
        "id": f"{told['id']}-0", "role": "system", "content": "Kind.", "content_parts": None
    }  # fmt: skip
    assert shown[1]["content_parts"] == parts
    # The server accepts its own messages.
    again = [{"role": one["role"], "content": one["content"]} for one in shown]
    await chat(client, messages=[*again, told["choices"][0]["message"]])


async def test_only_what_asks_for_it_is_stored(client: httpx.AsyncClient) -> None:
    told = await chat(client, store=False, metadata={"a": "b"})
    assert "metadata" not in told and "service_tier" not in told
    error_of(await client.get(f"{PATH}/{told['id']}"), 404, "completion_id")
    response = await client.post("/v1/responses", json={"model": MODEL, "input": "Hi"})
    error_of(await client.get(f"{PATH}/{response.json()['id']}"), 404, "completion_id")
    assert (await client.get(PATH)).json()["data"] == []


def test_openais_client_manages_stored_completions(engine: ScriptedEngine) -> None:
    with (
        serve(make_app(engine, responses_store="memory")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        chats = client.chat.completions
        made = [
            chats.create(
                model=MODEL, messages=HI, max_tokens=2, store=True, metadata={"n": str(number)}
            )
            for number in range(5)
        ]
        ids = [one.id for one in made]
        assert [one.id for one in chats.list(limit=2)] == ids
        assert [one.id for one in chats.list(order="desc")] == ids[::-1]
        assert [one.id for one in chats.list(metadata={"n": "3"})] == ids[3:4]
        assert list(chats.list(model="other")) == []
        assert chats.update(ids[1], metadata={"n": "3"}).id == ids[1]
        assert [one.id for one in chats.list(metadata={"n": "3"})] == [ids[1], ids[3]]
        assert [one.content for one in chats.messages.list(ids[0])] == ["Hi"]
        assert chats.delete(ids[0]).deleted
        with pytest.raises(openai.NotFoundError, match="store true"):
            chats.retrieve(ids[0])
        stream = chats.create(model=MODEL, messages=HI, max_tokens=4, store=True, stream=True)
        chunks = list(stream)
        text = "".join(one.choices[0].delta.content or "" for one in chunks)
        kept = chats.retrieve(chunks[0].id)
        assert kept.choices[0].message.content == text
        assert kept.choices[0].finish_reason == "length" and kept.usage is not None
        assert kept.usage.completion_tokens == 4


async def test_a_stored_stream_keeps_the_ids_of_its_calls(engine: ScriptedEngine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    say_once(engine, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    engine.info = replace(INFO, context_length=2048)
    app = make_app(engine, responses_store="memory", tool_call_parser="hermes")
    async with client_of(app) as client:
        body = {"messages": HI, "store": True, "stream": True, "tools": [tool]}
        lines = (await client.post(PATH, json=body)).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ids = [
            call["id"]
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls", [])
            if "id" in call
        ]
        kept = (await client.get(f"{PATH}/{chunks[0]['id']}")).json()
        assert [call["id"] for call in kept["choices"][0]["message"]["tool_calls"]] == ids != []
    await app.state.kept.close()


@pytest.mark.parametrize(
    ("method", "path", "more", "param"),
    [
        ("POST", "", {"json": {"messages": HI, "store": "yes"}}, "store"),
        ("POST", "", {"json": {"messages": HI, "metadata": {"a": []}}}, "metadata.a"),
        ("POST", "", {"json": {"messages": HI, "service_tier": "first"}}, "service_tier"),
        ("POST", "/ID", {"json": {}}, "metadata"),
        ("GET", "?limit=0", {}, "limit"),
        ("GET", "?limit=101", {}, "limit"),
        ("GET", "?order=up", {}, "order"),
        ("GET", "?after=x", {}, "after"),
        ("GET", "/ID/messages?after=x", {}, "after"),
    ],
)
async def test_bad_requests_name_their_parameter(
    client: httpx.AsyncClient, method: str, path: str, more: Any, param: str
) -> None:
    told = await chat(client)
    answer = await client.request(method, PATH + path.replace("ID", told["id"]), **more)
    error_of(answer, 404 if param == "after" else 400, param)


async def test_a_list_has_only_the_completions_of_its_key(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "keys.jsonl"
    entries = [{"name": name, "sha256": hash_of(name.encode())} for name in "ab"]
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    app = make_app(engine, responses_store="memory", api_keys=str(file))
    async with client_of(app) as client:
        heads = [{"Authorization": f"Bearer {name}"} for name in "ab"]
        body = {"messages": HI, "max_tokens": 2, "store": True}
        told = [(await client.post(PATH, json=body, headers=head)).json() for head in heads]
        for head, one in zip(heads, told, strict=True):
            listed = (await client.get(PATH, headers=head)).json()["data"]
            assert [each["id"] for each in listed] == [one["id"]]
        own = f"{PATH}/{told[0]['id']}"
        for method, path in (("GET", ""), ("GET", "/messages"), ("POST", ""), ("DELETE", "")):
            body = {"metadata": {}} if method == "POST" else None
            other = await client.request(method, own + path, json=body, headers=heads[1])
            error_of(other, 404, "completion_id")
        assert (await client.get(own, headers=heads[0])).status_code == 200
    await app.state.kept.close()


async def test_a_list_is_bounded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(await chat(client))["id"] for _ in range(4)]
    monkeypatch.setattr(database, "MAX_READ", 11_000)
    listed = (await client.get(PATH)).json()["data"]
    assert [one["id"] for one in listed] == ids[2:]


async def test_a_server_without_a_store_answers_and_stores_nothing(
    engine: ScriptedEngine,
) -> None:
    async with client_of(make_app(engine, responses_store="off")) as client:
        told = await chat(client)
        error_of(await client.get(f"{PATH}/{told['id']}"), 404, "completion_id")
        assert (await client.get(PATH)).json()["data"] == []
