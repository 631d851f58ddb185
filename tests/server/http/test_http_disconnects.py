"""A client that goes away, at whatever moment, ends its sequences; one that reads slowly finds them
merged.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import threading
import weakref
from contextlib import closing
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, make_app, post, wait_for
from scripted_engine import ScriptedEngine
from starlette.types import Message

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.tokenizer.output_processor import RequestState
from piecework.server.engine.state import QueueFull
from piecework.server.serving.collector import Collector

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 200, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "n": 2},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 200, "n": 2}},
}


def reset(connection: socket.socket) -> None:
    """Close without a goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["queued", "running"])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
def test_leaving_ends_the_sequences(
    url: str, scripted: ScriptedEngine, path: str, stream: bool, moment: str, leave: Any
) -> None:
    scripted.script.held = moment == "queued"
    scripted.script.delay = 0.02
    connection = post(url, path, {**BODIES[path], "stream": stream})
    wait_for(lambda: len(scripted.running) == 2)
    if moment == "running" and stream:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    leave(connection)
    wait_for(lambda: not scripted.running)
    assert len(scripted.dropped) == 2
    assert (
        f'piecework:num_aborted_requests_total{{model_name="{MODEL}"}} 2.0'
        in httpx.get(f"{url}/metrics").text
    )


def test_leaving_in_the_middle_of_the_body(url: str, scripted: ScriptedEngine) -> None:
    address = httpx.URL(url)
    with closing(socket.create_connection((address.host, address.port or 80))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert httpx.get(f"{url}/health").status_code == 200
    assert scripted.requests == []


def test_others_go_on_when_one_leaves(url: str, scripted: ScriptedEngine) -> None:
    scripted.script.delay = 0.01
    leaver = post(url, "/v1/completions", {"prompt": "Hello", "max_tokens": 200})
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            httpx.post(
                f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 20}, timeout=20
            )
        )
    )
    thread.start()
    wait_for(lambda: len(scripted.running) == 2)
    leaver.close()
    thread.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 20
    wait_for(lambda: not scripted.running)


def test_a_connection_serves_many_requests(url: str, scripted: ScriptedEngine) -> None:
    with httpx.Client(base_url=url) as client:
        for stream in (False, True, False):
            assert (
                client.post(
                    "/v1/completions", json={"prompt": "Hello", "stream": stream}
                ).status_code
                == 200
            )
    assert scripted.dropped == []


def test_too_large_a_body_does_not_break_the_connection(url: str) -> None:
    with httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(2):
            assert (
                client.post("/v1/completions", json={"prompt": "x" * 10_000_000}).status_code == 413
            )
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


async def test_a_slow_reader_finds_the_pieces_merged(scripted: ScriptedEngine) -> None:
    serving = make_app(scripted).state.serving
    params = SamplingParams(max_new_tokens=50, logprobs=0, seed=1)
    requests = [RequestState(f"r-{i}", [5, 6], params, scripted.tokenizer) for i in range(2)]
    with Collector(serving, requests) as collector:
        first = await collector.next()
        while scripted.running:
            await asyncio.sleep(0.005)
        rest = await collector.next()
        assert await collector.next() == []
    assert len(rest) == 2
    for index in range(2):
        outputs = [output for at, output in [*first, *rest] if at == index]
        assert len(outputs) <= 2
        assert sum(len(output.token_ids) for output in outputs) == 50
        assert sum(len(output.logprobs or []) for output in outputs) == 50
        assert outputs[-1].finish_reason == "length"
        assert "".join(output.text for output in outputs) == scripted.tokenizer.decode(
            [i for output in outputs for i in output.token_ids]
        )


async def test_a_client_whose_connection_is_stuck_stalls_nothing(scripted: ScriptedEngine) -> None:
    """The first body message is not taken: the engine must run to the end all the same, and leaving
    must end the request.
    """
    app = make_app(scripted)
    body = json.dumps({"prompt": "Hello", "max_tokens": 50, "stream": True}).encode()
    gone, sent = asyncio.Event(), []
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "root_path": "", "query_string": b"", "path": "/v1/completions",
        "raw_path": b"/v1/completions", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    task = asyncio.create_task(app(scope, receive, send))
    while not sent or scripted.running:
        await asyncio.sleep(0.005)
    assert scripted.dropped == []
    gone.set()
    await asyncio.wait_for(task, 5)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_cancelling_the_server_ends_the_sequences(scripted: ScriptedEngine) -> None:
    serving = make_app(scripted).state.serving
    scripted.script.held = True
    request = RequestState("r", [5], SamplingParams(), scripted.tokenizer)

    async def run() -> None:
        with Collector(serving, [request]) as collector:
            await collector.all()

    task = asyncio.create_task(run())
    while not scripted.running:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scripted.dropped == ["r"]
    assert serving.live_rids == set()


async def test_a_request_that_is_over_holds_no_memory(scripted: ScriptedEngine) -> None:
    """Not even until the garbage collector runs, which big lists of token ids do not bring
    about.
    """
    serving = make_app(scripted).state.serving
    params = SamplingParams(max_new_tokens=2, seed=1)
    gc.disable()
    try:
        request = RequestState("r", [5, 6], params, scripted.tokenizer)
        alive = weakref.ref(request)
        with Collector(serving, [request]) as collector:
            await collector.all()
        del request, collector
        scripted.requests.clear()
        await asyncio.sleep(0.05)
        assert alive() is None
    finally:
        gc.enable()


async def test_samples_that_find_no_room_are_no_clients_that_left(scripted: ScriptedEngine) -> None:
    serving = make_app(scripted).state.serving
    scripted.script.room = 0
    params = SamplingParams(max_new_tokens=2, seed=1)
    requests = [RequestState(f"r-{i}", [5, 6], params, scripted.tokenizer) for i in range(3)]
    with pytest.raises(QueueFull), Collector(serving, requests):
        pass
    lines = serving.metrics.exposition().decode().splitlines()
    counts = [
        float(line.split()[-1])
        for name in ("num_requests_total", "num_aborted_requests_total")
        for line in lines
        if line.startswith(f"piecework:{name}{{")
    ]
    assert counts == [3, 0]
