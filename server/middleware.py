"""ASGI middleware for all answers: request ids, HEAD and unexpected errors."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .core.anthropic_errors import is_messages
from .core.errors import REQUEST_ID, answer_error

_USABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class EveryAnswer:
    """Adds request ids, answers HEAD as GET without a body, and formats unexpected errors.

    `X-Request-Id` is the client's id if that is valid. Anthropic's endpoints also get Anthropic's
    header. Unexpected errors are raised again for the log. Starlette's own handler of `Exception`
    is outside of all middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or REQUEST_ID in scope:  # a fleet has already added an id
            await self._app(scope, receive, send)
            return
        request_id, started, head = b"", False, scope["method"] == "HEAD"
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value
                break
        if not _USABLE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()
        as_messages = is_messages(scope["path"], scope["headers"])
        names = (b"x-request-id", b"request-id") if as_messages else (b"x-request-id",)

        async def send_on(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    *((name, request_id) for name in names),
                ]
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app({**scope, "method": "GET"} if head else scope, receive, send_on)
        except Exception as error:
            if not started:
                response = await answer_error(Request(scope), error)
                await response(scope, receive, send_on)
            raise
