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
    [(17, CONTEXT_LENGTH - 16), (1, CONTEXT_LENGTH), (None, CONTEXT_LENGTH), (5, 9000)],
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
        numbers = [
            CONTEXT_LENGTH,
            prompt_tokens,
            *([] if max_tokens is None else [max_tokens, prompt_tokens + max_tokens]),
        ]
        assert all(str(number) in error["message"] for number in numbers)


async def test_a_small_cache_limits_the_context(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    assert scripted.info is not None
    scripted.info = replace(scripted.info, kv_tokens=64)
    assert (
        "64"
        in error_of(
            await client.post(COMPLETIONS, json={"prompt": [5] * 60, "max_tokens": 5}),
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
    assert error_of(
        await client.post(CHAT, json={**SHORT, "max_tokens": CONTEXT_LENGTH}), 400, "messages"
    )


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
