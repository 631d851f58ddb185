"""Fetches images from allowed servers.

Every address is checked before a connection is made to it, also that of a redirect, and the
connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio

import httpx2

from ..outgoing.allowed import AllowedServers
from ..outgoing.pinned import Refused, checked_address, http_client

SECONDS = 10.0  # Time for a whole image, with redirects.
MOST_REDIRECTS = 3
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif"}
_EXTRA = 2**16  # Bytes that a connection may read beside the image.


class FetchFailed(Exception):
    """The image cannot be fetched. The message says why, for the client."""


async def fetch(url: str, allowed: AllowedServers, most: int) -> bytes:
    """Return the content of an address, which has at most `most` bytes. Raise `FetchFailed`."""
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(MOST_REDIRECTS + 1):
                content, url = await _get(url, allowed, most)
                if content is not None:
                    return content
    except TimeoutError:
        raise FetchFailed(f"the image was not there after {SECONDS:g} s; send a data URL") from None
    except Refused as error:
        raise FetchFailed(f"{error}; send a data URL") from None
    except httpx2.InvalidURL:
        raise FetchFailed("the address is not valid; send a data URL") from None
    except (httpx2.HTTPError, OSError) as error:
        reason = f"{error}" or type(error).__name__
        raise FetchFailed(f"the image cannot be fetched ({reason:.200})") from None
    raise FetchFailed(f"there are more than {MOST_REDIRECTS} redirects; send the last address")


async def _get(url: str, allowed: AllowedServers, most: int) -> tuple[bytes | None, str]:
    """Return the content of an address, or None and the address of a redirect."""
    parsed = httpx2.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise FetchFailed("only addresses with http and https are fetched")
    if parsed.userinfo:
        raise FetchFailed("an address with a password is not fetched")
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    address = await checked_address(allowed, parsed.host, port)
    async with (
        http_client(url, address, _HEADERS, SECONDS, most=most + _EXTRA) as client,
        client.stream("GET", url) as response,
    ):
        if response.is_redirect:
            return None, str(parsed.join(response.headers.get("location", "")))
        if response.status_code != 200:
            raise FetchFailed(f"the image's server answers with status {response.status_code}")
        content = bytearray()
        if int(response.headers.get("content-length", "0") or 0) > most:
            raise FetchFailed(f"the image has more than {most} bytes (--max-image-bytes)")
        async for part in response.aiter_raw():
            content += part
            if len(content) > most:
                raise FetchFailed(f"the image has more than {most} bytes (--max-image-bytes)")
        return bytes(content), url
