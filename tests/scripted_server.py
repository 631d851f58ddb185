"""A small OpenAI-compatible server whose every answer a test scripts; real HTTP on a free port, in
a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

VOCAB_SIZE = 1000
Body = dict[str, Any]


@dataclass
class ScriptedServer:
    """Tests change its fields. A token is a word with the space before it; `reply` gives the text
    for a prompt.

    `chunk_bytes`: streams are cut into pieces of this many bytes, wherever that is. `fail`: HTTP
    status for the n-th generation request, None to answer it; 0 closes the connection.
    `break_after`: streams end without a word after so many events. `bend` changes each JSON answer
    or event before it is sent. `leaked_tokens`: what /server_info says that requests hold. With
    `accepts_proposals`, /metrics count 4 proposals and 3 accepted ones for each request. `files`
    are there for download.
    """

    reply: Callable[[Any], str] = lambda prompt: " one two three 4"
    delay: float = 0.0
    chunk_bytes: int = 1 << 20
    fail: Callable[[int], int | None] = lambda number: None
    break_after: int | None = None
    bend: Callable[[Any], Any] = lambda data: data
    usage: bool = True
    honour_stops: bool = True
    key: str | None = None
    missing: set[str] = field(default_factory=set)
    leaked_tokens: int = 0
    accepts_proposals: bool = False
    context_length: int = 4096
    files: dict[str, str] = field(default_factory=dict)

    requests: list[tuple[str, Body]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    disconnected: int = 0
    connections: set[Any] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    url: str = ""

    # Endpoints

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/{file}.jsonl", self._file)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            app.router.add_post(path, self._generate)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.missing:
            return _error(404, "no such path")
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "wrong key")
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"vocab_size": VOCAB_SIZE, "context_length": self.context_length})

    async def _server_info(self, request: web.Request) -> web.Response:
        state = {
            "running_requests": self.running,
            "queued_requests": 0,
            "kv_tokens_used": self.leaked_tokens,
            "kv_tokens_cached": 64,
        }
        return web.json_response({"internal_states": [state]})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {float(self.running)}',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            "other 7",
        ]
        if self.accepts_proposals:
            for name, count in (("draft", 4), ("accepted", 3)):
                name = f"vllm:spec_decode_num_{name}_tokens_total"
                lines.append(f'{name}{{engine="0"}} {float(count * len(self.requests))}')
        return web.Response(text="\n".join(lines) + "\n")

    async def _file(self, request: web.Request) -> web.Response:
        return (
            web.Response(text=self.files[request.path])
            if request.path in self.files
            else _error(404, "no such file")
        )

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        number = len(self.requests)
        body = await request.json()
        self.requests.append((request.path, body))
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        status = self.fail(number)
        if status == 0:
            request.transport.abort()
        if status is not None:
            return _error(status, f"scripted {status}")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, Generation(self, request.path, body, f"id-{number}"))
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        if not generation.body.get("stream"):
            async for _ in generation.events():
                pass
            return web.json_response(self.bend(generation.whole()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count, pending = 0, b""
        async for event in generation.events():
            if count == self.break_after:
                return response
            count += 1
            pending = await self._write(response, pending + _sse(self.bend(event)))
        await self._write(response, pending + b"data: [DONE]\n\n", flush=True)
        return response

    async def _write(
        self, response: web.StreamResponse, data: bytes, *, flush: bool = False
    ) -> bytes:
        """Send whole pieces; what is left waits for the next event."""
        while len(data) >= self.chunk_bytes or (flush and data):
            await response.write(data[: self.chunk_bytes])
            data = data[self.chunk_bytes :]
            await asyncio.sleep(0)
        if self.chunk_bytes >= 1 << 20 and data:
            await response.write(data)
            return b""
        return data


class Generation:
    """One request's way to its answer, in any of the three formats."""

    def __init__(self, server: ScriptedServer, path: str, body: Body, request_id: str) -> None:
        self.body = body
        self._server = server
        self._path = path
        self._native = path == "/generate"
        sampling = body["sampling_params"] if self._native else body
        self._id = body.get("rid", request_id) if self._native else request_id
        self._n = sampling.get("n", 1)
        self._prompt = _prompt(body)
        length = sampling["max_new_tokens"] if self._native else sampling["max_tokens"]
        tokens = [f" {word}" for word in server.reply(self._prompt).split()]
        self._finish = "length" if len(tokens) >= length else "stop"
        self._tokens = tokens[:length]
        for stop in sampling.get("stop", []) if server.honour_stops else []:
            before, found, _ = "".join(self._tokens).partition(stop)
            if found:
                self._tokens, self._finish = [f" {word}" for word in before.split()], "stop"
        self._done = [0] * self._n

    async def events(self) -> AsyncIterator[Any]:
        if self._path == "/v1/chat/completions":
            yield {
                "id": self._id,
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": None,
                        "delta": {"role": "assistant", "content": ""},
                    }
                ],
            }
        for at in range(len(self._tokens)):
            await asyncio.sleep(self._server.delay)
            if self._id in self._server.aborted:
                self._tokens, self._finish = self._tokens[:at], "abort"
                break
            for index in range(self._n):
                self._done[index] = at + 1
                yield self._event(index, at, None)
        for index in range(self._n):
            yield self._event(index, None, self._finish)
        if self._server.usage and not self._native:
            yield {"id": self._id, "choices": [], "usage": self._usage()}

    def whole(self) -> Any:
        if self._native:
            sequences = [self._sequence(index, self._finish) for index in range(self._n)]
            return sequences[0] if self._n == 1 else sequences
        choices = [
            self._choice(index, self._tokens, self._finish, "message") for index in range(self._n)
        ]
        answer = {"id": self._id, "choices": choices}
        return {**answer, "usage": self._usage()} if self._server.usage else answer

    def _event(self, index: int, at: int | None, finish: str | None) -> Any:
        if self._native:
            return {**self._sequence(index, finish), "index": index}
        tokens = [] if at is None else [self._tokens[at]]
        return {"id": self._id, "choices": [self._choice(index, tokens, finish, "delta")]}

    def _choice(self, index: int, tokens: list[str], finish: str | None, member: str) -> Any:
        choice: Any = {"index": index, "finish_reason": finish, "logprobs": None}
        asked = self.body.get("logprobs")
        wants = asked is not None and asked is not False
        if self._path == "/v1/completions":
            logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)}
            return {**choice, "text": "".join(tokens), "logprobs": logprobs if wants else None}
        entries = [{"token": token, "logprob": -0.5} for token in tokens]
        return {
            **choice,
            member: {"content": "".join(tokens)},
            "logprobs": {"content": entries} if wants else None,
        }

    def _sequence(self, index: int, finish: str | None) -> Any:
        done = self._done[index]
        meta: Any = {
            "id": self._id,
            "finish_reason": finish and {"type": finish},
            "prompt_tokens": self._prompt_tokens(),
            "completion_tokens": done,
        }
        if self.body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, 1, None]] * done
        return {"text": "".join(self._tokens[:done]), "meta_info": meta}

    def _usage(self) -> Body:
        prompt, completion = self._prompt_tokens(), sum(self._done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt_tokens(self) -> int:
        return len(self._prompt.split()) if isinstance(self._prompt, str) else len(self._prompt)


def _prompt(body: Body) -> Any:
    if "messages" in body:
        content = body["messages"][0]["content"]
        # Behind images.
        return content[-1]["text"] if isinstance(content, list) else content
    return next(body[name] for name in ("prompt", "text", "input_ids") if name in body)


def _sse(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


@contextlib.contextmanager
def serve(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Run `server` on a free port; its `url` says where."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def command(dies_at: int | None = None, *, lingers: bool = False, reply: str | None = None) -> str:
    """A command that runs such a server on the port in place of {port}. Its process ends at a
    request of this number. `lingers`: it only hangs up and closes its port, and stays. `reply` is
    the text of the function.
    """
    end = "hang_up()" if lingers else "os._exit(1)"
    script = f"""
import os, re, signal, sys, time
def hang_up():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.closerange(3, 1000)
    time.sleep(600)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from aiohttp import web
from scripted_server import ScriptedServer
server = ScriptedServer(fail=lambda number: {end} if number == {dies_at} else None)
server.reply = {reply or "server.reply"}
web.run_app(server.app(), host="127.0.0.1", port=int(sys.argv[1]))
"""
    return shlex.join([sys.executable, "-c", script, "{port}"])
