"""ASGI middleware that names each request: `X-Request-Id` is echoed where the client sent a usable
one, else made.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_USABLE = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """Puts the id into `request.state.request_id` and on the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _USABLE.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
