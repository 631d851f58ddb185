"""Server-sent events: sequences in, one HTTP response out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime.tokenizer.output_processor import RequestOutput
from ..core.errors import ApiError, ClientGone, as_api_error
from ..observability.metrics import Metrics
from .collector import Collector, Update, unless_client_goes

CONNECTION = "piecework.connection"
"""Of a request's scope: the connection that it came on."""
BEGIN_SECONDS = 5.0
"""Seconds for which a stream's status line waits for the first output."""
QUIET_SECONDS = 15.0
"""Seconds after which a stream that has nothing to tell says that it goes on."""
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + encode_json(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """One with a name."""
    return b"event: %b\n" % name.encode() + event(content)


class Connection(Protocol):
    """Where an answer can be written without the way through ASGI's layers, which costs as much as
    all else about a token.
    """

    @property
    def can_write(self) -> bool:
        """The client reads."""
        ...

    def write_part(self, body: bytes) -> None:
        """A part of the answer that is under way, which is no last one."""
        ...

    def took(self, size: int) -> None:
        """Count `size` bytes of the body that is arriving as no longer held."""
        ...

    def holds(self, size: int) -> None:
        """Count `size` more bytes as held, while the body is still arriving."""
        ...


class EventWriter(Protocol):
    """Turns what is new about sequences into events."""

    def events(self, updates: list[Update]) -> bytes: ...

    def end(self) -> bytes:
        """What follows once all sequences have ended."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that goes no further."""
        ...


class EventStream(Response):
    """The response that runs the sequences of `collector` and sends their events.

    An error before the first output is an HTTP error, if it comes within `BEGIN_SECONDS`; a later
    one becomes the last event. Proxies and clients close a connection that is silent for long, so
    that a comment, or behind the first event `keep_alive`, is sent after `QUIET_SECONDS`. A client
    that goes away, at whatever moment, ends the sequences. What comes after the first event is
    written where it comes, if the client reads; else it waits for this task, merged.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        collector: Collector,
        writer: EventWriter,
        metrics: Metrics,
        *,
        keep_alive: bytes = COMMENT,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._collector = collector
        self._writer = writer
        self._metrics = metrics
        self._keep_alive = keep_alive
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_goes(receive, self._run(scope.get(CONNECTION), send))

    async def _run(self, connection: Connection | None, send: Send) -> None:
        writer, quiet = self._writer, COMMENT

        def write(index: int, output: RequestOutput) -> bool:
            if connection is None or not connection.can_write:
                return False
            if body := writer.events([(index, output)]):
                self._last_sent = time.monotonic()
                connection.write_part(body)
            return True

        with self._collector as collector:
            updates = await _news(collector, BEGIN_SECONDS)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                while updates is None or updates:
                    body = quiet if updates is None else writer.events(updates)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._last_sent = time.monotonic()
                    if updates is not None:
                        collector.take, quiet = write, self._keep_alive
                    updates = await self._news(collector)
                last = writer.end()
            except Exception as error:
                known = as_api_error(error)
                self._metrics.count_error(known.type)
                last = writer.error(known)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _news(self, collector: Collector) -> list[Update] | None:
        """What is new; None once nothing was sent for `QUIET_SECONDS`."""
        while (left := self._last_sent + QUIET_SECONDS - time.monotonic()) > 0:
            if (updates := await _news(collector, left)) is not None:
                return updates
        return None


async def _news(collector: Collector, seconds: float) -> list[Update] | None:
    """What is new; None where nothing is for so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await collector.next()
    except TimeoutError:
        return None
