"""Conversations that the server stores, and conversations that the model makes shorter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app, serve
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import Response, ResponseCompactionItem, ResponseUsage
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.server.openai.responses import conversation_store
from piecework.server.openai.responses.summary import pack_summary

PATH = "/v1/conversations"
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(engine, responses_store="memory")
    async with client_of(app) as client:
        yield client
    await app.state.responses.close()
    await app.state.kept.close()


async def respond(client: httpx.AsyncClient, text: Any, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": text, "max_output_tokens": 2, **body}
    answer = await client.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    told: dict[str, Any] = answer.json()
    return told


async def items_of(client: httpx.AsyncClient, conversation_id: str) -> list[dict[str, Any]]:
    answer = await client.get(f"{PATH}/{conversation_id}/items", params={"order": "asc"})
    found: list[dict[str, Any]] = answer.json()["data"]
    if found:
        ConversationItemList.model_validate(answer.json())
    return found


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def said(item: dict[str, Any]) -> str:
    text: str = item["content"][0]["text"]
    return text


@pytest.mark.parametrize("way", ["plain", "stream", "background", "not stored"])
async def test_responses_continue_a_conversation(
    client: httpx.AsyncClient, engine: ScriptedEngine, way: str
) -> None:
    created = (await client.post(PATH, json={"metadata": {"a": "b"}})).json()
    Conversation.model_validate(created)
    asked = {"conversation": created["id"], "store": way != "not stored"}
    if way == "stream":
        body = {"model": MODEL, "input": "One", "max_output_tokens": 2, "stream": True, **asked}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    else:
        first = await respond(client, "One", background=way == "background", **asked)
        assert first["conversation"] == {"id": created["id"]}
    for _ in range(200):
        if len(known := await items_of(client, created["id"])) == 2:
            break
        await asyncio.sleep(0.01)
    assert [item["role"] for item in known] == ["user", "assistant"]
    await respond(client, "Two", conversation={"id": created["id"]})
    assert prompt(engine) == f"[One][{said(known[1])}][Two]"
    assert len(await items_of(client, created["id"])) == 4


def test_openais_client_manages_conversations(engine: ScriptedEngine) -> None:
    with (
        serve(make_app(engine, responses_store="memory")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        bare = client.conversations.create()
        assert bare.metadata == {}
        made = client.conversations.create(
            items=[{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}],
            metadata={"topic": "x"},
        )
        assert client.conversations.retrieve(made.id) == made
        added = client.conversations.items.create(
            made.id, items=[{"role": "user", "content": f"No {number}"} for number in range(3)]
        )
        assert [item.type for item in added.data] == ["message"] * 3
        listed = list(client.conversations.items.list(made.id, limit=2, order="asc"))
        assert len(listed) == 5 and listed[2:] == added.data
        assert list(client.conversations.items.list(made.id)) == listed[::-1]
        one = client.conversations.items.retrieve(str(listed[0].id), conversation_id=made.id)
        assert one == listed[0]
        left = client.conversations.items.delete(str(listed[0].id), conversation_id=made.id)
        assert left.id == made.id and len(list(client.conversations.items.list(made.id))) == 4
        with pytest.raises(openai.NotFoundError, match="has no item"):
            client.conversations.items.retrieve(str(listed[0].id), conversation_id=made.id)
        assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {
            "topic": "y"
        }
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError, match="no stored conversation"):
            client.conversations.retrieve(made.id)
        assert client.conversations.retrieve(bare.id) == bare


async def test_a_conversation_takes_back_its_own_items(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    created = (await client.post(PATH)).json()
    await respond(client, "One", conversation=created["id"])
    known = await items_of(client, created["id"])
    again = await client.post(f"{PATH}/{created['id']}/items", json={"items": known})
    added = again.json()["data"]
    assert [said(item) for item in added] == [said(item) for item in known]
    assert not {item["id"] for item in added} & {item["id"] for item in known}
    reference = [{"type": "item_reference", "id": known[0]["id"]}]
    copied = await client.post(PATH, json={"items": reference})
    assert said((await items_of(client, copied.json()["id"]))[0]) == "One"
    await respond(client, [{"id": added[0]["id"]}], conversation=created["id"])
    assert prompt(engine).endswith("[One]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": "Hi"}, "items"),
        ("", {"items": [{"role": "king", "content": "x"}]}, "items[0].role"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ("/ID", {}, "metadata"),
        ("/ID/items", {"items": []}, "items"),
        ("/ID/items", {}, "items"),
    ],
)
async def test_bad_conversations_are_refused(
    client: httpx.AsyncClient, path: str, body: Any, param: str
) -> None:
    created = (await client.post(PATH)).json()
    answer = await client.post(PATH + path.replace("ID", created["id"]), json=body)
    error_of(answer, 404 if "item_reference" in str(body) else 400, param)


async def test_ids_reach_no_other_kind_of_row(client: httpx.AsyncClient) -> None:
    response = await respond(client, "Hi")
    created = (await client.post(PATH)).json()
    for wrong in (response["id"], "conv_1", "%", "' OR 1=1 --", "x" * 4000):
        error_of(await client.get(f"{PATH}/{wrong}"), 404, "conversation_id")
        error_of(await client.delete(f"{PATH}/{wrong}"), 404, "conversation_id")
        asked = {"model": MODEL, "input": "Hi", "conversation": wrong}
        error_of(await client.post("/v1/responses", json=asked), 404, "conversation")
    error_of(await client.get(f"/v1/responses/{created['id']}"), 404, "response_id")
    error_of(await client.delete(f"/v1/responses/{created['id']}"), 404, "response_id")
    assert (await client.get(f"{PATH}/{created['id']}")).status_code == 200
    assert (await client.get(f"/v1/responses/{response['id']}")).status_code == 200
    asked = {"previous_response_id": response["id"], "conversation": created["id"]}
    body = {"model": MODEL, "input": "Hi", **asked}
    error_of(await client.post("/v1/responses", json=body), 400, "conversation")


async def test_a_conversation_is_bounded(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = (await client.post(PATH)).json()
    engine.info = replace(INFO, context_length=4000)
    monkeypatch.setattr(conversation_store, "MAX_READ", 1000)
    long = {"items": [{"role": "user", "content": "x" * 2000}]}
    error_of(await client.post(f"{PATH}/{created['id']}/items", json=long), 400, "items")
    assert await items_of(client, created["id"]) == []
    # A response is answered even if its items do not fit.
    long_enough = await respond(client, "Hi " * 200, conversation=created["id"])
    await respond(client, "Hi " * 200, conversation=created["id"])
    assert long_enough["status"] == "incomplete"
    assert len(await items_of(client, created["id"])) == 2


async def test_a_running_background_response_locks_its_conversation(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    created = (await client.post(PATH)).json()
    engine.script.held = True
    told = await respond(client, "One", conversation=created["id"], background=True)
    asked = {"model": MODEL, "input": "Two", "conversation": created["id"]}
    error = error_of(await client.post("/v1/responses", json=asked), 400, "conversation")
    assert error["code"] == "conversation_locked"
    await client.post(f"/v1/responses/{told['id']}/cancel")
    assert await items_of(client, created["id"]) == []


async def test_a_server_without_a_store_has_no_conversations(engine: ScriptedEngine) -> None:
    async with client_of(make_app(engine, responses_store="off")) as client:
        for answer in (await client.post(PATH), await client.get(f"{PATH}/conv_1")):
            assert "--responses-store" in error_of(answer, 400)["message"]
        asked = {"model": MODEL, "input": "Hi", "conversation": "conv_1"}
        error_of(await client.post("/v1/responses", json=asked), 400, "conversation")


async def test_a_compacted_conversation_goes_on(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.info = replace(INFO, context_length=2048)
    first = await respond(client, "One", instructions="Kind.")
    asked = {"model": MODEL, "input": "Two", "previous_response_id": first["id"]}
    answer = await client.post("/v1/responses/compact", json=asked)
    assert answer.status_code == 200, answer.text
    assert "[One]" in prompt(engine) and "Summarise this conversation" in prompt(engine)
    ResponseUsage.model_validate(answer.json()["usage"])
    *users, item = answer.json()["output"]
    ResponseCompactionItem.model_validate(item)
    assert [said(user) for user in users] == ["One", "Two"]
    await respond(client, [*answer.json()["output"], {"role": "user", "content": "Three"}])
    assert prompt(engine).startswith("[One][Two][Summary of the conversation so far:\n")
    assert prompt(engine).endswith("][Three]")
    # It can be compacted again, stored in a conversation and named there.
    again = {"model": MODEL, "input": answer.json()["output"]}
    assert (await client.post("/v1/responses/compact", json=again)).status_code == 200
    kept = await client.post(PATH, json={"items": answer.json()["output"]})
    assert (await items_of(client, kept.json()["id"]))[-1]["type"] == "compaction"


async def test_a_conversation_that_does_not_fit_is_compacted(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    turns = [{"role": "user", "content": f"{number} " + "word " * 40} for number in range(60)]
    asked = {"model": MODEL, "input": turns}
    error_of(await client.post("/v1/responses", json=asked), 400, "input")
    answer = await client.post("/v1/responses/compact", json=asked)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["output"]) == 61


@pytest.mark.parametrize(
    "content", ["gAAAA", "", "piecework-summary-1.%%", pack_summary("x") + "!", 1]
)
async def test_compactions_of_other_servers_are_refused(
    client: httpx.AsyncClient, content: Any
) -> None:
    items = [{"type": "compaction", "encrypted_content": content}]
    answer = await client.post("/v1/responses", json={"model": MODEL, "input": items})
    param = "input[0]" + (".encrypted_content" if content == 1 else "")
    error_of(answer, 400, param)
    error_of(await client.post("/v1/responses/compact", json={"input": "Hi"}), 400, "model")
    error_of(await client.post("/v1/responses/compact", json={"model": "other"}), 404, "model")


async def test_moderation_is_refused_in_so_many_words(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/v1/moderations", json={"input": "x"}), 501)
    assert "no moderation model" in error["message"]
