"""What clients ask of a text's form reaches the engine as one grammar, whatever they call it."""

from __future__ import annotations

import errno
import json
import subprocess
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine

from piecework.runtime.sampling import grammar, grammar_process

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}],
    "triggers": ["<f="],
}
OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, grammar.from_json_schema({"type": "object"})),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": PERSON},
            }
        },
        grammar.from_json_schema(PERSON, closed=True),
    ),
    ({"response_format": TAG}, grammar.from_structural_tag([("<f=a>", PERSON, "</f>")], ["<f="])),
    ({"guided_json": json.dumps(PERSON)}, grammar.from_json_schema(PERSON)),
    ({"guided_choice": ["a", "b"]}, grammar.from_choice(["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, grammar.from_ebnf('root ::= "a"')),
    ({"structured_outputs": {"json": PERSON}}, grammar.from_json_schema(PERSON)),
    ({"structured_outputs": {"regex": "a+"}}, grammar.from_regex("a+")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, grammar.from_lark('start: "a"')),
]
EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": json.dumps(PERSON)}, grammar.from_json_schema(PERSON)),
    ({"regex": "a+"}, grammar.from_regex("a+")),
    ({"ebnf": 'root ::= "a"'}, grammar.from_ebnf('root ::= "a"')),
    (
        {"structural_tag": json.dumps(TAG)},
        grammar.from_structural_tag([("<f=a>", PERSON, "</f>")], ["<f="]),
    ),
]
CASES = [
    *((path, members, expected) for path in (CHAT, COMPLETIONS) for members, expected in OPENAI),
    *(
        (path, members, expected)
        for path in (CHAT, COMPLETIONS, GENERATE)
        for members, expected in EVERYWHERE
    ),
]


def body_of(path: str, members: dict[str, Any]) -> dict[str, Any]:
    if path == GENERATE:
        return {"text": "Hi", "sampling_params": {"max_new_tokens": 3, **members}}
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    )
    return {**prompt, "max_tokens": 3, **members}


@pytest.mark.parametrize(("path", "members", "expected"), CASES)
async def test_each_name_of_a_form(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    path: str,
    members: dict[str, Any],
    expected: str,
) -> None:
    answer = await client.post(path, json=body_of(path, members))
    assert answer.status_code == 200, answer.text
    (request,) = scripted.requests
    assert request.params.grammar == expected


@pytest.mark.parametrize("members", [{}, {"response_format": {"type": "text"}}, {"regex": None}])
async def test_a_text_of_any_form(
    client: httpx.AsyncClient, scripted: ScriptedEngine, members: dict[str, Any]
) -> None:
    await client.post(CHAT, json=body_of(CHAT, members))
    assert scripted.requests[0].params.grammar is None


async def test_the_reason_is_the_librarys(client: httpx.AsyncClient) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 3}
    answer = await client.post(CHAT, json=body_of(CHAT, {"guided_json": schema}))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == ("guided_json", "invalid_grammar")
    assert "minimum (5) is greater than maximum (3)" in error["message"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"structural_tag": "{"}, "invalid JSON"),
        ({"structural_tag": '{"structures": []}'}, "structures: list should have at least 1"),
        ({"structured_outputs": {"structural_tag": '{"triggers": [7]}'}}, "structures"),
        ({"response_format": {**TAG, "triggers": ["other"]}}, "no trigger"),
    ],
)
async def test_a_wrong_structural_tag_is_told_of_in_one_line(
    client: httpx.AsyncClient, members: dict[str, Any], reason: str
) -> None:
    error = error_of_answer(await client.post(CHAT, json=body_of(CHAT, members)))
    assert error["code"] == "invalid_grammar" and error["param"].split(".")[0] in members
    assert reason in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_go_on_is_the_clients_to_mend(
    client: httpx.AsyncClient, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.script.fail_code = grammar.INVALID_GRAMMAR
    body = body_of(CHAT, {"regex": "a+", "stream": stream})
    scripted.script.fail_after = 0
    error = error_of_answer(await client.post(CHAT, json=body))
    assert error["code"] == "invalid_grammar" and "it broke" in error["message"]
    if stream:
        scripted.script.fail_after = 2
        answer = await client.post(CHAT, json=body)
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        assert answer.status_code == 200 and last == {"error": error}


def error_of_answer(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_a_grammar_that_cannot_be_checked_now_may_be_sent_again(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(grammar_process, "_idle", [])
    body = {"prompt": "Hi", "max_tokens": 1, "regex": "once|again"}
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        refused = await client.post(COMPLETIONS, json=body)
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["code"] == "grammar_check_unavailable"
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
