"""Prompts that do not fit the context, or that become none: the error says by how much, or why."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from http_fixtures import client_of, error_of, make_app
from scripted_engine import CONTEXT_LENGTH, ScriptedEngine
from toy_tokenizer import toy_tokenizer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
SHORT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens"),
    [(1, CONTEXT_LENGTH), (None, CONTEXT_LENGTH), (5, 9000)],
)
async def test_a_prompt_beyond_the_context_gives_the_numbers(
    client: httpx.AsyncClient, max_tokens: int | None, prompt_tokens: int
) -> None:
    ids = [5] * prompt_tokens
    bodies = {
        COMPLETIONS: {"prompt": ids, "max_tokens": max_tokens},
        GENERATE: {
            "input_ids": ids,
            "sampling_params": {} if max_tokens is None else {"max_new_tokens": max_tokens},
        },
    }
    for path, param in ((COMPLETIONS, "prompt"), (GENERATE, "input_ids")):
        error = error_of(await client.post(path, json=bodies[path]), 400, param)
        assert error["code"] == "context_length_exceeded"
        assert all(str(number) in error["message"] for number in (CONTEXT_LENGTH, prompt_tokens))


async def test_a_small_cache_limits_the_context(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    assert scripted.info is not None
    scripted.info = replace(scripted.info, kv_tokens=64)
    assert (
        "64"
        in error_of(
            await client.post(COMPLETIONS, json={"prompt": [5] * 64}),
            400,
            "prompt",
        )["message"]
    )


async def test_a_chat_beyond_the_context(client: httpx.AsyncClient) -> None:
    long = {"messages": [{"role": "user", "content": "x " * CONTEXT_LENGTH}]}
    assert (
        error_of(await client.post(CHAT, json=long), 400, "messages")["code"]
        == "context_length_exceeded"
    )


@pytest.mark.parametrize("most", [CONTEXT_LENGTH, 32_000])
async def test_a_limit_above_what_fits_is_a_ceiling_on_every_endpoint(
    client: httpx.AsyncClient, scripted: ScriptedEngine, most: int
) -> None:
    chat = SHORT["messages"]
    for path, body in (
        (CHAT, {"messages": chat, "max_tokens": most}),
        (CHAT, {"messages": chat, "max_completion_tokens": most}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": most}),
        ("/v1/responses", {"model": "toy", "input": "Hi", "max_output_tokens": most}),
        ("/v1/messages", {"messages": chat, "max_tokens": most}),
        (GENERATE, {"text": "Hi", "sampling_params": {"max_new_tokens": most}}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (request,) = scripted.requests[-1:]
        assert len(request.output_ids) == CONTEXT_LENGTH - len(request.prompt_ids)


async def test_without_a_limit_an_answer_has_a_documented_length(
    scripted: ScriptedEngine,
) -> None:
    async with client_of(make_app(scripted, default_max_tokens=20)) as client:
        for path, body in (
            (CHAT, SHORT),
            (CHAT, {**SHORT, "min_tokens": 30}),
            ("/v1/responses", {"model": "toy", "input": "Hi"}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
    assert [len(one.output_ids) for one in scripted.requests] == [20, 30, 20]


async def test_a_minimum_that_a_long_prompt_has_no_room_for_ends_with_the_context(
    client: httpx.AsyncClient,
) -> None:
    body = {"prompt": [5] * (CONTEXT_LENGTH - 4), "max_tokens": 50, "min_tokens": 20}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4


async def test_a_chat_with_a_model_without_template() -> None:
    async with client_of(make_app(ScriptedEngine(toy_tokenizer(chat_template=None)))) as client:
        error = error_of(await client.post(CHAT, json=SHORT), 400, "messages")
        assert error["code"] == "no_chat_template"
        assert "--chat-template" in error["message"]
        assert (await client.post(COMPLETIONS, json={"prompt": "Hello"})).status_code == 200


async def test_a_chat_that_becomes_no_text() -> None:
    async with client_of(
        make_app(ScriptedEngine(toy_tokenizer(chat_template="{{ '' }}")))
    ) as client:
        error_of(await client.post(CHAT, json=SHORT), 400, "messages")
