"""ASGI middleware that decodes compressed request bodies while they arrive (RFC 9110, 8.4)."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import InvalidRequest, UnsupportedMedia
from ..observability.metrics import MetricRegistry
from ..serving.sse import CONNECTION, Connection

_PART = 2**17  # Bytes that are decoded at a time, so that the reader can refuse the rest.
# Compressed bytes may exceed decoded bytes by this many. More would be padding without content.
_OVERHEAD = 2**16
# The window of zstd has at most 2 ** this many bytes (RFC 8878 recommends 8 MiB).
_MAX_WINDOW_LOG = 23
_HEADER = b"content-encoding"
_GZIP, _ZLIB, _RAW = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Decoder(Protocol):
    """Decodes one body. `eof`: its end was decoded. `unused_data` holds the bytes after it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode `data` and yield parts of at most `_PART` bytes. Raises `ValueError`."""
        ...


class _Deflate:
    """Decodes gzip, and deflate in zlib's format or (as some clients send it) raw."""

    def __init__(self, bits: int | None) -> None:
        self._inner = None if bits is None else zlib.decompressobj(bits)

    @property
    def eof(self) -> bool:
        return self._inner is not None and self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return b"" if self._inner is None else self._inner.unused_data

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._inner is None:
            self._inner = zlib.decompressobj(_ZLIB if data[0] & 15 == zlib.DEFLATED else _RAW)
        try:
            while part := self._inner.decompress(data, _PART):
                yield part
                data = self._inner.unconsumed_tail
        except zlib.error as error:
            raise ValueError(error) from None


class _Zstd:
    def __init__(self, library: Any) -> None:
        options = {library.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
        self._inner = library.ZstdDecompressor(options=options)
        self._error = library.ZstdError

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)

    def decode(self, data: bytes) -> Iterator[bytes]:
        try:
            while not self._inner.eof:
                if part := self._inner.decompress(data, _PART):
                    yield part
                if self._inner.needs_input:
                    break
                data = b""
        except self._error as error:
            raise ValueError(error) from None


def _decoders() -> Iterator[tuple[str, Callable[[], Decoder]]]:
    yield "gzip", lambda: _Deflate(_GZIP)
    yield "deflate", lambda: _Deflate(None)
    for name in ("compression.zstd", "backports.zstd"):  # the first exists since Python 3.14
        with contextlib.suppress(ImportError):
            library = importlib.import_module(name)
            yield "zstd", partial(_Zstd, library)
            return


DECODERS: Mapping[str, Callable[[], Decoder]] = dict(_decoders())


class DecodeBodies:
    """Passes decoded bodies to the application.

    An unknown coding is answered 415, and `Accept-Encoding` lists the known ones. A body is decoded
    only as far as the application reads, so limits on its size end the decoding early.
    """

    def __init__(self, app: ASGIApp, *, metrics: MetricRegistry) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        codings = [
            coding
            for name, value in scope.get("headers", ())
            if name == _HEADER
            for coding in value.decode("latin-1").lower().replace("x-gzip", "gzip").split(",")
            if coding.strip() not in ("", "identity")
        ]
        if not codings:
            await self._app(scope, receive, send)
            return
        coding = ",".join(codings).strip()
        if coding not in DECODERS:
            known = ", ".join(DECODERS)
            error = UnsupportedMedia(
                f"The body's Content-Encoding is {coding:.60}; send it as it is, or in one of "
                f"{known}.",
                param="Content-Encoding",
                code="unsupported_content_encoding",
                headers={"Accept-Encoding": known},
            )
            self._metrics.count_error(error.type)
            await error.response(scope)(scope, receive, send)
            return
        body = _Body(coding, receive, scope.get(CONNECTION))
        await self._app({**scope, "headers": _decoded(scope["headers"])}, body.receive, send)


def _decoded(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of the decoded body. Its length is unknown, so it is chunked."""
    kept = [field for field in headers if field[0] != _HEADER]
    return [
        (b"transfer-encoding", b"chunked")
        if name == b"content-length" and value != b"0"
        else (name, value)
        for name, value in kept
    ]


class _Body:
    """One compressed body. It reports its bytes in memory to `connection`."""

    def __init__(self, coding: str, receive: Receive, connection: Connection | None) -> None:
        self._coding, self._receive, self._connection = coding, receive, connection
        self._decoder = DECODERS[coding]()
        self._parts: Iterator[bytes] = iter(())
        self._has_more = True
        self._is_whole = False
        self._taken = self._made = 0

    async def receive(self) -> Message:
        """Return the next decoded part, and after the last part the other messages."""
        while not self._is_whole:
            if part := self._next():
                return {"type": "http.request", "body": part, "more_body": True}
            if not self._has_more:
                self._is_whole = True
                if not self._decoder.eof and self._taken:
                    raise self._wrong("it ends too early")
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._take(message)
        return await self._receive()

    def _take(self, message: Message) -> None:
        data, self._has_more = message.get("body", b""), message.get("more_body", False)
        if not data:
            return
        if self._decoder.eof:
            raise self._wrong("more bytes follow its end")
        if self._connection is not None:
            self._connection.took(len(data))
        self._taken += len(data)
        if self._taken > self._made + _OVERHEAD + len(data):
            raise self._wrong("its compressed bytes are more than its text")
        self._parts = self._decoder.decode(data)

    def _next(self) -> bytes | None:
        try:
            part = next(self._parts, None)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        if self._decoder.unused_data:
            raise self._wrong("more bytes follow its end")
        if part is not None:
            self._made += len(part)
            if self._connection is not None:
                self._connection.holds(len(part))
        return part

    def _wrong(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            f"The body is not {self._coding}, as its Content-Encoding says: {why}.",
            param="Content-Encoding",
            code="invalid_content_encoding",
        )
