"""Sampling parameters on every endpoint: the server's defaults, and what a request says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_fixtures import client_of, make_app
from scripted_engine import ScriptedEngine

from piecework.runtime.sampling.defaults import SamplingDefaults

MESSAGES = [{"role": "user", "content": "Hi"}]
DEFAULTS = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.125}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"model": "toy", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}
every_path = pytest.mark.parametrize("path", list(BODIES))


async def ask(
    engine: ScriptedEngine, path: str, said: dict[str, Any], **defaults: Any
) -> httpx.Response:
    body = dict(BODIES[path])
    if path == "/generate":
        body["sampling_params"] = {**body["sampling_params"], **said}
    async with client_of(make_app(engine, defaults=SamplingDefaults(defaults))) as client:
        answer = await client.post(path, json={**body, **said} if path != "/generate" else body)
    assert answer.status_code == 200, answer.text
    return answer


@every_path
async def test_a_request_that_says_nothing_gets_the_servers_defaults(
    scripted: ScriptedEngine, path: str
) -> None:
    answer = await ask(scripted, path, {"temperature": None}, **DEFAULTS)
    (request,) = scripted.requests
    assert {name: getattr(request.params, name) for name in DEFAULTS} == DEFAULTS
    if path == "/v1/responses":
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.25, 0.5)


@every_path
async def test_what_a_request_says_goes_before_the_defaults(
    scripted: ScriptedEngine, path: str
) -> None:
    # These are OpenAI's defaults: said, they are not the same as left out.
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    await ask(scripted, path, said, **DEFAULTS)
    (request,) = scripted.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, -1)
    assert params.repetition_penalty == 1.125


@every_path
async def test_without_advice_of_the_model_the_defaults_are_openais(
    scripted: ScriptedEngine, path: str
) -> None:
    await ask(scripted, path, {})
    (request,) = scripted.requests
    assert (request.params.temperature, request.params.top_p) == (1.0, 1.0)
    assert (request.params.top_k, request.params.repetition_penalty) == (-1, 1.0)


async def test_the_defaults_are_told(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, defaults=SamplingDefaults(DEFAULTS))) as client:
        told = (await client.get("/get_server_info")).json()
        assert told["default_sampling_params"] == DEFAULTS
        told = (await client.get("/get_model_info")).json()
        assert told["preferred_sampling_params"] == DEFAULTS


async def test_the_models_longest_answer_bounds_those_that_name_no_limit(
    scripted: ScriptedEngine,
) -> None:
    defaults = SamplingDefaults({"max_new_tokens": 5})
    async with client_of(make_app(scripted, defaults=defaults)) as client:
        await client.post("/v1/chat/completions", json={"messages": MESSAGES})
        await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 9})
    assert [len(one.output_ids) for one in scripted.requests] == [5, 9]


async def test_min_tokens_holds_for_stop_strings(scripted: ScriptedEngine) -> None:
    ids = scripted.tokenizer.encode("Paris", add_special_tokens=False)
    scripted.script.reply = lambda request: ids
    async with client_of(make_app(scripted)) as client:
        body = {"prompt": "Hi", "max_tokens": 40, "min_tokens": 10, "stop": ["Par"]}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert 10 <= answer["usage"]["completion_tokens"] < 10 + len(ids)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"].count("Paris") == 9 // len(ids)
