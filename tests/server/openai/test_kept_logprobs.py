"""What answers hold of log-probabilities is bounded, whatever a small body asks for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine

from piecework.server.openai import logprobs
from piecework.server.serving import collector, kept_logprobs, request_builder

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
TOP = {CHAT: "top_logprobs", COMPLETIONS: "logprobs", NATIVE: "top_logprobs_num"}


def body_of(path: str, *, n: int, top: int, tokens: int | None) -> dict[str, Any]:
    length = {} if tokens is None else {"max_tokens": tokens}
    if path == NATIVE:
        sampling = {"n": n, "max_new_tokens": tokens}
        asked = {"return_logprob": True, TOP[path]: top}
        return {"text": "Hi", "sampling_params": {**sampling, "ignore_eos": True}, **asked}
    asked = {"n": n, TOP[path]: top, "ignore_eos": True, **length}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, **asked}
    return {"prompt": "Hi", **asked}


@pytest.mark.parametrize("path", TOP)
async def test_a_request_for_too_many_is_refused_before_it_runs(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    body = body_of(path, n=128, top=100, tokens=64)
    assert error_of(await client.post(path, json=body), 400, TOP[path])["code"] == (
        "too_many_logprobs"
    )
    assert scripted.requests == []


@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_an_answer_without_a_length_ends_when_it_holds_too_many(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr(kept_logprobs, "MAX_LOGPROBS", 100)
    body = body_of(path, n=2, top=4, tokens=None)
    answer = await client.post(path, json=body)
    assert error_of(answer, 400, "logprobs")["code"] == "too_many_logprobs"
    assert scripted.running == set()


async def test_a_stream_that_is_read_has_as_many_as_it_likes(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logprobs, "MAX_LOGPROBS", 100)
    body = body_of(CHAT, n=1, top=4, tokens=60)
    answer = await client.post(CHAT, json={**body, "stream": True})
    assert answer.text.count('"top_logprobs"') >= 55 and "error" not in answer.text


async def test_of_all_answers_the_largest_ends_first(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(scripted)
    serving = app.state.serving
    monkeypatch.setattr(kept_logprobs, "MAX_KEPT_LOGPROBS", 400)
    scripted.script.delay = 0.001
    async with client_of(app) as client:
        small, large = await asyncio.gather(
            client.post(COMPLETIONS, json=body_of(COMPLETIONS, n=1, top=1, tokens=40)),
            client.post(COMPLETIONS, json=body_of(COMPLETIONS, n=4, top=9, tokens=40)),
        )
    assert small.status_code == 200
    assert error_of(large, 503)["code"] == "too_many_logprobs"
    assert serving.kept_logprobs.total == 0


async def test_log_probabilities_of_prompts_count_as_well(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [[5] * 60] * 2, "max_tokens": 1, "echo": True, "logprobs": 4}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    monkeypatch.setattr(kept_logprobs, "MAX_KEPT_LOGPROBS", 400)
    answer = await client.post(COMPLETIONS, json=body)
    assert error_of(answer, 503)["code"] == "too_many_logprobs"


@pytest.mark.parametrize("path", [COMPLETIONS, NATIVE])
async def test_a_stream_does_not_keep_the_event_loop_with_those_of_a_prompt(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(request_builder, "MAX_STREAMED_PROMPT_LOGPROBS", 100)
    asked = {"echo": True} if path == COMPLETIONS else {"logprob_start_len": 0}
    body = {**body_of(path, n=1, top=9, tokens=1), **asked}
    body[{COMPLETIONS: "prompt", NATIVE: "input_ids"}[path]] = [5] * 60
    body.pop("text", None)
    assert (await client.post(path, json=body)).status_code == 200
    refused = await client.post(path, json={**body, "stream": True})
    assert "leave out stream" in error_of(refused, 400, TOP[path])["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_large_answers_are_written_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(collector, "_WRITTEN_AT_ONCE", 100)
    threads = set()
    encode = logprobs._encoded

    def seen(content: Any) -> Any:
        threads.add(threading.current_thread())
        return encode(content)

    monkeypatch.setattr(logprobs, "_encoded", seen)
    body = body_of(path, n=2, top=4, tokens=20)
    assert (await client.post(path, json=body)).status_code == 200
    assert threads and threading.current_thread() not in threads
