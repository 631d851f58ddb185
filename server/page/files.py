"""`GET /`: the page of chats, images and figures, as static files that need no build step and
nothing from elsewhere. `vendor` holds KaTeX and highlight.js as they were published, with their
licences; of KaTeX's style sheet, the fonts lie beside it.

The files hold no data and are the same on every server, so they need no key: the page asks for one
and sends it with each call of the API. A page behind the key could not ask for it, for a browser
sends no header with what is typed into its address bar.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import NotFound
from ..core.open_paths import PAGE_FOLDER

router = APIRouter(include_in_schema=False)
_FOLDERS = [Path(__file__).parent / name for name in ("static", "vendor")]
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
_LEAST_ZIPPED = 512
"""Bytes from which a file is worth compressing."""


class PageFile(NamedTuple):
    """One file, plain and compressed; `etag` without quotes, and the same for both."""

    media_type: str
    content: bytes
    zipped: bytes | None
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Every file of the page by its name, read and compressed once."""
    files = {}
    for path in sorted(path for folder in _FOLDERS for path in folder.iterdir()):
        content = path.read_bytes()
        zips = len(content) >= _LEAST_ZIPPED and path.suffix != ".woff2"
        zipped = gzip.compress(content, mtime=0) if zips else None
        etag = hashlib.sha256(content).hexdigest()[:20]
        files[path.name] = PageFile(_TYPES[path.suffix], content, zipped, etag)
    return files


@router.get("/")
async def index(request: Request) -> Response:
    """The page itself."""
    return _answer(request, "index.html")


@router.get(PAGE_FOLDER + "{name}")
async def page_file(name: str, request: Request) -> Response:
    """A style sheet, a module or a picture of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise NotFound("The page has no such file.", code="file_not_found")
    # A weak tag: it stands for the content, whether it is sent compressed or not.
    headers = {**_HEADERS, "ETag": f'W/"{file.etag}"'}
    if _has(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    content = file.content
    if file.zipped is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
        content, headers["Content-Encoding"] = file.zipped, "gzip"
    return Response(content, media_type=file.media_type, headers=headers)


def _has(tags: str, etag: str) -> bool:
    """Whether an `If-None-Match` names the file (RFC 9110, 13.1.2: tags are compared weakly)."""
    known = {"*", f'"{etag}"'}
    return any(tag.strip().removeprefix("W/") in known for tag in tags.split(","))


def _takes_gzip(encodings: str) -> bool:
    for one in encodings.split(","):
        name, _, parameter = one.partition(";")
        if name.strip().lower() == "gzip":
            return parameter.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
