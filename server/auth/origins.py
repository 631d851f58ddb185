"""ASGI middleware that refuses changes by pages of origins that `--cors-origins` does not name.

Browsers send some requests (forms, plain text, empty bodies) to any server without a preflight,
also to the user's own machine. They name the page's origin by `Origin` and `Sec-Fetch-Site`
(https://www.w3.org/TR/fetch-metadata/). Other clients send neither header.
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
# Paths that change something although SGLang's clients may use GET.
_NOT_HARMLESS = frozenset({"/flush_cache"})
# Default ports: browsers leave them out of `Origin`, proxies may write them into `Host`.
_PORTS = {"http": ":80", "https": ":443"}
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
# Headers of answers that scripts of other origins may read.
_EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After", "X-Queue-Place", *RATE_LIMIT_HEADERS)
_CORS_SECONDS = 600  # Seconds for which a browser may cache a preflight answer.
# Key of a request's scope: the fleet's application has already checked the origin.
_CHECKED = "piecework.origin_checked"


class SameOrigin:
    """Answers 403 to requests of pages whose origin is not in `allowed` ("*" allows all).

    Requests that only read pass, because the page cannot see their answers. The server's own pages,
    extensions and applications (`vscode-webview://`, `app://`) pass too.
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
        """Return the origin of the page that sends a request, or None if it is allowed."""
        found = {name: value for name, value in scope["headers"] if name in _ASKED}
        site, origin = found.get(b"sec-fetch-site"), found.get(b"origin", b"").decode("latin-1")
        if site in (b"same-origin", b"none") or (site is None and not origin):
            return None
        if "*" in self._allowed or origin in self._allowed:
            return None
        scheme, _, host = origin.partition("://")
        # A reverse proxy may replace Host. It then adds the original name to X-Forwarded-Host,
        # which pages cannot set.
        names = b",".join(found.get(name, b"") for name in (b"host", b"x-forwarded-host"))
        port = _PORTS.get(scheme, "")
        own = {name.strip().removesuffix(port) for name in names.decode("latin-1").split(",")}
        is_page = scheme in ("http", "https", "null", "")
        return (origin or "another site") if is_page and (not host or host not in own) else None


class CrossOrigin(CORSMiddleware):
    """Answers preflight requests: origins in `allowed` may use the server ("*" allows all).

    This includes servers on the user's own network
    (https://wicg.github.io/private-network-access/).
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
        body = msgspec.json.encode(error.answer())
        return Response(body, error.status, kept, "application/json")


def _not_allowed(origin: str) -> Forbidden:
    return Forbidden(
        f"Pages of {origin:.200} may not use this server; start the server with --cors-origins "
        "and this origin.",
        param="Origin",
        code="origin_not_allowed",
    )
