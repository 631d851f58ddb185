"""ASGI middleware for `--api-key`: a Bearer token, or Anthropic's `x-api-key`, that every path asks
for, but those that monitoring needs and the page that asks for the key.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Unauthorized
from .metrics import MetricRegistry

OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/live", "/ready", "/metrics"})
OPEN_FOLDER = "/v1/images/files/"
"""Its names cannot be guessed, and a browser that is given one has no key."""
PAGE_FOLDER = "/page/"
"""Files of the page at `/`, which hold no data and ask for the key themselves."""


class ApiKey:
    """Answers 401 to a request without the key. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_key: str, metrics: MetricRegistry) -> None:
        self._app = app
        self._expected = api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]) or self._holds_key(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "The API key is missing or wrong: send the header `Authorization: Bearer KEY` with the "
            "server's key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        self._metrics.count_error(error.type)
        await error.response(scope)(scope, receive, send)

    def _holds_key(self, scope: Scope) -> bool:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = (key if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        return any(hmac.compare_digest(one.strip(), self._expected) for one in keys)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith((OPEN_FOLDER, PAGE_FOLDER))
