"""Request bodies: JSON only, of bounded size each and together, read once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..collector import unless_client_goes
from ..errors import BodyTooLarge, ClientGone, InvalidRequest, Unavailable, UnsupportedMedia

MAX_BODY_BYTES = 4 * 2**20
LARGE_BODY_BYTES = 2**16
"""Bodies up to this size are always read; larger ones share `MAX_LARGE_BYTES`."""
MAX_LARGE_BYTES = 32 * MAX_BODY_BYTES
MAX_STRUCTURE = 100_000
"""Objects, members and arrays in one body: the longest conversation has a tenth."""
_STRUCTURE = (b"{", b"[", b":")
_JSON = (b"content-type", b"application/json")
_parse = partial(pydantic_core.from_json, allow_inf_nan=False, cache_strings="none")


class JsonRequest(Request):
    """A request whose body has been read and parsed. `size`: bytes of the body."""

    size: int = 0
    parsed: Any

    async def body(self) -> bytes:
        return b"{}"  # FastAPI asks whether there is one, and then for its JSON.

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """A route that takes a JSON body, and drops its work when the client goes away before the
    answer begins.

    Parsing is strict: no NaN or Infinity, no invalid UTF-8, no lone surrogates, at most 200 levels.
    """

    empty: ClassVar[bytes] = b""
    """What an empty body means."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            bodies: Bodies = request.app.state.bodies
            scope, is_left_out = request.scope, self.empty and has_no_body(request)
            if is_left_out:
                # FastAPI parses what says that it is JSON.
                others = [each for each in scope["headers"] if each[0] != _JSON[0]]
                scope = {**scope, "headers": [*others, _JSON]}
            read = JsonRequest(scope, request.receive)
            try:
                if is_left_out:
                    read.parsed = _parse(self.empty)
                else:
                    await bodies.read(request, read)
                return await unless_client_goes(request.receive, handler(read))
            finally:
                bodies.release(read.size)

        return read_then_handle


class OptionalJsonRoute(JsonRoute):
    """The same, whose body may be left out."""

    empty = b"{}"


def has_no_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


class Bodies:
    """The bodies of a server. Large ones are bounded together, and parsed one at a time: others are
    answered in between.
    """

    def __init__(self) -> None:
        self._large_bytes = 0
        self._turn = asyncio.Lock()

    def release(self, size: int) -> None:
        """A request is over, and holds its body no longer."""
        if size > LARGE_BODY_BYTES:
            self._large_bytes -= size

    async def read(self, request: Request, read: JsonRequest) -> None:
        """Fill `read`. Raises `UnsupportedMedia`, `BodyTooLarge`, `InvalidRequest`, `Unavailable`
        or `ClientGone`.
        """
        content = await read_json_body(request)
        # What is still arriving is bounded by `--max-unfinished-bodies`.
        read.size = len(content)
        if not content:
            raise InvalidRequest(
                "The request body is empty; send a JSON object.", code="invalid_json"
            )
        try:
            if read.size <= LARGE_BODY_BYTES:
                read.parsed = _parse(content)
            else:
                await self._parse_large(content, read)
        except ValueError as error:
            message = f"The request body is not valid JSON: {error}. Send a JSON object in UTF-8."
            raise InvalidRequest(message, code="invalid_json") from None

    async def _parse_large(self, content: bytearray, read: JsonRequest) -> None:
        self._large_bytes += read.size
        if self._large_bytes > MAX_LARGE_BYTES:
            message = (
                f"Requests of more than {MAX_LARGE_BYTES} bytes together are under way. Try "
                "again in 1 s."
            )
            raise Unavailable(message, code="bodies_full", headers={"Retry-After": "1"})
        async with self._turn:
            # Whoever waited meanwhile has its turn before the next body.
            await asyncio.sleep(0)
            check_structure(content)
            read.parsed = _parse(content)


async def read_json_body(request: Request) -> bytearray:
    """The bytes of a body that says it is JSON, not yet parsed. Raises `UnsupportedMedia`,
    `BodyTooLarge` or `ClientGone`.
    """
    # Browsers send other types across sites without asking first, so a page could reach a
    # server on its reader's machine.
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        message = (
            f"The content type is {kind:.60}; send the header `Content-Type: application/json`."
        )
        raise UnsupportedMedia(message, param="Content-Type")
    # Never more than MAX_BODY_BYTES in memory, whatever Content-Length says or does not say.
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise ClientGone("The client went away while it sent the request.") from None
    return content


def check_structure(raw: bytes | bytearray) -> None:
    """Raises `InvalidRequest` where parsing would make objects by the million, which takes seconds
    to make, to search and to free.
    """
    if sum(map(raw.count, _STRUCTURE)) <= MAX_STRUCTURE:
        return
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    count = sum(map(outside.count, _STRUCTURE))
    if count > MAX_STRUCTURE:
        message = (
            f"The request body has {count} objects, members and arrays, more than "
            f"{MAX_STRUCTURE}; send a smaller one."
        )
        raise InvalidRequest(message, code="body_too_complex")


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {MAX_BODY_BYTES} bytes; send a smaller one.",
        code="body_too_large",
    )
