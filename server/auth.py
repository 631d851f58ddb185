"""ASGI middleware for `--api-key`: a Bearer token that every path asks for, but those that
monitoring needs.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Unauthorized
from .metrics import MetricRegistry

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
OPEN_FOLDER = "/v1/images/files/"
"""Its names cannot be guessed, and a browser that is given one has no key."""


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
        await error.response()(scope, receive, send)

    def _holds_key(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._expected)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
