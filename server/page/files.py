"""`GET /`: the page with chats, images and metrics, as static files without a build step.

`vendor` holds the published files of KaTeX (with its fonts) and highlight.js, with their licences.
The page loads nothing from other servers.

The files contain no data, so they need no API key. The page asks the user for the key and sends it
with each call of the API. A browser cannot send a key when it loads the page itself.
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
_MIN_COMPRESSED = 512  # Smaller files, in bytes, are not compressed.


class PageFile(NamedTuple):
    """One file, plain and compressed. Both forms have the same `etag`, without quotes."""

    media_type: str
    content: bytes
    zipped: bytes | None
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Read and compress all files of the page. Return them by name."""
    files = {}
    for path in sorted(path for folder in _FOLDERS for path in folder.iterdir()):
        content = path.read_bytes()
        zips = len(content) >= _MIN_COMPRESSED and path.suffix != ".woff2"
        zipped = gzip.compress(content, mtime=0) if zips else None
        etag = hashlib.sha256(content).hexdigest()[:20]
        files[path.name] = PageFile(_TYPES[path.suffix], content, zipped, etag)
    return files


@router.get("/")
async def index(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@router.get(PAGE_FOLDER + "{name}")
async def page_file(name: str, request: Request) -> Response:
    """Return a style sheet, a module or a picture of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise NotFound("The page has no such file.", code="file_not_found")
    # A weak tag, because it is the same for the plain and the compressed form.
    headers = {**_HEADERS, "ETag": f'W/"{file.etag}"'}
    # The comparison is weak (RFC 9110, 13.1.2).
    known, tags = {"*", f'"{file.etag}"'}, request.headers.get("if-none-match", "").split(",")
    if any(tag.strip().removeprefix("W/") in known for tag in tags):
        return Response(status_code=304, headers=headers)
    content = file.content
    if file.zipped is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
        content, headers["Content-Encoding"] = file.zipped, "gzip"
    return Response(content, media_type=file.media_type, headers=headers)


def _takes_gzip(encodings: str) -> bool:
    for one in encodings.split(","):
        name, _, parameter = one.partition(";")
        if name.strip().lower() == "gzip":
            return parameter.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
