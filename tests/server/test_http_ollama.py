"""Ollama's API: what the model is told, what its text becomes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_fixtures import client_of, make_app
from scripted_engine import CONTEXT_LENGTH, INFO, REPLY, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.cli.core.flags import ServerConfig
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.sampling.defaults import SamplingDefaults
from piecework.server.app import create_app
from piecework.server.engine.state import EngineState

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [USER]}
PROMPT: dict[str, Any] = {"model": "toy", "prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}]"
    "{% endfor %}{{ '-' if not enable_thinking }}{{ reasoning_effort or '' }}{# </think> #}"
)


@pytest.fixture(autouse=True)
def _long_context(scripted: ScriptedEngine) -> None:
    scripted.info = dataclasses.replace(INFO, context_length=2048)


def says(engine: ScriptedEngine, text: str) -> None:
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]


@pytest.fixture
async def thinking() -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedEngine]]:
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = dataclasses.replace(INFO, context_length=2048)
    says(engine, "<think>Hm.</think>Yes.")
    async with client_of(make_app(engine)) as client:
        yield client, engine


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


async def told(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, which a stream adds up to but for times and ids."""
    answer = await client.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    streamed = lines_of(await client.post(path, json=body))
    *parts, last = streamed
    assert [part["done"] for part in streamed] == [False] * len(parts) + [True]
    contents = [part.get("message", part) for part in parts]
    content = whole.get("message", whole)
    for name in ("content", "response", "thinking"):
        pieces = [each[name] for each in contents if name in each]
        assert "".join(pieces) == content.get(name, ""), name
    calls = [call["function"] for each in contents for call in each.get("tool_calls", [])]
    assert calls == [call["function"] for call in content.get("tool_calls", [])]
    entries = [entry for each in parts for entry in each.get("logprobs", [])]
    assert entries == whole.get("logprobs", [])
    for name in ("model", "done_reason", "prompt_eval_count", "eval_count"):
        assert last[name] == whole[name]
    return whole


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_an_answer_and_its_figures(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    body = {**(CHAT if path == "/api/chat" else PROMPT), "options": {"num_predict": 5}}
    answer = await told(client, path, body)
    text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
    assert text and REPLY.startswith(text)
    assert prompt(scripted).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert answer["done_reason"] == "length" and answer["eval_count"] == 5
    assert answer["prompt_eval_count"] == len(scripted.requests[-1].prompt_ids)
    parts = [answer[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert min(parts) > 0 and sum(parts) <= answer["total_duration"] + 1000 < 10**11


async def test_options_become_sampling_parameters(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 9,
        "stop": ["there"], "num_ctx": 4, "mirostat": 2, "x_unknown": [1],
    }  # fmt: skip
    answer = await told(client, "/api/chat", {**CHAT, "options": options, "keep_alive": "5m"})
    assert answer["message"]["content"] == "Hello " and answer["done_reason"] == "stop"
    params = scripted.requests[-1].params
    assert (params.max_new_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.5, -0.5, 9)


async def test_options_that_are_left_out_are_the_models_own(scripted: ScriptedEngine) -> None:
    defaults = SamplingDefaults({"temperature": 0.25, "top_k": 8}, "a test")
    async with client_of(make_app(scripted, defaults=defaults, default_max_tokens=6)) as client:
        for path, body in (("/api/chat", CHAT), ("/api/generate", {**PROMPT, "raw": True})):
            await told(client, path, body)
            params = scripted.requests[-1].params
            assert (params.temperature, params.top_k, params.max_new_tokens) == (0.25, 8, 6)
        shown = (await client.post("/api/show", json={"model": "toy"})).json()
        assert shown["parameters"] == "temperature 0.25\ntop_k 8"


@pytest.mark.parametrize("most", [0, -1, -2])
async def test_an_answer_without_a_limit_fills_the_context(
    scripted: ScriptedEngine, most: int
) -> None:
    scripted.info = INFO
    async with client_of(make_app(scripted, default_max_tokens=6)) as client:
        body = {**PROMPT, "raw": True, "options": {"num_predict": most}}
        await told(client, "/api/generate", body)
    request = scripted.requests[-1]
    assert request.params.max_new_tokens == CONTEXT_LENGTH - len(request.prompt_ids)


async def test_calls_are_objects_and_go_back_as_they_came(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    called = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "ö"]}}\n</tool_call>'
    says(scripted, f"I ask.{called}\n{called}")
    answer = await told(client, "/api/chat", {**CHAT, "tools": [TOOL]})
    message, arguments = answer["message"], {"a": [1, "ö"]}
    assert message["content"].strip() == "I ask." and answer["done_reason"] == "stop"
    functions = [call["function"] for call in message["tool_calls"]]
    assert [each["arguments"] for each in functions] == [arguments, arguments]
    assert [each["index"] for each in functions] == [0, 1]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    says(scripted, "Done.")
    results = [{"role": "tool", "tool_name": "f", "content": f"{n} degrees"} for n in (1, 2)]
    body = {**CHAT, "messages": [USER, message, *results], "tools": [TOOL]}
    assert (await told(client, "/api/chat", body))["message"]["content"] == "Done."
    seen = prompt(scripted)
    assert seen.count('"a": [1, "ö"]') == 2 and seen.index("1 degrees") < seen.index("2 degrees")


async def test_a_call_that_is_cut_off_has_its_arguments_so_far(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "Bo'
    says(scripted, text + "nn is warm")
    count = len(scripted.tokenizer.encode(text, add_special_tokens=False))
    body = {**CHAT, "tools": [TOOL], "options": {"num_predict": count}}
    answer = await told(client, "/api/chat", body)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["arguments"] in ({"a": "Bo"}, {}) and answer["done_reason"] == "length"


@pytest.mark.parametrize(
    ("think", "written"),
    [(None, "-"), (False, "-"), (True, ""), ("low", "low"), ("max", "high")],
)
async def test_thoughts_are_apart_and_think_reaches_the_template(
    thinking: tuple[httpx.AsyncClient, ScriptedEngine], think: Any, written: str
) -> None:
    client, engine = thinking
    answer = await told(client, "/api/chat", {**CHAT, "think": think})
    assert answer["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    assert prompt(engine).endswith(f"[user||Hi]{written}")
    body = {**PROMPT, "think": think, "system": "Be kind."}
    answer = await told(client, "/api/generate", body)
    assert (answer["response"], answer["thinking"]) == ("Yes.", "Hm.")
    assert prompt(engine).endswith(f"[system||Be kind.][user||Hi]{written}")
    said = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    await told(client, "/api/chat", {**CHAT, "messages": [USER, said, USER]})
    assert "[assistant|Hm.|Yes.]" in prompt(engine)
    shown = (await client.post("/api/show", json={"model": "toy"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


async def test_a_format_is_a_grammar(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for path, body in (("/api/chat", CHAT), ("/api/generate", PROMPT)):
        for raw in (False, True) if path == "/api/generate" else (False,):
            grammars = []
            for form in (schema, "json", ""):
                asked = {**body, "format": form, **({"raw": True} if raw else {})}
                await told(client, path, asked)
                grammars.append(scripted.requests[-1].params.grammar)
            assert '"integer"' in grammars[0] and '"object"' in grammars[1] and not grammars[2]


async def test_a_raw_prompt_is_used_as_it_is(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    body = {**PROMPT, "raw": True, "logprobs": True, "top_logprobs": 2}
    answer = await told(client, "/api/generate", {**body, "options": {"num_predict": 3}})
    assert prompt(scripted) == "Hi"
    assert "".join([each["token"] for each in answer["logprobs"]]) == answer["response"]
    assert {len(each["top_logprobs"]) for each in answer["logprobs"]} == {2}


@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", PROMPT)])
async def test_a_request_without_text_tells_that_the_model_is_loaded(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json={"model": "toy:latest", "keep_alive": 0})
    assert answer.status_code == 200 and answer.json()["done"] is True
    assert answer.json()["done_reason"] == "load" and not scripted.requests
    assert (await client.post(path, json={"model": "x"})).status_code == 404
    scripted.state = EngineState.FAILED
    assert (await client.post(path, json={"model": "toy"})).status_code == 503


async def test_the_server_takes_the_names_that_it_lists(scripted: ScriptedEngine) -> None:
    engine = EngineConfig(model_path="models/toy")
    config = ServerConfig(served_model_name="toy, a/b:7b, c:latest", engine=engine)
    async with client_of(create_app(scripted, config)) as client:
        for path in ("tags", "ps"):
            listed = [each["model"] for each in (await client.get(f"/api/{path}")).json()["models"]]
            assert listed == ["toy:latest", "a/b:7b", "c:latest"][: 3 if path == "tags" else 1]
            for name in (*listed, "toy", "default", "default:latest"):
                shown = await client.post("/api/show", json={"model": name})
                assert shown.status_code == 200, shown.text
                chat = {"model": name, "messages": [USER], "max_tokens": 2}
                for family in ("/v1/chat/completions", "/v1/messages"):
                    assert (await client.post(family, json=chat)).status_code == 200
                family = shown.json()["model_info"]["general.architecture"]
                assert shown.json()["model_info"][f"{family}.context_length"] == 2048
        assert (await client.post("/api/show", json={"name": "c"})).status_code == 200
        for name in ("toy:7b", "a/b", "toy:latest:latest"):
            for path in ("/api/show", "/v1/chat/completions"):
                asked = {"model": name, "messages": [USER]}
                assert (await client.post(path, json=asked)).status_code == 404


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("chat", {"model": None}, "model: this parameter is required"),
        ("chat", {"model": 5}, "model"),
        ("chat", {"messages": "Hi"}, "messages"),
        ("chat", {"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "[0].tool"),
        ("chat", {"messages": [{**USER, "content": "Hi " * 3000}]}, "maximum context length"),
        ("chat", {"tools": [TOOL, TOOL]}, "same name"),
        ("chat", {"format": "xml"}, "format: input should be"),
        ("chat", {"format": {"type": "nothing"}}, "format: the schema"),
        ("chat", {"think": True}, "think: the model 'toy' does not think"),
        ("chat", {"think": "very"}, "think: input should be"),
        ("chat", {"top_logprobs": 2}, "needs logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 10**6}, "logprobs must be"),
        ("chat", {"options": 5}, "options"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"temperature": -1}}, "temperature must be"),
        ("chat", {"options": {"repeat_penalty": 9}}, "repeat_penalty must be"),
        ("chat", {"options": {"typical_p": 0.5}}, "typical_p is not supported"),
        ("chat", {"options": {"stop": [""]}}, "options.stop"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"template": "{{ .Prompt }}"}, "template: this server does not support it"),
        ("generate", {"context": [1, 2]}, "context: this server does not support it"),
        ("generate", {"raw": True, "system": "x"}, "system: it needs the chat template"),
        ("generate", {"raw": True, "think": True}, "think: it needs the chat template"),
        ("generate", {"suffix": "x"}, "suffix: this model's tokenizer has no tokens"),
        ("show", {"model": None}, "model: this parameter is required"),
    ],
    ids=str,
)
async def test_bad_input_is_refused_by_its_name_in_ollamas_form(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, more: Any, named: str
) -> None:
    body = {**(CHAT if path == "chat" else PROMPT), **more}
    answer = await client.post(f"/api/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"} and named in answer.json()["error"]
    assert not scripted.requests


async def test_what_curl_sends_without_a_header_is_read_but_no_page_may_send_it(
    client: httpx.AsyncClient,
) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({**CHAT, "stream": False})
    assert (await client.post("/api/chat", content=body, headers=form)).status_code == 200
    page = {**form, "Origin": "http://other.example"}
    assert (await client.post("/api/chat", content=body, headers=page)).status_code == 403
    strict = await client.post("/v1/completions", content='{"prompt": "x"}', headers=form)
    assert strict.status_code == 415


async def test_errors_of_others_have_ollamas_form_too(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, api_key="k")) as client:
        bad = [await client.post("/api/chat", json=CHAT)]
        client.headers["Authorization"] = "Bearer k"
        bad += [await client.get("/api/none"), await client.get("/api/chat")]
        bad.append(await client.post("/api/chat", content=json.dumps(CHAT)))
        bad.append(await client.post("/api/embed", json={"model": "toy", "input": "x"}))
        scripted.script.fail_after = 0
        bad.append(await client.post("/api/chat", json={**CHAT, "stream": False}))
        scripted.script.room = 0
        bad.append(await client.post("/api/chat", json=CHAT))
    assert [each.status_code for each in bad] == [401, 404, 405, 415, 404, 500, 503]
    assert all(list(each.json()) == ["error"] for each in bad)
    assert bad[-1].headers["retry-after"]


async def test_a_stream_that_fails_ends_with_the_error(scripted: ScriptedEngine) -> None:
    scripted.script.fail_after, scripted.script.delay = 2, 0.02
    async with client_of(make_app(scripted)) as client:
        *parts, last = lines_of(await client.post("/api/chat", json=CHAT))
    assert parts and last.keys() == {"error"} and "it broke" in last["error"]
