"""Keeps the answer of a streamed request open while its model is being loaded.

stream = WaitingStream(scope, send, sse_ping_interval)
place = await stream.wait(entering)
await app(scope, receive, stream.send)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from starlette.types import Message, Scope, Send

from ..anthropic.messages import PING
from ..core.answers import LINES, ErrorAnswer
from ..core.anthropic_errors import is_messages
from ..core.errors import ERROR, REQUEST_ID, ApiError
from ..core.ollama_errors import is_ollama
from ..ollama.generation import BLANK
from ..openai.responses.stream import ErrorEvent
from ..serving.sse import COMMENT, KeepAlive, event, named_event

T = TypeVar("T")
# Paths whose answer is a stream of events if the body has `"stream": true`.
STREAMED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate",
     "/api/chat", "/api/generate", "/completion", "/completions", "/infill",
     "/v1/audio/transcriptions"}
)  # fmt: skip
_EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class WaitingStream:
    """The answer to one request.

    The status line waits some seconds for the model. After that an error is sent as the stream's
    only event, because status 200 has been sent.
    """

    def __init__(self, scope: Scope, send: Send, sse_ping_interval: float) -> None:
        self._scope, self._send = scope, send
        path = scope["path"]
        self._media, sign = _EVENTS, PING if is_messages(path) else COMMENT
        if is_ollama(path):
            self._media, sign = LINES.encode(), BLANK
        self._keep_alive = KeepAlive(sse_ping_interval, sign)
        self.is_open = False
        self._error: bytearray | None = None

    async def wait(self, model: Awaitable[T]) -> T:
        """Return the result of `model`. Meanwhile the client gets comments or pings."""
        waiting = asyncio.ensure_future(model)
        seconds: float | None = self._keep_alive.begin
        try:
            while not (await asyncio.wait((waiting,), timeout=seconds))[0]:
                if not self.is_open:
                    self.is_open = True
                    headers = [(b"content-type", self._media), *_HEADERS]
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": headers}
                    )
                body = self._keep_alive.content
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                seconds = self._keep_alive.seconds
            return waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def send(self, message: Message) -> None:
        """Send a message of the model's answer."""
        if not self.is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            if message["status"] != 200:
                self._error = bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(bytes(self._error))

    async def fail(self, error: ApiError) -> None:
        """End the open stream with an error."""
        self._scope[ERROR] = error
        _, answer = error.answer_for(self._scope["path"], self._scope.get(REQUEST_ID, ""))
        await self._end(msgspec.json.encode(answer))

    async def _end(self, error: bytes) -> None:
        """Send an error and end the stream. `error` is JSON in the form of the endpoint."""
        path = self._scope["path"]
        if path == "/v1/responses":
            detail = msgspec.json.decode(error, type=ErrorAnswer).error
            last = ErrorEvent(
                code=detail.code, message=detail.message, param=detail.param, sequence_number=0
            )
            data = named_event("error", last)
        elif is_ollama(path):
            data = error + b"\n"
        elif is_messages(path):
            data = named_event("error", msgspec.Raw(error))
        else:
            data = event(msgspec.Raw(error))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
