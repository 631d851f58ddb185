"""ASGI middleware: pages of other origins change nothing here, unless `--cors-origins` names them.

Browsers send some requests to any server, also one on their user's own machine, without asking it
first: forms, bodies of plain text, and none at all. They say from where, by `Origin` and
`Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/); what is no browser says neither.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import Forbidden, InvalidRequest, MethodNotAllowed
from ..observability.metrics import MetricRegistry
from .accounts import RATE_LIMIT_HEADERS

_ASKED = frozenset({b"origin", b"sec-fetch-site", b"host", b"x-forwarded-host"})
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_NOT_HARMLESS = frozenset({"/flush_cache"})
"""Paths that SGLang's clients may also GET, which change something all the same."""
_PORTS = {"http": ":80", "https": ":443"}
"""What browsers leave out of `Origin`, and proxies may write into the name of a host."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
_EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After", "X-Queue-Place", *RATE_LIMIT_HEADERS)
"""Headers of answers that scripts of other origins may read."""
_CORS_SECONDS = 600
"""How long a browser may keep what it was told about these."""
_CHECKED = "piecework.origin_checked"
"""Of a request's scope: a fleet's application has let it in, with its own list."""


class SameOrigin:
    """Answers 403 to what a page of an origin that is not allowed sends, but to what only reads,
    which that page cannot see. `allowed`: origins, "*" for all.

    The server's own pages, extensions and applications (`vscode-webview://`, `app://`) pass.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], metrics: MetricRegistry) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _CHECKED not in scope:
            harmless = scope["method"] in _HARMLESS and scope["path"] not in _NOT_HARMLESS
            if not harmless and (origin := self._foreign(scope)) is not None:
                error = _not_allowed(origin)
                self._metrics.count_error(error.type)
                await error.response(scope)(scope, receive, send)
                return
            scope[_CHECKED] = True
        await self._app(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """The origin of the page that sends this, if it may not."""
        found = {name: value for name, value in scope["headers"] if name in _ASKED}
        site, origin = found.get(b"sec-fetch-site"), found.get(b"origin", b"").decode("latin-1")
        if site in (b"same-origin", b"none") or (site is None and not origin):
            return None
        if "*" in self._allowed or origin in self._allowed:
            return None
        scheme, _, host = origin.partition("://")
        # A reverse proxy may put its own name into Host; no page can set the other header, to which
        # each proxy may add a name.
        names = b",".join(found.get(name, b"") for name in (b"host", b"x-forwarded-host"))
        port = _PORTS.get(scheme, "")
        own = {name.strip().removesuffix(port) for name in names.decode("latin-1").split(",")}
        is_page = scheme in ("http", "https", "null", "")
        return (origin or "another site") if is_page and (not host or host not in own) else None


class CrossOrigin(CORSMiddleware):
    """Tells browsers which origins may use the server, also a server on their user's own network
    (https://wicg.github.io/private-network-access/). `allowed`: origins, "*" for all.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=allowed,
            allow_methods=_METHODS,
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_EXPOSED,
            max_age=_CORS_SECONDS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        origin, method = (
            request_headers[name] for name in ("origin", "access-control-request-method")
        )
        if self.is_allowed_origin(origin):
            error: InvalidRequest = MethodNotAllowed(
                f"Scripts of other origins may not use the method {method:.20}; use one of "
                f"{', '.join(_METHODS)}.",
                param="Access-Control-Request-Method",
                code="method_not_allowed",
            )
        else:
            error = _not_allowed(origin)
        kept = {
            name: value
            for name, value in answer.headers.items()
            if name == "vary" or name.startswith("access-control-")
        }
        body = msgspec.json.encode(error.body())
        return Response(body, error.status, kept, "application/json")


def _not_allowed(origin: str) -> Forbidden:
    return Forbidden(
        f"Pages of {origin:.200} may not use this server; start it with --cors-origins and their "
        "origin.",
        param="Origin",
        code="origin_not_allowed",
    )
