"""Whatever a client sends, the answer is 2xx or 4xx in the right shape: never a server error, never
a sequence left behind.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from examples import examples
from http_fixtures import client_of, make_app
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.lab.attack.fuzz_seeds import HOSTILE, TEXT_SEEDS
from piecework.server.app import TEXT_ROUTERS
from piecework.server.core.answers import LINES
from piecework.server.core.llama_cpp_errors import PATHS as LLAMA_CPP
from piecework.server.core.ollama_errors import is_ollama
from piecework.server.http.body import JsonRoute
from piecework.server.native.requests import NativeSampling

# One application for all examples: building one takes longer than a request.
ENGINE = ScriptedEngine(toy_tokenizer())
APP = make_app(ENGINE, responses_store="memory")
# The bodies of every endpoint, by a path of the endpoint.
MODELS: dict[str, type[BaseModel]] = {
    path: route.dependant.body_params[0].field_info.annotation
    for router in TEXT_ROUTERS
    for route in router.routes
    if isinstance(route, JsonRoute) and route.dependant.body_params
    for path in TEXT_SEEDS
    if route.path_regex.match(path)
}
NUMBERS = (
    st.integers(-3, 5)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([10**400, 2**63, -(2**63), 1e308])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.sampled_from(HOSTILE)
NAMES = st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "king"]),
            "content": st.text(max_size=10) | VALUES,
        },
        optional={"name": SCALARS},
    ),
    max_size=3,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
            )
        },
        optional={
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(max_size=9)
            | st.lists(
                st.fixed_dictionaries({"type": st.just("input_text"), "text": st.text(max_size=9)}),
                max_size=2,
            ),
            "summary": st.just([]),
            "output": st.text(max_size=9),
            "arguments": st.just("{}") | st.text(max_size=9),
            "call_id": st.sampled_from(["a", "b"]),
            "name": st.just("f"),
            "id": st.sampled_from(["a", "msg_" + "0" * 36]) | SCALARS,
        },
    ),
    max_size=4,
)
IDS = st.lists(st.integers(0, 340), max_size=5)
LIKELY = {
    "prompt": st.text(max_size=20)
    | IDS
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(IDS, max_size=3),
    "text": st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3),
    "input_ids": IDS | st.lists(IDS, max_size=3),
    "input_prefix": st.text(max_size=9),
    "input_suffix": st.text(max_size=9),
    "n_predict": st.integers(-3, 9),
    "tokens": IDS | st.lists(IDS, max_size=3),
    "messages": MESSAGES,
    "input": ITEMS | VALUES,
    "stream": st.booleans(),
    "n": st.integers(0, 3),
    "best_of": st.integers(0, 4),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(
        st.integers(-1, 340).map(str) | st.text(max_size=3), NUMBERS, max_size=3
    ),
    "logprobs": st.booleans() | st.integers(-1, 4),
    "rid": st.sampled_from(["a", "b", ["a", "b"], ["a", "a"]]),
    "system": st.text(max_size=9),
    "tools": st.just([{"name": "f", "input_schema": {"type": "object"}}]),
    "tool_choice": st.sampled_from([{"type": "any"}, {"type": "tool", "name": "f"}]),
    "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1}]),
    "model": st.sampled_from(["toy", "default", "x"]),
    "max_tokens": st.integers(-1, 300),
}
"""What members usually hold, so that the examples come past the first check."""
SMALL = st.integers(0, 2)
FLOATS = st.floats(-0.5, 2.5)
GOOD = {path: TEXT_SEEDS[path][0] for path in MODELS}


def members(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """A few members of a model: likely values, small numbers, or anything."""
    pairs = st.sampled_from(sorted(model.model_fields)).flatmap(
        lambda name: st.tuples(
            st.just(name), LIKELY.get(name, st.nothing()) | SMALL | FLOATS | st.booleans() | VALUES
        )
    )
    return st.lists(pairs, max_size=4).map(dict)


SAMPLING = members(NativeSampling)
REQUESTS = st.sampled_from(sorted(MODELS)).flatmap(
    lambda path: st.tuples(st.just(path), members(MODELS[path]), SAMPLING | VALUES)
)


async def post(path: str, content: bytes) -> httpx.Response:
    async with client_of(APP) as client:
        return await asyncio.wait_for(
            client.post(path, content=content, headers={"Content-Type": "application/json"}), 20
        )


def check(response: httpx.Response) -> None:
    assert 200 <= response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()
        if is_ollama(response.request.url.path):
            error = {"error": {"message": error.pop("error"), "type": "", **error}, "type": ""}
        members = {"message", "type"} if "type" in error else {"message", "type", "param", "code"}
        if response.request.url.path in LLAMA_CPP:
            members = {"code", "message", "type"}
        assert set(error["error"]) == members
        assert len(response.text) < 20_000
    elif response.headers["content-type"] == LINES:
        assert json.loads(response.text.splitlines()[-1])["done"] is True
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.rstrip("\n").rpartition("\n")[2]
        assert last.startswith(
            (
                "data: [DONE]",
                'data: {"type":"message_stop"}',
                'data: {"type":"response.',
                # The last event of llama.cpp's streams is their last piece.
                *(["data: {"] if response.request.url.path in LLAMA_CPP else []),
            )
        )
    assert not ENGINE.running
    assert not ENGINE.dropped


@settings(
    max_examples=examples(100, exploring=300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(request=REQUESTS)
@example(request=("/v1/completions", {"seed": 2**63 - 1, "n": 2}, None))
def test_any_object_is_answered(request: tuple[str, dict[str, Any], Any]) -> None:
    path, body, sampling = request
    body = {**GOOD[path], **body}
    if path == "/generate" and sampling is not None:
        body["sampling_params"] = sampling
    check(asyncio.run(post(path, json.dumps(body).encode())))


@settings(max_examples=examples(50, exploring=150), deadline=None)
@given(
    # A conversation may be created without a body.
    path=st.sampled_from(sorted({*MODELS} - {"/v1/conversations"})),
    content=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()),
)
def test_any_bytes_are_answered(path: str, content: bytes) -> None:
    response = asyncio.run(post(path, content))
    check(response)
    assert response.status_code >= 400
