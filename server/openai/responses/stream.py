"""Streams of responses: named events with sequence numbers, in OpenAI's order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...core.answers import Answer
from ...core.errors import ApiError, ClientGone
from ...serving.collector import Update, unless_client_goes
from ...serving.sse import KeepAlive, named_event
from .job import Job
from .live import LiveResponse
from .output import ResponseEvent

_PART = 2**16  # Bytes of events that are sent at once. The last event may exceed them.
_LAST = {"completed": "completed", "failed": "failed"}


class ErrorEvent(Answer, kw_only=True):
    """The event that ends a stream without a response."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None
    sequence_number: int


class ResponseEvents:
    """Encodes the events of one response. An event's place is its sequence number."""

    def __init__(self, answer: LiveResponse) -> None:
        self._answer = answer
        self._count = 0
        self._has_begun = False

    def opening(self, *kinds: str) -> list[bytes]:
        """Return the events that come before any token."""
        return self._written(
            ResponseEvent(type=f"response.{kind}", response=self._answer.as_answer())
            for kind in kinds
        )

    def encode(self, updates: list[Update]) -> list[bytes]:
        """Return the events of new output."""
        return self.write(event for _, output in updates for event in self._answer.push(output))

    def write(self, events: Iterable[ResponseEvent]) -> list[bytes]:
        """Return the given events, after those that come before all others."""
        before = []
        if not self._has_begun:
            self._has_begun, self._answer.status = True, "in_progress"
            before = self.opening(*(["created"] * (self._count == 0)), "in_progress")
        return before + self._written(events)

    def last(self) -> list[bytes]:
        return self.opening(_LAST.get(self._answer.status, "incomplete"))

    def _written(self, events: Iterable[ResponseEvent]) -> list[bytes]:
        written = []
        for event in events:
            event.sequence_number = self._count
            written.append(named_event(event.type, event))
            self._count += 1
        return written


class ResponseWriter:
    """An `EventWriter` of one response. `at_end` is called once, before the last event."""

    def __init__(self, answer: LiveResponse, at_end: Callable[[], None]) -> None:
        self._answer = answer
        self._at_end = at_end
        self._events = ResponseEvents(answer)

    def events(self, updates: list[Update]) -> bytes:
        return b"".join(self._events.encode(updates))

    def end(self) -> bytes:
        self._at_end()
        return b"".join(self._events.last())

    def error(self, error: ApiError) -> bytes:
        begun = self.events([])
        self._answer.fail(error)
        return begun + self.end()


class JobStream(Response):
    """Sends the events of a job from number `begin` on as they arrive. The job does not wait."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, begin: int, keep_alive: KeepAlive) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._job, self._events = job, job.events
        self._place, self._keep_alive = begin, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_goes(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        """Send the events. If the job is a foreground response, it ends with its client."""
        try:
            await self._follow(send)
        finally:
            if self._job.ends_with_client and self._job.task is not None:
                self._job.task.cancel()

    async def _follow(self, send: Send) -> None:
        job = self._job
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        is_over = False
        while not is_over:
            news, is_over = job.news, job.is_cut or not job.goes_on
            body = self._part()
            has_more = self._place < len(self._events)
            if job.is_cut:
                message = "The stream is too long to be kept; fetch the response instead."
                body = named_event(
                    "error",
                    ErrorEvent(
                        code="stream_too_long",
                        message=message,
                        param=None,
                        sequence_number=self._place,
                    ),
                )
            elif has_more:
                is_over = False
            await send({"type": "http.response.body", "body": body, "more_body": not is_over})
            if not is_over and not has_more:
                await self._wait(news, send)

    async def _wait(self, news: asyncio.Event, send: Send) -> None:
        """Wait for new events, and keep the stream open meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._keep_alive.seconds):
                    await news.wait()
                    return
            body = self._keep_alive.content
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _part(self) -> bytes:
        """Return the next events, at most about `_PART` bytes because many slow readers may
        wait.
        """
        events, size = [], 0
        while self._place < len(self._events) and size < _PART:
            events.append(self._events[self._place])
            size += len(events[-1])
            self._place += 1
        return b"".join(events)
