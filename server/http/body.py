"""Reads and parses JSON request bodies, with limits for one body and for all together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..core.body_stages import tells_checked, watched
from ..core.errors import BodyTooLarge, ClientGone, InvalidRequest, Unavailable, UnsupportedMedia
from ..serving.collector import unless_client_goes
from .turns import Room, Turns

MAX_BODY_BYTES = 4 * 2**20
MAX_IMAGE_BODY_BYTES = 24 * 2**20  # The same, for models that read images.
# Bodies up to this size are always read; larger ones share `MAX_LARGE_BYTES`.
LARGE_BODY_BYTES = 2**16
MAX_LARGE_BYTES = 32 * MAX_BODY_BYTES
# Objects, members and arrays in one body. The longest conversation has a fifth of that.
MAX_STRUCTURE = 50_000
# Estimated bytes of all parsed bodies that have not become prompts yet.
MAX_WEIGHT = 64 * 2**20
LIGHT_WEIGHT = 2**15  # Bodies up to this weight do not wait for others.
# Memory of an object, list or member, and of an item of a list, with their checked copies.
_MEMBER_BYTES, _ITEM_BYTES = 350, 60
MAX_STRINGS = 200_000  # Strings in one body, including names of members.
_BLOCK = 2**17  # Bytes that stay in a CPU's cache while several characters are counted.
_STRUCTURE = (b"{", b"[", b":")
_JSON = (b"content-type", b"application/json")
_parse = partial(pydantic_core.from_json, allow_inf_nan=False, cache_strings="none")


class JsonRequest(Request):
    """A request with a parsed body. `size` is the body's size in bytes."""

    size: int = 0
    parsed: Any

    async def body(self) -> bytes:
        return b"{}"  # FastAPI checks that the body is not empty and then calls `json`.

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """A route with a JSON body. It is cancelled if the client leaves before the answer begins.

    Parsing is strict: no NaN or Infinity, no invalid UTF-8, no lone surrogates, at most 200 levels.
    """

    empty: ClassVar[bytes] = b""  # The JSON that an empty body stands for.
    other_types: ClassVar[tuple[str, ...]] = ()  # Content types that are read as JSON too.

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, tells_checked(endpoint), **settings)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            bodies: Bodies = request.app.state.bodies
            scope, is_left_out = request.scope, self.empty and has_no_body(request)
            if is_left_out or self.other_types:
                # FastAPI parses a body only if its content type is JSON.
                others = [each for each in scope["headers"] if each[0] != _JSON[0]]
                scope = {**scope, "headers": [*others, _JSON]}
            read = JsonRequest(scope, request.receive)
            content = (
                bytearray(self.empty)
                if is_left_out
                else await read_json_body(request, self.other_types)
            )
            with bodies.hold(content) as body:
                del content
                work = _handled(body, read, handler)
                return await unless_client_goes(request.receive, work)

        return read_then_handle


async def _handled(
    body: Body, read: JsonRequest, handler: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Response:
    read.size = body.size
    try:
        read.parsed = await body.parse()
        with watched(checked=partial(_forget, read.parsed), became_prompt=body.release):
            return await handler(read)
    finally:
        body.release()


def _forget(parsed: Any) -> None:
    """Clear the parsed objects. The endpoint has its own copies of those it needs."""
    if isinstance(parsed, dict):
        parsed.clear()


class OptionalJsonRoute(JsonRoute):
    """A `JsonRoute` whose body may be empty."""

    empty = b"{}"


class CurlJsonRoute(JsonRoute):
    """A `JsonRoute` that also takes what `curl -d` sends without a header.

    Pages of other sites can send that type too. `Origin` and `Sec-Fetch-Site` still tell them.
    """

    other_types = ("application/x-www-form-urlencoded",)


def has_no_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


class Bodies:
    """The bodies of all requests of a server.

    The objects of a parsed body take much more memory than its bytes, and parsing blocks the event
    loop. Large bodies therefore wait as bytes until earlier ones have become prompts, and only a
    few bodies are parsed in one turn of the loop.
    """

    def __init__(self, most: int = MAX_BODY_BYTES) -> None:
        """`most` is the maximum size of one body in bytes."""
        self.most = most
        self._large_bytes = 0
        self.turns = Turns()
        self.room = Room(MAX_WEIGHT)

    @contextmanager
    def hold(self, content: bytearray) -> Iterator[Body]:
        """Hold a body during its request. Raises `InvalidRequest` and `Unavailable`."""
        size = len(content)  # `--max-unfinished-bodies` limits arriving bodies
        if not content:
            raise InvalidRequest(
                "The request body is empty; send a JSON object.", code="invalid_json"
            )
        large = size if size > LARGE_BODY_BYTES else 0
        self._large_bytes += large
        try:
            if large and self._large_bytes > MAX_LARGE_BYTES:
                message = (
                    f"Requests of more than {MAX_LARGE_BYTES} bytes together are under way. Try "
                    "again in 1 s."
                )
                raise Unavailable(message, code="bodies_full", headers={"Retry-After": "1"})
            yield Body(self, content)
        finally:
            self._large_bytes -= large


class Body:
    """One body: first bytes, then objects, until the prompt is made."""

    def __init__(self, bodies: Bodies, content: bytearray) -> None:
        self._bodies = bodies
        self._content: bytearray | None = content
        self.size = len(content)
        self._held = 0

    async def parse(self) -> Any:
        """Wait for room, then return the JSON value. Raises `InvalidRequest`."""
        assert self._content is not None
        weight = weight_of(self._content)
        if weight > LIGHT_WEIGHT:
            await self._bodies.room.take(weight)
            self._held = weight
        await self._bodies.turns.take(weight)
        content, self._content = self._content, None
        try:
            if self.size > LARGE_BODY_BYTES:
                check_structure(content)
            return _parse(content)
        except ValueError as error:
            message = f"The request body is not valid JSON: {error}. Send a JSON object in UTF-8."
            raise InvalidRequest(message, code="invalid_json") from None

    def release(self) -> None:
        """Release the room of the body's objects. A second call does nothing."""
        self._bodies.room.give(self._held)
        self._held = 0


def weight_of(content: bytes | bytearray) -> int:
    """Estimate the bytes of a body's text and its parsed objects."""
    members, items = _count(content, *_STRUCTURE), _count(content, b",")
    return len(content) + _MEMBER_BYTES * members + _ITEM_BYTES * items


def _count(content: bytes | bytearray, *characters: bytes) -> int:
    """Return how often any of the characters occurs. `bytes.count` is slow on large bodies."""
    if len(content) <= LARGE_BODY_BYTES:
        return sum(map(content.count, characters))
    numbers = np.frombuffer(content, np.uint8)
    return sum(
        int(np.count_nonzero(numbers[begin : begin + _BLOCK] == one[0]))
        for begin in range(0, len(numbers), _BLOCK)
        for one in characters
    )


async def read_json_body(request: Request, other_types: Sequence[str] = ()) -> bytearray:
    """Return a JSON body. Raises `UnsupportedMedia`, `BodyTooLarge` or `ClientGone`.

    `other_types` are content types that the body may have besides those of JSON.
    """
    # Browsers send other content types to other sites without a preflight, so a page could use a
    # server on its visitor's machine.
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind not in ("application/json", *other_types) and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        message = (
            f"The content type is {kind:.60}; send the header `Content-Type: application/json`."
        )
        raise UnsupportedMedia(message, param="Content-Type")
    # Content-Length may be missing or wrong, so the loop below checks the size too.
    announced = request.headers.get("content-length", "")
    most = request.app.state.bodies.most
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise _too_large(most)
    except ClientDisconnect:
        raise ClientGone("The client went away while it sent the request.") from None
    return content


def check_structure(raw: bytes | bytearray) -> None:
    """Raise `InvalidRequest` for a body of too many objects or strings.

    Millions of objects would take seconds to create, check and free.
    """
    if _count(raw, *_STRUCTURE) <= MAX_STRUCTURE and _count(raw, b'"') <= 2 * MAX_STRINGS:
        return
    text = bytes(raw).replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(text.count(b'"') // 2, MAX_STRINGS, "strings")
    outside = b"".join(text.split(b'"')[::2])
    _check_count(sum(map(outside.count, _STRUCTURE)), MAX_STRUCTURE, "objects, members and arrays")


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        message = f"The request body has {count} {what}, more than {most}; send a smaller one."
        raise InvalidRequest(message, code="body_too_complex")


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {most} bytes; send a smaller one.",
        code="body_too_large",
    )
