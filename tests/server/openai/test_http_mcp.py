"""Tools of MCP servers in responses, with a real server of the SDK on loopback."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import httpx2
import openai
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app, serve
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter
from scripted_engine import INFO, ScriptedEngine, prompt_of, say_once
from toy_tokenizer import toy_tokenizer

from piecework.server.config.mcp_allow import parse_mcp_allow
from piecework.server.mcp import connection
from piecework.server.openai.responses import mcp_loop
from piecework.server.outgoing import pinned

PATH = "/v1/responses"
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
CALLED: list[str] = []


def tools() -> MCPServer:
    server = MCPServer("test")

    @server.tool(annotations=ToolAnnotations(readOnlyHint=True))
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        CALLED.append("add")
        return str(a + b)

    @server.tool()
    async def fail() -> str:
        """Fail."""
        raise ValueError("it is broken")

    @server.tool()
    async def wait() -> str:
        """Wait for ever."""
        await asyncio.sleep(30)
        return "x"

    @server.tool()
    async def large() -> str:
        """Return a large text."""
        return "x" * 50_000

    return server


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with serve(tools().streamable_http_app()) as url:
        yield f"{url}/mcp"


@pytest.fixture
def engine() -> ScriptedEngine:
    CALLED.clear()
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = replace(INFO, context_length=4000)
    return engine


@pytest.fixture
def app(engine: ScriptedEngine, server_url: str) -> Any:
    host = httpx.URL(server_url)
    return make_app(
        engine,
        responses_store="memory",
        tool_call_parser="hermes",
        mcp_allow=f"{host.host}:{host.port}",
    )


@pytest.fixture
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client
    await app.state.responses.close()
    await app.state.kept.close()


def call(name: str, **arguments: Any) -> str:
    inner = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "t__{name}", "arguments": {{{inner}}}}}</tool_call>'


def asked(url: str, **more: Any) -> dict[str, Any]:
    tool = {"type": "mcp", "server_label": "t", "server_url": url, "require_approval": "never"}
    tool |= more.pop("tool", {})
    return {"model": MODEL, "input": "Hi", "tools": [tool], "max_output_tokens": 300, **more}


async def respond(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    for item in told["output"]:
        TypeAdapter(ResponseOutputItem).validate_python(item)
    return told


def kinds(told: dict[str, Any]) -> list[str]:
    return [item["type"] for item in told["output"]]


async def test_the_model_calls_a_tool_and_reads_its_result(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str
) -> None:
    say_once(engine, call("add", a=1, b=2), "It is 3.")
    told = await respond(client, asked(server_url))
    assert kinds(told) == ["mcp_list_tools", "mcp_call", "message"]
    listed, called, message = told["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["add", "fail", "wait", "large"]
    assert (called["output"], called["error"], called["status"]) == ("3", None, "completed")
    assert message["content"][0]["text"] == "It is 3." and told["status"] == "completed"
    assert "\n3\n" in prompt_of(engine) and len(engine.requests) == 2
    used = [len(request.prompt_ids) for request in engine.requests]
    assert told["usage"]["input_tokens"] == sum(used)
    # The server accepts its own output, and lists the tools only once.
    say_once(engine, "Yes.")
    again = asked(server_url, previous_response_id=told["id"])
    assert kinds(await respond(client, again)) == ["message"]
    assert "\n3\n" in prompt_of(engine)
    sent = asked(server_url, input=[*told["output"], {"role": "user", "content": "And?"}])
    assert kinds(await respond(client, sent)) == ["message"]


def test_a_stream_has_openais_events(engine: ScriptedEngine, app: Any, server_url: str) -> None:
    say_once(engine, call("add", a=1, b=2), "It is 3.")
    with (
        serve(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        events = list(client.responses.create(**asked(server_url), stream=True))
        seen = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        assert seen[:12] == [
            "created", "in_progress", "output_item.added", "mcp_list_tools.in_progress",
            "mcp_list_tools.completed", "output_item.done", "mcp_call.in_progress",
            "mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.completed",
            "content_part.added", "output_text.delta",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done = events[-1].response
        assert events[-1].type == "response.completed" and done.output_text == "It is 3."
        assert client.responses.retrieve(done.id).output == done.output


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_waits_for_its_approval(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str, approve: bool
) -> None:
    say_once(engine, call("add", a=1, b=2), "Done.")
    needs = asked(server_url, tool={"require_approval": "always"})
    told = await respond(client, needs)
    assert kinds(told) == ["mcp_list_tools", "mcp_approval_request"] and not CALLED
    request = told["output"][-1]
    response = {
        "type": "mcp_approval_response",
        "approval_request_id": request["id"],
        "approve": approve,
        "reason": "not today",
    }
    more = {**needs, "previous_response_id": told["id"], "input": [response]}
    after = await respond(client, more)
    assert kinds(after) == [*(["mcp_call"] if approve else []), "message"]
    assert (["add"] if approve else []) == CALLED
    if approve:
        assert after["output"][0]["approval_request_id"] == request["id"]
        assert "\n3\n" in prompt_of(engine)
        # A second use of the approval calls nothing.
        await respond(client, {**more, "previous_response_id": after["id"]})
        assert CALLED == ["add"]
    else:
        assert "not today" in prompt_of(engine)
    forged = {**response, "approve": True, "approval_request_id": "mcpr_1"}
    refused = await client.post(PATH, json={**needs, "input": [forged]})
    assert error_of(refused, 400, "input")["code"] == "unknown_approval_request"


@pytest.mark.parametrize(
    ("tool", "known", "free"),
    [
        ({"allowed_tools": ["add"]}, ["add"], True),
        ({"allowed_tools": {"read_only": True}}, ["add"], True),
        ({"allowed_tools": ["add"], "require_approval": {"never": {"tool_names": ["x"]}}},
         ["add"], False),
        ({"allowed_tools": ["add"], "require_approval": {"never": {"read_only": True}}},
         ["add"], True),
        ({"allowed_tools": ["nothing"]}, [], None),
    ],
)  # fmt: skip
async def test_tools_and_approvals_are_filtered(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    server_url: str,
    tool: dict[str, Any],
    known: list[str],
    free: bool | None,
) -> None:
    say_once(engine, call("add", a=1, b=2), "Done.")
    told = await respond(client, asked(server_url, tool=tool))
    assert [each["name"] for each in told["output"][0]["tools"]] == known
    if free is not None:
        assert kinds(told)[1] == ("mcp_call" if free else "mcp_approval_request")
    assert (["add"] if free else []) == CALLED


async def test_failures_of_tools_are_told_to_the_model(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    server_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "CALL_SECONDS", 0.3)
    for text, part in (
        (call("fail"), "Error executing"),
        (call("add", a='"x"', b=1), "int"),
        (call("wait"), "too long"),
    ):
        say_once(engine, text, "Sorry.")
        told = await respond(client, asked(server_url))
        assert kinds(told) == ["mcp_list_tools", "mcp_call", "message"], told
        assert told["output"][1]["status"] == "failed" and part in str(told["output"][1]["error"])
        assert part in prompt_of(engine)


@pytest.mark.parametrize(
    ("choice", "known"),
    [
        ({"type": "mcp", "server_label": "t"}, ["t__add", "t__fail", "t__wait", "t__large"]),
        (
            {"type": "mcp", "server_label": "t", "name": "fail"},
            ["f", "t__add", "t__fail", "t__wait", "t__large"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "mcp", "server_label": "t", "name": "fail"}],
            },
            ["t__fail"],
        ),
    ],
)
async def test_a_tool_of_a_server_can_be_required(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    server_url: str,
    choice: dict[str, Any],
    known: list[str],
) -> None:
    engine.tokenizer = toy_tokenizer(chat_template=TEMPLATE + "{{ tools | tojson }}")
    say_once(engine, call("fail"), "Sorry.")
    body = asked(server_url, tool_choice=choice)
    body["tools"].append({"type": "function", "name": "f"})
    told = await respond(client, body)
    assert kinds(told) == ["mcp_list_tools", "mcp_call", "message"]
    assert told["tool_choice"] == choice
    first, second = engine.requests
    # The first turn must call a tool. The second turn need not call again.
    begins = ['start: "<tool_call>"' in (each.params.grammar or "") for each in (first, second)]
    assert begins == [True, False]
    prompt = engine.tokenizer.decode(first.prompt_ids)
    assert re.findall(r'"name": "(\w+)"', prompt) == known
    if choice["type"] == "allowed_tools":
        assert "t__add" not in engine.tokenizer.decode(second.prompt_ids)


@pytest.mark.parametrize(
    ("choice", "needle"),
    [
        ({"type": "mcp", "server_label": "t", "name": "nothing"}, "gave no tool 'nothing'"),
        ({"type": "mcp", "server_label": "u"}, "server_label is not in tools"),
        ({"type": "mcp"}, "needs server_label"),
    ],
)
async def test_a_choice_of_a_tool_that_no_server_has_is_refused(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    server_url: str,
    choice: dict[str, Any],
    needle: str,
) -> None:
    answer = await client.post(PATH, json=asked(server_url, tool_choice=choice))
    assert needle in error_of(answer, 400, "tool_choice")["message"]
    assert not engine.requests


async def test_answers_and_calls_are_bounded(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    server_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_once(engine, call("add", a=1, b=2))
    told = await respond(client, asked(server_url, max_tool_calls=2))
    assert kinds(told) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    CALLED.clear()
    say_once(engine, 3 * call("add", a=1, b=2), "Done.")
    told = await respond(client, asked(server_url, max_tool_calls=2))
    calls = [item["status"] for item in told["output"] if item["type"] == "mcp_call"]
    assert calls == ["completed", "completed", "failed"] and CALLED == ["add"] * 2
    monkeypatch.setattr(connection, "MAX_BYTES", 30_000)
    say_once(engine, call("large"), "Sorry.")
    told = await respond(client, asked(server_url))
    assert told["output"][1]["status"] == "failed"
    monkeypatch.setattr(mcp_loop, "_MAX_SECONDS", 0.0)
    assert (await client.post(PATH, json=asked(server_url))).status_code == 500


async def test_a_server_that_does_not_answer_costs_its_tools_only(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str
) -> None:
    wrong = server_url.replace("/mcp", "/nothing")
    say_once(engine, "Hello.")
    told = await respond(client, asked(wrong))
    assert kinds(told) == ["mcp_list_tools", "message"] and told["output"][0]["error"]
    assert not engine.running


async def test_the_end_of_the_client_ends_the_calls(
    app: Any, engine: ScriptedEngine, server_url: str
) -> None:
    say_once(engine, call("wait"), "Done.")
    with serve(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            for stream in (True, False):
                body = asked(server_url, stream=stream)
                task = asyncio.create_task(client.post(PATH, json=body))
                await asyncio.sleep(1.0)
                task.cancel()
                await asyncio.wait([task])
            for _ in range(100):
                if not app.state.responses._jobs:
                    break
                await asyncio.sleep(0.02)
    assert not app.state.responses._jobs


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"server_url": "http://10.0.0.1/mcp"}, "tools[0].server_url"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "tools[0].server_url"),
        ({"server_url": "http://localhost/mcp"}, "tools[0].server_url"),
        ({"server_url": None, "connector_id": "connector_gmail"}, "tools[0].server_url"),
        ({"server_url": "file:///etc/passwd"}, "tools[0]"),
        ({"server_url": "http://a@127.0.0.1/"}, "tools[0]"),
        ({"server_url": "http://[::1"}, "tools[0]"),
        ({"headers": {"Host": "x"}}, "tools[0].headers"),
        ({"headers": {"X": "a\r\nB: c"}}, "tools[0].headers"),
        ({"authorization": "a\nb"}, "tools[0].authorization"),
        ({"server_label": ""}, "tools[0].server_label"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval"),
    ],
)
async def test_bad_servers_are_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str, tool: Any, param: str
) -> None:
    error_of(await client.post(PATH, json=asked(server_url, tool=tool)), 400, param)
    assert not engine.requests


@pytest.mark.parametrize("labels", ["aa", "abcdefghi"])
async def test_servers_are_few_and_each_has_a_label_of_its_own(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str, labels: str
) -> None:
    body = asked(server_url)
    body["tools"] = [{**body["tools"][0], "server_label": label} for label in labels]
    error_of(await client.post(PATH, json=body), 400, "tools")
    assert not engine.requests


async def test_without_the_flag_the_tools_are_left_out(
    engine: ScriptedEngine, server_url: str
) -> None:
    async with client_of(make_app(engine, responses_store="off")) as client:
        assert kinds(await respond(client, asked(server_url))) == ["message"]


@pytest.mark.parametrize(
    ("allowed", "address", "is_permitted"),
    [
        ("a.example", "93.184.216.34", True),
        ("a.example", "127.0.0.1", False),
        ("a.example", "10.1.2.3", False),
        ("a.example", "169.254.169.254", False),
        ("a.example", "::ffff:127.0.0.1", False),
        ("a.example", "2002:7f00:1::", False),
        ("a.example", "64:ff9b::7f00:1", False),
        ("a.example", "fe80::1%eth0", False),
        ("a.example", "224.0.0.1", False),
        ("a.example", "0.0.0.0", False),
        ("a.example,10.0.0.0/8", "10.1.2.3", True),
        ("localhost:8000", "127.0.0.1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("[::1]:80", "::1", True),
    ],
)
async def test_private_addresses_must_be_named(
    allowed: str, address: str, is_permitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = parse_mcp_allow(allowed)
    assert servers.permits_address(address) is is_permitted
    entry = (None, None, None, None, (address, 80))
    loop = asyncio.get_running_loop()

    async def resolved(*_: Any, **__: Any) -> Any:
        return [entry]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    host, port = next(iter(servers.hosts))
    if is_permitted:
        assert await pinned.checked_address(servers, host, port or 443) == address
    else:
        with pytest.raises(pinned.Refused, match="not public"):
            await pinned.checked_address(servers, host, port or 443)
    with pytest.raises(pinned.Refused, match="not named"):
        await pinned.checked_address(servers, "b.example", 443)
    with pytest.raises(pinned.Refused, match="not named"):
        await pinned.checked_address(servers, host, 22)


@pytest.mark.parametrize("text", ["http://a.example", "a.example:0", "a b", "10.0.0.1/8", "x/y"])
def test_a_bad_flag_is_one_clear_line(text: str) -> None:
    with pytest.raises(ValueError, match="--mcp-allow"):
        parse_mcp_allow(text)


async def test_a_redirect_reaches_no_other_server(
    client: httpx.AsyncClient, engine: ScriptedEngine, server_url: str, app: Any
) -> None:
    reached: list[str] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        reached.append(scope["path"])
        target = str(scope["server"][1]).encode()
        location = [(b"location", b"http://localhost:%s/secret" % target)]
        head = {"type": "http.response.start", "status": 307, "headers": location}
        await send(head)
        await send({"type": "http.response.body", "body": b""})

    with serve(other) as url:  # type: ignore[arg-type]
        parsed = httpx.URL(url)
        app.state.responses.mcp_allowed = parse_mcp_allow(f"{parsed.host}:{parsed.port}")
        say_once(engine, "Hello.")
        told = await respond(client, asked(f"{url}/mcp"))
    assert told["output"][0]["error"] and "/secret" not in reached and reached


async def test_a_compressed_answer_is_not_unpacked() -> None:
    """A few bytes could become gigabytes."""
    small = gzip.compress(b"0" * 1000)

    async def other(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": small})

    with serve(other) as url:  # type: ignore[arg-type]
        async with pinned.http_client(url, "127.0.0.1", {}, 5, most=2**20) as client:
            with pytest.raises(httpx2.ReadError, match="compresses"):
                await client.get(url)
