"""Sends a request to the application without a connection.

The request passes through the same checks, keys and error handlers as any other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from ...auth.middleware import IN_PROCESS

logger = logging.getLogger(__name__)


class InProcessAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> InProcessAnswer:
    """POST a JSON body. Cancelling this call is like a disconnect of the client."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": ("localhost", 0),
        "state": {},
        IN_PROCESS: True,
    }
    sent = False
    status, request_id, parts = 500, "", list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()  # The client never disconnects.
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            found = dict(message["headers"])
            request_id = found.get(b"x-request-id", b"").decode("latin-1")
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if not parts:
            raise
        # The client has the answer. The exception is only for the server's log.
        logger.exception("a line of a batch failed")
    return InProcessAnswer(status, request_id, b"".join(parts))
