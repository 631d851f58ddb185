"""`--log-requests`: one line for each request, once, at its end, without what users wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, make_app
from scripted_engine import ScriptedEngine

SECRET = "The weather on Tuesday"


@pytest.fixture
async def logged(scripted: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(scripted, log_requests=True)) as client:
        yield client


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The fields of each line, as they come."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.__dict__["fields"])

    logger, keep = logging.getLogger("piecework.requests"), Keep()
    logger.addHandler(keep)
    yield found
    logger.removeHandler(keep)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_line_a_request_with_its_counts_and_times(
    logged: httpx.AsyncClient, lines: list[dict[str, Any]], stream: bool
) -> None:
    body = {"prompt": [[5, 6, 7, 8], [9, 10]], "max_tokens": 3, "stream": stream}
    answer = await logged.post("/v1/completions", json=body)
    (line,) = lines
    assert line["request_id"] == answer.headers["x-request-id"]
    expected = {
        "method": "POST", "path": "/v1/completions", "status": 200, "model": MODEL,
        "prompt_tokens": 6, "completion_tokens": 6, "cached_tokens": 3, "api_key": None,
        "finish_reason": "length",
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert 0 < line["ttft_seconds"] <= line["e2e_seconds"]


async def test_a_prompt_counts_once_for_all_its_samples(
    logged: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "n": 2}
    usage = (await logged.post("/v1/completions", json=body)).json()["usage"]
    (line,) = lines
    for name in ("prompt_tokens", "completion_tokens"):
        assert line[name] == usage[name]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


async def test_what_users_write_is_in_no_line(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "piecework")
    messages = [{"role": "user", "content": SECRET}]
    await logged.post("/v1/chat/completions", json={"messages": messages})
    await logged.post("/v1/chat/completions", json={"messages": messages, "temperature": -1})
    await logged.post("/v1/chat/completions", json={"messages": SECRET})
    await logged.post("/v1/completions", json={"prompt": "Hi", "seed": SECRET})
    assert len(caplog.records) >= 2
    assert SECRET not in str([record.__dict__ for record in caplog.records])


async def test_refusals_have_a_line_and_monitoring_has_none(
    logged: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    for path in ("/live", "/ready", "/metrics"):
        await logged.get(path)
    await logged.post("/v1/completions", json={})
    await logged.get("/nowhere")
    await logged.post("/v1/completions", json={"prompt": "Hi", "model": "other"})
    names = ("status", "path", "model", "error")
    assert [tuple(line[name] for name in names) for line in lines] == [
        (400, "/v1/completions", MODEL, "missing_required_parameter"),
        (404, "/nowhere", MODEL, "invalid_request_error"),
        (404, "/v1/completions", MODEL, "model_not_found"),
    ]
    assert lines[0]["reason"].startswith("prompt: ") and "'other'" in lines[2]["reason"]


async def test_a_client_that_leaves(
    scripted: ScriptedEngine, logged: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    scripted.script.held = True
    asked = asyncio.create_task(logged.post("/v1/completions", json={"prompt": "x"}))
    while not scripted.running:
        await asyncio.sleep(0.002)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    (line,) = lines
    assert (line["status"], line["finish_reason"], line["ttft_seconds"]) == (499, "abort", None)


async def test_a_response_in_the_background_ends_with_its_text(
    scripted: ScriptedEngine, logged: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    scripted.script.held = True
    body = {"model": "toy", "input": "Hi", "background": True, "max_output_tokens": 4}
    answer = await logged.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert lines == []
    scripted.script.held = False
    for _ in range(500):
        if lines:
            break
        await asyncio.sleep(0.002)
    assert [(line["path"], line["completion_tokens"]) for line in lines] == [("/v1/responses", 4)]


async def test_no_line_unasked(
    scripted: ScriptedEngine, client: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
    assert lines == []
