"""Request bodies: JSON only, of bounded size, read once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .openai.errors import BodyTooLarge, ClientGone, InvalidRequest, UnsupportedMedia

MAX_BODY_BYTES = 4 * 2**20


class JsonRequest(Request):
    """A request whose body has been read and parsed."""

    raw: bytes
    parsed: Any

    async def body(self) -> bytes:
        return self.raw

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """A route that takes a JSON body.

    Parsing is strict: no NaN or Infinity, no invalid UTF-8, no lone surrogates, at most 200 levels.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            return await handler(await read_json(request))

        return read_then_handle


async def read_json(request: Request) -> JsonRequest:
    """Raises `UnsupportedMedia`, `BodyTooLarge`, `InvalidRequest` or `ClientGone`."""
    # Browsers send other types across sites without asking first, so a page could reach a server on its reader's machine.
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMedia(f"The content type is {kind:.60}; send the header `Content-Type: application/json`.", param="Content-Type")
    read = JsonRequest(request.scope, request.receive)
    read.raw = await _read_bounded(request)
    if not read.raw:
        raise InvalidRequest("The request body is empty; send a JSON object.", code="invalid_json")
    try:
        read.parsed = pydantic_core.from_json(read.raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}. Send a JSON object in UTF-8.", code="invalid_json") from None
    return read


async def _read_bounded(request: Request) -> bytes:
    """The body, never more than MAX_BODY_BYTES of it in memory, whatever Content-Length says or does not say."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone("The client went away while it sent the request.") from None
    return b"".join(parts)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes; send a smaller one.", code="body_too_large")
