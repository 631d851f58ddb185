"""`prompt_logprobs`, `suffix`, and members that OpenAI takes and that change nothing here."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import tokenizers
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine, scripted_logprob
from toy_tokenizer import toy_tokenizer

from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}


@pytest.mark.parametrize("echo", [False, True])
async def test_prompt_logprobs_of_a_completion(client: httpx.AsyncClient, echo: bool) -> None:
    body = {**BODY, "prompt_logprobs": 3, "echo": echo, "logprobs": 1}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    for position, (token, entry) in enumerate(zip([6, 7], rest, strict=True), 1):
        scripted = scripted_logprob(token, position, 3)
        assert list(entry) == [str(token), str(token + 1), "1"]
        assert entry[str(token)]["logprob"] == scripted.logprob
        assert [each["rank"] for each in list(entry.values())[1:]] == [1, 3]
        assert all(isinstance(each["decoded_token"], str) for each in entry.values())
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == (5 if echo else 2)
    assert all(len(each) <= 2 for each in choice["logprobs"]["top_logprobs"] if each)


async def test_prompt_logprobs_of_a_chat(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = (await client.post(CHAT, json={**CHAT_BODY, "prompt_logprobs": 0})).json()
    ids = scripted.requests[0].prompt_ids
    assert [entry and list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids[1:]),
    ]
    assert "prompt_logprobs" not in (await client.post(CHAT, json=CHAT_BODY)).json()


@pytest.mark.parametrize(
    "members",
    [{"prompt_logprobs": -1}, {"prompt_logprobs": 101}, {"prompt_logprobs": 1, "stream": True}],
)
async def test_prompt_logprobs_that_cannot_be(
    client: httpx.AsyncClient, members: dict[str, Any]
) -> None:
    for path, body in ((CHAT, CHAT_BODY), (COMPLETIONS, BODY)):
        error_of(await client.post(path, json=body | members), 400, "prompt_logprobs")


async def test_a_suffix_makes_a_prompt_with_a_gap() -> None:
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    backend = tokenizers.Tokenizer.from_str(toy_tokenizer().backend.to_str())
    backend.add_special_tokens(names)
    tokenizer = Tokenizer(
        TokenizerData(backend=backend, special_tokens={}, eos_token_ids=[2], chat_templates={})
    )
    marks = [backend.token_to_id(name) for name in names]
    engine = ScriptedEngine(tokenizer)
    async with client_of(make_app(engine)) as client:
        body = {"prompt": ["Hello", "The"], "suffix": " friend", "max_tokens": 1}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        error_of(await client.post(COMPLETIONS, json={**body, "echo": True}), 400, "suffix")
    behind = tokenizer.encode(" friend")
    assert [request.prompt_ids for request in engine.requests] == [
        [marks[0], *tokenizer.encode(text), marks[1], *behind, marks[2]]
        for text in ("Hello", "The")
    ]


async def test_a_suffix_without_such_tokens(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    error = error_of(await client.post(COMPLETIONS, json={**body, "suffix": "x"}), 400, "suffix")
    assert "fill-in-the-middle" in error["message"]
    assert (await client.post(COMPLETIONS, json={**body, "suffix": ""})).status_code == 200


@pytest.mark.parametrize(
    "members",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "store": False},
        {"metadata": {"a": "b"}, "service_tier": "flex", "store": True},
        {"verbosity": "medium", "seed": 3, "logit_bias": {"5": 1}, "max_completion_tokens": 1},
    ],
)
async def test_members_that_change_nothing(
    client: httpx.AsyncClient, members: dict[str, Any]
) -> None:
    answer = await client.post(CHAT, json=CHAT_BODY | members)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY),
        (COMPLETIONS, {"prompt": "Hello there", "max_tokens": 1}),
        ("/v1/responses", {"model": "toy", "input": "Hi", "store": False}),
    ],
)
async def test_hints_of_the_prompt_cache_reach_the_engine(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    for hint, seconds in (
        ({"prompt_cache_retention": "24h", "prompt_cache_key": "k"}, 86400.0),
        ({"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}, 300.0),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_key": "k"}, 1800.0),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({}, None),
    ):
        assert (await client.post(path, json=body | hint)).status_code == 200
        asked = scripted.requests[-1]
        length = len(asked.prompt_ids)
        assert list(asked.keep) == ([] if seconds is None else [(length, seconds)])
        assert asked.affinity == hint.get("prompt_cache_key", "")
    wrong = await client.post(path, json=body | {"prompt_cache_retention": "1y"})
    error_of(wrong, 400, "prompt_cache_retention")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_a_server_may_require_that_requests_name_a_model(
    scripted: ScriptedEngine, path: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "max_tokens": 2}
    for required, status in ((False, 200), (True, 400)):
        async with client_of(make_app(scripted, require_model=required)) as client:
            assert (await client.post(path, json={**body, "model": "toy"})).status_code == 200
            answer = await client.post(path, json=body)
            assert answer.status_code == status
    assert "model" in answer.json()["error"]["message"]
