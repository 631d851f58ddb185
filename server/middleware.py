"""ASGI middleware of every server: HEAD is answered as GET without a body, and an unforeseen error
like any other.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import answer_error


class HeadRequests:
    """Routes know GET alone; the answer to HEAD has the same status and headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send(
                {**message, "body": b""} if message["type"] == "http.response.body" else message
            )

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class UnforeseenErrors:
    """Answers what nobody foresaw inside of the middleware that adds headers to answers, and raises
    it for the log.

    Starlette's own handler of `Exception` would do so outside of all middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if scope["type"] == "http" and not started:
                response = await answer_error(Request(scope), error)
                await response(scope, receive, send)
            raise
