"""ASGI middleware: pages of other origins change nothing here, unless `--cors-origins` names them.

Browsers send some requests to any server, also one on their user's own machine, without asking it
first: forms, bodies of plain text, and none at all. They say from where, by `Origin` and
`Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/); what is no browser says neither.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Forbidden
from .metrics import MetricRegistry

_ASKED = frozenset({b"origin", b"sec-fetch-site", b"host", b"x-forwarded-host"})
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_NOT_HARMLESS = frozenset({"/flush_cache"})
"""Paths that SGLang's clients may also GET, which change something all the same."""
_PORTS = {"http": ":80", "https": ":443"}
"""What browsers leave out of `Origin`, and proxies may write into the name of a host."""
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
                error = Forbidden(
                    f"Pages of {origin:.200} may not use this server; start it with "
                    "--cors-origins and their origin.",
                    param="Origin",
                    code="origin_not_allowed",
                )
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
