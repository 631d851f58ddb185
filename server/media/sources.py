"""Reads the bytes of images: data URLs, base64, allowed servers and files of an allowed folder."""

from __future__ import annotations

import asyncio
import binascii
import os
import re
import stat
from urllib.parse import unquote, urlsplit

from ..config.media import MediaConfig
from ..core.allowed_path import path_below
from ..core.errors import InvalidRequest
from .parts import ImagePart

_DATA_URL = re.compile(r"data:([a-z0-9.+/-]*)((?:;[a-z0-9=._+-]*)*),", re.IGNORECASE)
_MOST_HEAD = 256  # Characters of a data URL before its data.
_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_FORMATS = "send PNG, JPEG, WebP or GIF"
_SLICE = (
    2**20
)  # Characters of base64 that are decoded at once; the interpreter is locked meanwhile.


class Sources:
    """Where images may come from. `read` raises `InvalidRequest` that names the part."""

    def __init__(self, config: MediaConfig) -> None:
        self._folder = config.allowed_local_media_path
        self._allowed = config.remote_media
        self._most = config.max_image_bytes
        self._fetching = asyncio.Semaphore(8)

    async def read(self, part: ImagePart) -> bytes:
        """Return the bytes of an image, and drop its text from the part."""
        url, data = part.url, part.data
        part.clear()
        if data:
            return await self._decoded(data, 0, part.param)
        scheme = url[:5].lower()
        if scheme == "data:":
            return await self._decoded(url, self._start_of_data(url, part.param), part.param)
        if scheme == "file:":
            return await asyncio.to_thread(self._read_file, url, part.param)
        if re.match(r"https?://", url[:8], re.IGNORECASE):
            return await self._fetched(url, part.param)
        raise refused(
            part.param,
            f"{url!r:.60} is no address of an image; send a data URL: data:image/png;base64,...",
        )

    def _start_of_data(self, url: str, param: str) -> int:
        """Return where the base64 of a data URL begins."""
        head = _DATA_URL.match(url[:_MOST_HEAD])
        if head is None or ";base64" not in head[2].lower():
            raise refused(
                param, "the data URL has no base64; write data:image/png;base64, and the file"
            )
        if head[1] and head[1].lower() not in _TYPES:
            raise refused(param, f"images of the type {head[1]:.40} are not read; {_FORMATS}")
        return head.end()

    async def _decoded(self, text: str, start: int, param: str) -> bytes:
        self._check_size((len(text) - start) * 3 // 4 - 2, param)
        return await asyncio.to_thread(decode, text, start, param)

    def _check_size(self, size: int, param: str) -> None:
        if size > self._most:
            raise refused(
                param,
                f"the image has {size} bytes, more than the {self._most} of --max-image-bytes; "
                "send a smaller one",
            )

    def _read_file(self, url: str, param: str) -> bytes:
        if self._folder is None:
            raise refused(
                param,
                "this server reads no files (--allowed-local-media-path is not set); send a data "
                "URL",
            )
        path = path_below(self._folder, unquote(urlsplit(url).path), is_inside=True)
        if path is None or not stat.S_ISREG(os.stat(path).st_mode):
            raise refused(param, "name a file below --allowed-local-media-path")
        try:
            with open(path, "rb") as file:
                self._check_size(os.fstat(file.fileno()).st_size, param)
                return checked(file.read(self._most), param)
        except OSError as error:
            raise refused(param, f"the file cannot be read: {error.strerror}") from None

    async def _fetched(self, url: str, param: str) -> bytes:
        if self._allowed is None:
            raise refused(
                param,
                "this server fetches no images (--allow-remote-media is not set); send a data URL",
            )
        # Imported here, because the HTTP client belongs to an extra.
        from .remote import FetchFailed, fetch

        async with self._fetching:
            try:
                return checked(await fetch(url, self._allowed, self._most), param)
            except FetchFailed as failed:
                raise refused(param, str(failed)) from None


def decode(text: str, start: int, param: str) -> bytes:
    """Return the image that `text` holds in base64 from `start` on. Raise `InvalidRequest`.

    White space is left out, and the padding may be missing.
    """
    content = bytearray()
    rest = ""
    try:
        for begin in range(start, len(text), _SLICE):
            part = rest + "".join(text[begin : begin + _SLICE].split())
            whole = len(part) // 4 * 4
            content += binascii.a2b_base64(part[:whole], strict_mode=True)
            rest = part[whole:]
        if rest:
            content += binascii.a2b_base64(rest + "=" * (-len(rest) % 4), strict_mode=True)
    except ValueError:
        raise refused(
            param, "the base64 is damaged; encode the whole file again, with its padding"
        ) from None
    return checked(bytes(content), param)


def checked(content: bytes, param: str) -> bytes:
    """Return a file that begins as an image does. Raise `InvalidRequest` for any other."""
    if (
        content.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a"))
        or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")
    ):  # fmt: skip
        return content
    found = "an SVG" if b"<svg" in content[:1024].lower() else "no image that this server reads"
    raise refused(param, f"the file is {found}; {_FORMATS}" if content else "the image is empty")


def refused(param: str, reason: str, code: str = "invalid_image") -> InvalidRequest:
    """Return the error for an image, which names its part."""
    return InvalidRequest(f"{param}: {reason}.", param=param, code=code)
