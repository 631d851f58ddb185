"""HTTP clients that connect to one checked address.

The server's name is resolved once, and every request goes to that address. A name that resolves to
another address later (DNS rebinding) and a redirect to another host therefore reach nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping

import httpx2

from .allowed import AllowedServers

_CONNECT_SECONDS = 10.0


class Refused(Exception):
    """A server that must not be reached, or an answer that is too large."""


async def checked_address(allowed: AllowedServers, host: str, port: int) -> str:
    """Return the address of a host. Raise `Refused` if one of its addresses is not allowed."""
    if not allowed.permits_host(host, port):
        raise Refused(f"{host}:{port} is not named by {allowed.flag}")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise Refused(f"{host} cannot be resolved: {type(error).__name__}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise Refused(f"{host} has no address")
    for address in addresses:
        if not allowed.permits_address(address):
            raise Refused(
                f"{host} has the address {address}, which is not public; name it in {allowed.flag}"
            )
    return addresses[0]


class PinnedTransport(httpx2.AsyncBaseTransport):
    """Sends every request to one address, and reads at most `most` bytes in all."""

    def __init__(self, url: httpx2.URL, address: str, most: int) -> None:
        self._host, self._port, self._scheme = url.host, url.port, url.scheme
        self._address = address
        self._most = self._left = most
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        if (url.host, url.port, url.scheme) != (self._host, self._port, self._scheme):
            raise httpx2.ConnectError("a redirect to another server is not followed")
        # The header Host and the name in the certificate stay those of the URL.
        request.extensions["sni_hostname"] = self._host
        request.url = url.copy_with(host=self._address)
        try:
            response = await self._inner.handle_async_request(request)
        finally:
            request.url = url
        response.stream = _Counted(response.stream, self)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # The content may be much larger than the bytes that are counted.
            await response.aclose()
            raise httpx2.ReadError("the server compresses its answers although it may not")
        return response

    def take(self, size: int) -> None:
        """Count bytes that were read. Raise `httpx2.ReadError` if there are too many."""
        self._left -= size
        if self._left < 0:
            raise httpx2.ReadError(f"the server sent more than {self._most} bytes")

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Counted(httpx2.AsyncByteStream):
    """The bytes of a response, which a transport counts."""

    def __init__(
        self, stream: httpx2.SyncByteStream | httpx2.AsyncByteStream, owner: PinnedTransport
    ) -> None:
        assert isinstance(stream, httpx2.AsyncByteStream)
        self._stream, self._owner = stream, owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._owner.take(len(part))
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def http_client(
    url: str, address: str, headers: Mapping[str, str], seconds: float, *, most: int
) -> httpx2.AsyncClient:
    """Return a client for one server at one address, which reads at most `most` bytes."""
    return httpx2.AsyncClient(
        transport=PinnedTransport(httpx2.URL(url), address, most),
        # The transport refuses compressed answers.
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=seconds,
        trust_env=False,
        follow_redirects=False,
    )
