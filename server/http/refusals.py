"""Refuses requests without calling the application."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from http.client import responses

import msgspec

from ..config.http_limits import HttpLimits
from ..core.errors import (
    ApiError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    Unavailable,
    UrlTooLong,
)

_RETRY_SECONDS = 5


class Refused(Exception):
    """Raised in a callback of the parser to refuse a request."""

    def __init__(self, error: ApiError) -> None:
        self.error = error


def answer(error: ApiError, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a response that ends the connection. `path` may be incomplete."""
    request_id = uuid.uuid4().hex
    status, content = error.answer_for(path, request_id)
    body = msgspec.json.encode(content)
    own = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        **error.headers,
    }
    lines = [f"HTTP/1.1 {status} {responses.get(status, '')}".encode()]
    lines += [b"%s: %s" % field for field in headers]
    lines += [f"{name}: {value}".encode() for name, value in own.items()]
    return b"\r\n".join([*lines, b"", body])


def malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The request is not valid HTTP/1.1: {reason}.", code="invalid_http")


def url_too_long(most: int) -> UrlTooLong:
    return UrlTooLong(
        f"The URL is longer than {most} bytes; put parameters into the body.", code="url_too_long"
    )


def check_headers(limits: HttpLimits, *, count: int = 0, size: int = 0) -> None:
    """Raise `Refused` if the number or size of the headers exceeds `limits`."""
    message = None
    if size > limits.max_header_bytes:
        message = (
            f"The headers have more than {limits.max_header_bytes} bytes; send fewer or shorter "
            "ones."
        )
    elif count > limits.max_header_count:
        message = f"The request has more than {limits.max_header_count} headers; send fewer."
    if message is not None:
        raise Refused(HeadersTooLarge(message, code="headers_too_large"))


def too_much_waits(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"More than {what} wait on this connection; read the answers first.",
        code="too_much_pipelined",
    )


def late(what: str) -> RequestTimeout:
    return RequestTimeout(f"{what}; send the request again.", code="request_timeout")


def busy(why: str) -> Unavailable:
    return Unavailable(
        f"{why}. Try again in {_RETRY_SECONDS} s.",
        code="too_busy",
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


def crowded() -> Unavailable:
    return busy("As many requests as the server takes are under way (--max-connections)")
