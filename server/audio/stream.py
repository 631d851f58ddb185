"""A transcription as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.errors import ClientGone, as_api_error
from ..serving.collector import unless_client_goes
from ..serving.sse import DONE, KeepAlive, event
from .formats import TextDelta, TextDone, usage_of
from .state import SpeechServing
from .transcript import Written

_PING_SECONDS = 15.0


class TranscriptStream(Response):
    """The response that writes the text of a file and sends each segment as a delta.

    An error before the first segment is an HTTP error if it occurs before the status line is sent.
    A later error becomes the last event. If the client disconnects, the text ends. `stack` is
    closed after the answer.
    """

    media_type = "text/event-stream"

    def __init__(
        self, written: AsyncGenerator[Written], serving: SpeechServing, stack: AsyncExitStack
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._written, self._serving, self._stack = written, serving, stack
        self._keep_alive = KeepAlive(_PING_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            with contextlib.suppress(ClientGone):
                await unless_client_goes(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        with self._serving.measured():
            async with aclosing(self._events()) as events:
                first = asyncio.ensure_future(anext(events, None))
                try:
                    await asyncio.wait([first], timeout=self._keep_alive.begin)
                    if first.done():
                        first.result()  # Raises before the status line is sent.
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    last = await self._send_events(send, events, first)
                finally:
                    # A generator that is running cannot be closed.
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(
        self, send: Send, events: AsyncGenerator[bytes], first: asyncio.Future[bytes | None]
    ) -> bytes:
        """Send all events, and comments while there is none. Return the last event."""
        waiting = first
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=self._keep_alive.seconds)
                body = waiting.result() if done else self._keep_alive.content
                if body is None:
                    return DONE
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if done:
                    waiting = asyncio.ensure_future(anext(events, None))
        except Exception as error:
            known = as_api_error(error)
            self._serving.metrics.count_error(known.type)
            return event(known.answer())
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _events(self) -> AsyncGenerator[bytes]:
        """Yield a delta for each segment, and the whole text at the end."""
        texts: list[str] = []
        seconds = 0.0
        async with aclosing(self._written) as written:
            async for part in written:
                for each in part.segments:
                    text = each.segment.text if texts else each.segment.text.lstrip()
                    texts.append(text)
                    yield event(TextDelta(delta=text))
                seconds = part.seconds
        yield event(TextDone(text="".join(texts), usage=usage_of(seconds)))
