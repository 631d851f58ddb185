"""The answer of a stream whose model is being loaded: kept open until the model answers.

stream = WaitingStream(scope, send)
place = await stream.wait(entering)
await app(scope, receive, stream.send)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from starlette.types import Message, Scope, Send

from ..core.anthropic_errors import is_messages
from ..core.errors import ERROR, REQUEST_ID, ApiError
from ..serving.sse import BEGIN_SECONDS, COMMENT, QUIET_SECONDS, event, named_event

T = TypeVar("T")
STREAMED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
)
"""Paths whose answer is a stream of events if the body has `"stream": true`."""
_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"))  # fmt: skip
_PING = named_event("ping", {"type": "ping"})


class WaitingStream:
    """The answer to one request. The status line waits `BEGIN_SECONDS` for the model. After that an
    error is the stream's only event, because the status 200 has been sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.is_open = False
        self._error: bytearray | None = None

    async def wait(self, model: Awaitable[T]) -> T:
        """Return what `model` gives. Until then the client gets a sign that the stream goes on."""
        waiting = asyncio.ensure_future(model)
        seconds = BEGIN_SECONDS
        try:
            while not (await asyncio.wait((waiting,), timeout=seconds))[0]:
                await self._keep_open()
                seconds = QUIET_SECONDS
            return waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _keep_open(self) -> None:
        if not self.is_open:
            self.is_open = True
            headers = list(_HEADERS)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = _PING if is_messages(self._scope["path"]) else COMMENT
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def send(self, message: Message) -> None:
        """Take a message of the model's answer."""
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
                await self._end(msgspec.json.decode(self._error))

    async def fail(self, error: ApiError) -> None:
        """End the open stream with an error."""
        self._scope[ERROR] = error
        await self._end(error.told(self._scope["path"], self._scope.get(REQUEST_ID, ""))[1])

    async def _end(self, told: dict[str, object]) -> None:
        """`told`: the JSON object of an error, in the shape of the request's endpoint family."""
        path = self._scope["path"]
        if path == "/v1/responses":
            detail = told["error"]
            assert isinstance(detail, dict)
            told = {**detail, "type": "error", "sequence_number": 0}
        named = path == "/v1/responses" or is_messages(path)
        body = named_event("error", told) if named else event(told)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
