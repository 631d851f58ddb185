"""Sends answers to clients of HTTP/1.0, by uvicorn's request cycle."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Send the answer without chunks, which HTTP/1.0 does not have.

    An answer without a length ends with the connection (RFC 9112, 6.3).
    """
    send = cycle.send
    has_length = False

    async def send_whole(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_whole  # type: ignore[method-assign]
