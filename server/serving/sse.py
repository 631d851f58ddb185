"""Server-sent events: the outputs of sequences become one HTTP response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime.tokenizer.output_processor import RequestOutput
from ..core.answers import Answer
from ..core.errors import ApiError, ClientGone, as_api_error
from .collector import Collector, Update, unless_client_goes
from .state import Serving

CONNECTION = "piecework.connection"  # Key of the connection in a request's scope.
BEGIN_SECONDS = 5.0  # Seconds for which the status line of a stream waits for the first output.
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


def event(content: Answer | msgspec.Raw) -> bytes:
    """Return one server-sent event with JSON data."""
    return b"data: " + encode_json(content) + b"\n\n"


def named_event(name: str, content: Answer | msgspec.Raw) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\n" % name.encode() + event(content)


class KeepAlive:
    """What a silent stream sends, because proxies and clients close a silent connection.

    Attributes:
        seconds: Seconds of silence after which `content` is sent. None if it is never sent.
        begin: Seconds for which the status line waits for the first output.
        content: A comment or an event that clients ignore. Empty if it is never sent.
    """

    def __init__(self, interval: float, content: bytes = COMMENT) -> None:
        """`interval` is the setting `sse_ping_interval`, in seconds. 0 means never."""
        self.seconds = interval or None
        self.begin = min(BEGIN_SECONDS, interval or BEGIN_SECONDS)
        self.content = content if interval else b""


class Connection(Protocol):
    """A connection to which an answer can be written without ASGI's layers.

    Those layers cost as much as all other work for a token.
    """

    @property
    def can_write(self) -> bool:
        """Whether the client reads fast enough."""
        ...

    def write_part(self, body: bytes) -> None:
        """Write a part of the answer that is not the last."""
        ...

    def took(self, size: int) -> None:
        """Count `size` bytes of the arriving body as freed."""
        ...

    def holds(self, size: int) -> None:
        """Count `size` more bytes as held while the body is arriving."""
        ...


class EventWriter(Protocol):
    """Encodes updates of sequences as events."""

    def events(self, updates: list[Update]) -> bytes: ...

    def end(self) -> bytes:
        """Return the bytes that follow after all sequences have ended."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        ...


class EventStream(Response):
    """The response that runs the sequences of `collector` and sends their events.

    An error before the first output is an HTTP error if it occurs before the status line is sent.
    A later error becomes the last event. `ping` keeps a silent stream open. If the client
    disconnects, the sequences are aborted. Outputs after the first event are written where they
    arrive if the client reads. Otherwise they are merged and wait for this task.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        collector: Collector,
        writer: EventWriter,
        serving: Serving,
        *,
        ping: bytes = COMMENT,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._collector = collector
        self._writer = writer
        self._metrics = serving.metrics
        self._keep_alive = KeepAlive(serving.config.sse_ping_interval, ping)
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_goes(receive, self._run(scope.get(CONNECTION), send))

    async def _run(self, connection: Connection | None, send: Send) -> None:
        writer, keep_alive = self._writer, self._keep_alive

        def write(index: int, output: RequestOutput) -> bool:
            if connection is None or not connection.can_write:
                return False
            if body := writer.events([(index, output)]):
                self._last_sent = time.monotonic()
                connection.write_part(body)
            return True

        with self._collector as collector:
            updates = await _news(collector, keep_alive.begin)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            self._last_sent = time.monotonic()
            try:
                while updates is None or updates:
                    # Output without an event, such as a part of a call, does not end the silence.
                    if body := keep_alive.content if updates is None else writer.events(updates):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                        self._last_sent = time.monotonic()
                    if updates is not None:
                        collector.take = write
                    updates = await self._news(collector)
                last = writer.end()
            except Exception as error:
                known = as_api_error(error)
                self._metrics.count_error(known.type)
                last = writer.error(known)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _news(self, collector: Collector) -> list[Update] | None:
        """Return what is new, or None if it is time to keep the stream open."""
        if (seconds := self._keep_alive.seconds) is None:
            return await collector.next()
        while (left := self._last_sent + seconds - time.monotonic()) > 0:
            if (updates := await _news(collector, left)) is not None:
                return updates
        return None


async def _news(collector: Collector, seconds: float) -> list[Update] | None:
    """Return what is new, or None if nothing is new within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await collector.next()
    except TimeoutError:
        return None
