"""What a replica makes of a request, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from piecework.server.ray_serve.autoscaling import QUEUED, RUNNING, queue_length
from piecework.server.ray_serve.replica import ask
from piecework.server.ray_serve.request import ForwardedRequest, ResponseStart, routed_text

HEADERS = [(b"content-type", b"text/plain")]


def request(body: bytes = b"{}") -> ForwardedRequest:
    return ForwardedRequest(
        method="POST",
        path="/v1/completions",
        query=b"a=1",
        headers=[],
        body=body,
        client=("127.0.0.1", 5),
        prompt="x",
    )


async def start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 201, "headers": HEADERS})


async def test_parts_arrive_in_order_while_the_application_still_writes() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await start(send)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": scope["query_string"]})

    answer = ask(app, request(b"one"))
    assert await anext(answer) == ResponseStart(201, HEADERS)
    assert await anext(answer) == b"one"
    go_on.set()
    assert [part async for part in answer] == [b"a=1"]


async def test_a_request_that_is_given_up_finds_its_client_gone() -> None:
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await start(send)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            heard.append(await receive())

    answer = ask(app, request())
    await anext(answer)
    await answer.aclose()  # type: ignore[attr-defined]
    assert heard == [{"type": "http.disconnect"}]


async def test_a_request_that_is_given_up_ends_though_nobody_takes_what_was_written() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await start(send)
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    answer = ask(app, request())
    await anext(answer)
    await asyncio.sleep(0)
    await asyncio.wait_for(answer.aclose(), 5)  # type: ignore[attr-defined]


async def test_what_the_application_raises_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        [part async for part in ask(app, request())]


async def test_an_answer_that_is_raised_too_for_the_log_stays_an_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"told"})
        raise KeyError("broken")

    assert [part async for part in ask(app, request())] == [ResponseStart(201, HEADERS), b"told"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"messages": []}',
        b"{" * 100_000,
        b'{"prompt": "\xff"}',
        b'{"temperature": 1}',
        b'{"messages": [' + b"[]," * 200_000 + b"[]]}",
    ],
)
def test_a_body_without_a_prompt_is_routed_by_its_path(body: bytes) -> None:
    assert routed_text("/v1/chat/completions", body) == "/v1/chat/completions"


def test_prompts_that_begin_alike_are_routed_by_texts_that_begin_alike() -> None:
    def text(last: str) -> str:
        system, user = "be brief, " * 50, f'[{{"role": "user", "content": "{last}"}}]'
        return routed_text("/", f'{{"messages": {user}, "system": "{system}"}}'.encode())

    one, other = text("one"), text("other")
    assert one != other
    assert one[:500] == other[:500]
    assert len(text("long " * 100_000)) <= 2**14


def context(metrics: dict[str, dict[str, float]], waiting: float = 0) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=metrics,
        total_queued_requests=waiting,
        target_num_replicas=3,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0),
    )


def test_replicas_follow_the_sequences_that_engines_run_and_queue() -> None:
    metrics = {RUNNING: {"a": 16.0, "b": 16.0}, QUEUED: {"a": 0.0, "b": 4.0}}
    assert queue_length(context(metrics, waiting=4)) == (5.0, {})
    assert queue_length(context({RUNNING: {"a": 0.0}, QUEUED: {"a": 0.0}})) == (0.0, {})


def test_replicas_stay_until_engines_have_told_of_themselves() -> None:
    assert queue_length(context({})) == (3, {})
