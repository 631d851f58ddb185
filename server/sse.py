"""Server-sent events: sequences in, one HTTP response out."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..runtime.tokenizer.output_processor import RequestOutput
from .collector import Collector, Update, unless_client_goes
from .errors import ApiError, ClientGone, as_api_error
from .metrics import Metrics

CONNECTION = "piecework.connection"
"""Of a request's scope: the connection that it came on."""
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
        """So many bytes of the body that is arriving are held no longer."""
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

    Its status line waits for the first output, so that an error before that is an HTTP error; a
    later one becomes the last event. A client that goes away, at whatever moment, ends the
    sequences. What comes after the first event is written where it comes, if the client reads; else
    it waits for this task, merged.
    """

    media_type = "text/event-stream"

    def __init__(self, collector: Collector, writer: EventWriter, metrics: Metrics) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._collector = collector
        self._writer = writer
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_goes(receive, self._run(scope.get(CONNECTION), send))

    async def _run(self, connection: Connection | None, send: Send) -> None:
        writer = self._writer

        def write(index: int, output: RequestOutput) -> bool:
            if connection is None or not connection.can_write:
                return False
            connection.write_part(writer.events([(index, output)]))
            return True

        with self._collector as collector:
            updates = await collector.next()
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                while updates:
                    body = writer.events(updates)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    collector.take = write
                    updates = await collector.next()
                last = writer.end()
            except Exception as error:
                known = as_api_error(error)
                self._metrics.count_error(known.type)
                last = writer.error(known)
            await send({"type": "http.response.body", "body": last, "more_body": False})
