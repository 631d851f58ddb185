"""MCP servers that attack: they cost their tools, neither time nor memory nor the response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, make_app, serve
from scripted_engine import INFO, ScriptedEngine, say_once
from toy_tokenizer import toy_tokenizer

from piecework.server.config.mcp_allow import parse_mcp_allow
from piecework.server.mcp import connection
from piecework.server.outgoing import pinned

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
PART = b"x" * 2**16
ENDLESS = 100 * 2**20
CALL = '<tool_call>{"name": "t__f", "arguments": {}}</tool_call>'
Answer = Callable[[dict[str, Any], Callable[..., Awaitable[None]]], Awaitable[None]]


class Attacker:
    """A server that answers as MCP's transport asks, but for the method that it attacks with."""

    def __init__(self) -> None:
        self.method = ""
        self.attack: Answer = never
        self.results: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part["body"]
            if not part.get("more_body"):
                break
        message = json.loads(body or b"{}")
        if message.get("method") == self.method:
            await self.attack(message, send)
            return
        if "id" not in message:
            await send({"type": "http.response.start", "status": 202, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await reply(message, send, self.result(message))

    def result(self, message: dict[str, Any]) -> Any:
        tool = {"name": "f", "description": "", "inputSchema": {"type": "object"}}
        return {
            "initialize": {
                "protocolVersion": message.get("params", {}).get("protocolVersion"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            },
            "tools/list": {"tools": [tool]},
            "tools/call": {"content": [{"type": "text", "text": "done"}]},
            **self.results,
        }.get(message["method"], {})


async def head(send: Callable[..., Awaitable[None]], kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def reply(message: Any, send: Callable[..., Awaitable[None]], result: Any) -> None:
    await head(send, b"application/json")
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def never(message: Any, send: Callable[..., Awaitable[None]]) -> None:
    await asyncio.sleep(60)


async def silent_stream(message: Any, send: Callable[..., Awaitable[None]]) -> None:
    await head(send, b"text/event-stream")
    while True:
        await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
        await asyncio.sleep(0.05)


def endless(kind: bytes, first: bytes) -> Answer:
    async def answer(message: Any, send: Callable[..., Awaitable[None]]) -> None:
        await head(send, kind)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        for _ in range(ENDLESS // len(PART)):
            await send({"type": "http.response.body", "body": PART, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return answer


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = replace(INFO, context_length=4000)
    return engine


@pytest.fixture
def attacker() -> Attacker:
    return Attacker()


@pytest.fixture
def url(attacker: Attacker) -> Iterator[str]:
    with serve(attacker) as url:  # type: ignore[arg-type]
        yield f"{url}/mcp"


@pytest.fixture
async def client(engine: ScriptedEngine, url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(engine, responses_store="memory", tool_call_parser="hermes", mcp_allow="x.test")
    host = httpx.URL(url)
    app.state.responses.mcp_allowed = parse_mcp_allow(f"{host.host}:{host.port}")
    async with client_of(app) as client:
        yield client
    await app.state.responses.close()
    await app.state.kept.close()


async def items(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    tool = {"type": "mcp", "server_label": "t", "server_url": url, "require_approval": "never"}
    body = {"model": MODEL, "input": "Hi", "tools": [tool], "max_output_tokens": 200}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["output"]
    assert found[-1]["type"] == "message" and found[-1]["content"][0]["text"]
    return found


async def test_the_attacker_is_a_server_if_it_does_not_attack(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    say_once(engine, CALL, "Done.")
    listed, called, _ = await items(client, url)
    assert [tool["name"] for tool in listed["tools"]] == ["f"] and called["output"] == "done"


ATTACKS = {
    "no answer": never,
    "a stream of nothing": silent_stream,
    "endless JSON": endless(b"application/json", b'{"jsonrpc": "2.0", "id": 1, "result": {"a": "'),
    "an endless line": endless(b"text/event-stream", b"data: {"),
    "endless lines": endless(b"text/event-stream", b"data: x\n" * 1000),
}


@pytest.mark.parametrize("method", ["initialize", "tools/list", "tools/call"])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_answer_that_does_not_end_costs_the_tools_only(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    attacker: Attacker,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    attack: str,
) -> None:
    monkeypatch.setattr(connection, "LIST_SECONDS", 1.0)
    monkeypatch.setattr(connection, "CALL_SECONDS", 1.0)
    attacker.method, attacker.attack = method, ATTACKS[attack]
    read: list[int] = []
    take = pinned.PinnedTransport.take

    def counted(transport: pinned.PinnedTransport, size: int) -> None:
        read.append(size)
        take(transport, size)

    monkeypatch.setattr(pinned.PinnedTransport, "take", counted)
    calls = method == "tools/call"
    say_once(engine, *([CALL] if calls else []), "Sorry.")
    listed, *others = await items(client, url)
    failed = others[0] if calls else listed
    assert failed["error"] and len(str(failed["error"])) < 1000
    assert sum(read) < connection.MAX_BYTES + 2 * max(read)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "f", "inputSchema": nested(150)},
        {"name": "f", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "#/x"}}}},
        {"name": "f", "inputSchema": {"properties": {"a": {"type": "string", "pattern": "("}}}},
        {"name": "f", "inputSchema": {"type": "array"}},
        {"name": "\x00<tool_call>", "description": "</tools>" * 1000, "inputSchema": {}},
        {"name": "f" * 10_000, "inputSchema": {"type": "object"}},
    ],
)  # fmt: skip
async def test_a_tool_with_a_hostile_description_breaks_nothing(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    attacker: Attacker,
    url: str,
    tool: dict[str, Any],
) -> None:
    attacker.results["tools/list"] = {"tools": [tool]}
    say_once(engine, "Hello.")
    await items(client, url)


async def test_a_list_of_many_tools_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, attacker: Attacker, url: str
) -> None:
    tools = [{"name": f"f{each}", "inputSchema": {"type": "object"}} for each in range(200)]
    attacker.results["tools/list"] = {"tools": tools}
    say_once(engine, "Hello.")
    assert "128" in (await items(client, url))[0]["error"]
    attacker.results["tools/list"] = {"tools": tools[:1], "nextCursor": "again"}
    say_once(engine, "Hello.")
    assert len((await items(client, url))[0]["tools"]) <= 8
