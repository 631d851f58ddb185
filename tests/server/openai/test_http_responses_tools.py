"""Tools of `/v1/responses` that are no plain functions: namespaces, custom tools, hosted tools, and
the items that clients send back of all of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import httpx
import pytest
from declared import check_answer, default_document
from http_fixtures import client_of, events, make_app
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

PATH = "/v1/responses"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}]{% endfor %}"
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
)
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def scripted() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = dataclasses.replace(INFO, context_length=8192)
    says(engine)
    return engine


@pytest.fixture
async def client(scripted: ScriptedEngine) -> Any:
    async with client_of(make_app(scripted)) as client:
        yield client


def function(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"id": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": parameters, **more}


def namespace(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": [*tools]}


def says(engine: ScriptedEngine, *calls: tuple[str, dict[str, Any]]) -> None:
    """The model calls functions by these names, and ends."""
    text = "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"model": "toy", "input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    check_answer(default_document(), "post", PATH, answer)
    Response.model_validate_json(answer.content, strict=True)
    return dict(answer.json())


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def told(engine: ScriptedEngine) -> list[dict[str, Any]]:
    """The functions that the model has heard of, in order."""
    text = prompt(engine)
    decoder, found, place = json.JSONDecoder(), [], text.rindex("]{") + 1
    while place < len(text):
        function, place = decoder.raw_decode(text, place)
        found.append(function)
    return found


SPACES = [
    function("close"),
    namespace("agents", function("close"), function("open")),
    namespace("mcp__files__", function("open")),
    namespace("has blanks", function("close"), function("read")),
    namespace("x" * 60, function("open" * 4)),
]
"""Tools of the same name, and namespaces of which no name can be made."""


async def test_a_called_tool_comes_back_under_its_own_name_and_namespace(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await post(client, tools=SPACES)
    names = [function["name"] for function in told(scripted)]
    assert len({*names}) == len(names) == 7 and all(len(name) <= 64 for name in names)
    own = [(None, "close")] + [
        (space["name"], tool["name"]) for space in SPACES[1:] for tool in space["tools"]
    ]
    says(scripted, *((name, {"id": "a"}) for name in names))
    answer = await post(client, tools=SPACES)
    assert [(item.get("namespace"), item["name"]) for item in answer["output"]] == own
    assert answer["tools"][1]["tools"][0]["name"] == "close"
    # Sent back, the model reads its own names again.
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in answer["output"]
    ]
    await post(client, tools=SPACES, input=[*answer["output"], *outputs])
    assert all(f'"name": "{name}", "arguments"' in prompt(scripted) for name in names)


async def test_a_stream_tells_the_namespace(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, ("agents__open", {"id": "a"}))
    body = {"model": "toy", "input": "Hi", "tools": SPACES, "stream": True}
    answer = await client.post(PATH, json=body)
    items = [event["item"] for event in events(answer) if "item" in event]
    assert [(item["namespace"], item["name"]) for item in items] == [("agents", "open")] * 2


async def test_the_description_of_a_namespace_reaches_the_model(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await post(client, tools=[namespace("agents", function("open", description="Opens."))])
    (function_told,) = told(scripted)
    assert function_told["description"] == "About agents.\n\nOpens."


async def test_a_namespaced_tool_can_be_chosen(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, ("agents__close", {"id": "a"}))
    for choice in (
        {"type": "function", "name": "close", "namespace": "agents"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "close", "namespace": "agents"}],
        },
    ):
        answer = await post(client, tools=SPACES, tool_choice=choice)
        assert answer["tool_choice"] == choice
        assert scripted.requests[-1].params.grammar
        assert [item["namespace"] for item in answer["output"]] == ["agents"]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview_2025_03_11",
        "image_generation",
        "file_search",
        "code_interpreter",
        "local_shell",
        "computer_use_preview",
        "mcp",
        "tool_search",
    ],
)
async def test_a_hosted_tool_is_left_out_with_a_line_in_the_log(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    caplog.set_level(logging.INFO)
    hosted = {"type": kind, "external_web_access": False}
    answer = await post(client, tools=[function("open"), hosted])
    assert [function["name"] for function in told(scripted)] == ["open"]
    assert [tool["type"] for tool in answer["tools"]] == ["function"]
    assert [kind in line for line in caplog.messages if "left out" in line] == [True]
    await post(client, tools=[hosted])


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


async def test_a_custom_tool_takes_a_text(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, ("patch", {"input": 'a "b"\n'}))
    answer = await post(client, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"})
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a "b"\n')
    (function_told,) = told(scripted)
    assert 'start: "x"' in function_told["description"] and answer["tools"] == [PATCH]
    body = {"model": "toy", "input": "Hi", "tools": [PATCH], "stream": True}
    streamed = events(await client.post(PATH, json=body))
    for event in streamed:
        EVENT.validate_python(event)
    deltas = [event for event in streamed if event["type"].endswith("custom_tool_call_input.delta")]
    assert [event["delta"] for event in deltas] == ['a "b"\n']
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    await post(client, input=[call, result])
    assert '{"input": "a \\"b\\"\\n"}' in prompt(scripted) and "[tool|done]" in prompt(scripted)


async def test_a_custom_call_that_is_cut_off_has_the_text_so_far(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    says(scripted, ("patch", {"input": "abcdefghij" * 20}))
    answer = await post(client, tools=[PATCH], max_output_tokens=150)
    assert answer["status"] == "incomplete"
    (call,) = answer["output"]
    assert call["input"] and ("abcdefghij" * 20).startswith(call["input"])


@pytest.mark.parametrize(
    ("items", "read"),
    [
        ([{"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}], []),
        (
            [
                {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "a", "output": "x.py"},
            ],
            ["local_shell", '"ls"', "[tool|x.py]"],
        ),
        (
            [
                {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "x.py"}]},
            ],
            ["shell", '"ls"', "x.py"],
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "a", "operation": {"path": "x.py"}},
                {"type": "apply_patch_call_output", "call_id": "a", "status": "completed"},
            ],
            ["apply_patch", "x.py"],
        ),
        (
            [
                {"type": "tool_search_call", "call_id": "a", "arguments": {"query": "mail"}},
                {"type": "tool_search_output", "call_id": "a", "tools": [function("send")]},
            ],
            ["tool_search", "mail", "send"],
        ),
        (
            [{"type": "mcp_call", "id": "m", "name": "get", "arguments": "{}", "output": "42"}],
            ["get", "[tool|42]"],
        ),
        (
            [{"type": "code_interpreter_call", "id": "c", "code": "6*7",
              "outputs": [{"type": "logs", "logs": "42"}]}],
            ["6*7", "42"],
        ),
        ([{"type": "web_search_call", "id": "w", "status": "completed",
           "action": {"type": "search", "query": "x"}}], []),
        ([{"type": "image_generation_call", "id": "i", "result": "AAAA"}], []),
        ([{"type": "ghost_snapshot", "ghost_commit": {"id": "x"}}], []),
        (
            [
                {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {"type": "input_text", "text": "seen"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                    ],
                },
            ],
            ["seen", "(image: this model reads only text)"],
        ),
    ],
)  # fmt: skip
async def test_items_of_other_tools_are_taken_and_told(
    client: httpx.AsyncClient, scripted: ScriptedEngine, items: list[Any], read: list[str]
) -> None:
    user = {"role": "user", "content": "Hi"}
    first = await post(client, input=[user, *items])
    assert all(text in prompt(scripted) for text in read), prompt(scripted)
    assert "AAAA" not in prompt(scripted)
    listed = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
    kinds = [item["type"] for item in reversed(listed)]
    assert kinds == ["message", *(item["type"] for item in items)]
    before = prompt(scripted)
    await post(client, previous_response_id=first["id"], input="And?")
    assert prompt(scripted).startswith(before)


async def test_namespaces_do_not_multiply_the_tools_of_a_request(
    client: httpx.AsyncClient,
) -> None:
    # Each name would be looked for among all others.
    spaces = [namespace("a b", *[function("f")] * 100)] * 2
    answer = await client.post(PATH, json={"model": "toy", "input": "Hi", "tools": spaces})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
