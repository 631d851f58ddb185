"""Reads forms with a file, multipart/form-data, with limits for one form and for all together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi.routing import APIRoute
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from ..core.errors import BodyTooLarge, ClientGone, InvalidRequest, Unavailable, UnsupportedMedia
from ..serving.sse import CONNECTION

_AROUND = 2**16  # Bytes of a form besides its file.
_MAX_FIELDS = 16
_TRUE = ("true", "t", "1", "on", "yes", "y")  # How forms spell a true value.
_MAX_UPLOADS = 4  # Number of simultaneous uploads.
# Charsets of forms. Other charsets of Python may take quadratic time or do not decode to text.
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "latin-1", "latin1", "iso-8859-1"})


class FormRoute(APIRoute):
    """A route with a form whose field `model` names the model. A server of several models reads the
    form to find the model, so the file has at most `most` bytes.
    """

    most = 25 * 2**20  # OpenAI's limit for a file of audio.


def form_schema(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with a form."""
    schema = {"type": "object", "required": list(required), "properties": properties}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


class Uploads:
    """Limits the forms that arrive at the same time.

    Attributes:
        number: Forms that are arriving.
    """

    def __init__(self) -> None:
        self.number = 0

    @asynccontextmanager
    async def form(self, request: Request, most: int) -> AsyncIterator[FormData]:
        """Read a form with a file of at most `most` bytes, which is deleted after the block.

        Raises `UnsupportedMedia`, `InvalidRequest`, `BodyTooLarge`, `ClientGone` and `Unavailable`.
        """
        check_sender(request, most)
        if self.number >= _MAX_UPLOADS:
            raise Unavailable(
                f"{_MAX_UPLOADS} files are being uploaded already. Try again in 1 s.",
                code="uploads_full",
                headers={"Retry-After": "1"},
            )
        self.number += 1
        try:
            form = await _parse(request.headers, _bounded(request, most))
        finally:
            self.number -= 1
        try:
            yield form
        finally:
            await form.close()


def file_of(form: FormData) -> UploadFile:
    """Return the part `file` of a form. Raises `InvalidRequest` if there is none."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest(
            "file: the form has no part of this name with a filename.",
            param="file",
            code="missing_required_parameter",
        )
    return file


async def model_and_stream(headers: Headers, content: bytes) -> tuple[str | None, bool]:
    """Return the fields `model` and `stream` of a form that was read already.

    Raises `InvalidRequest`.
    """

    async def parts() -> AsyncGenerator[bytes]:
        yield content

    form = await _parse(headers, parts())
    try:
        named, streams = form.get("model"), str(form.get("stream")).lower() in _TRUE
        return named if isinstance(named, str) else None, streams
    finally:
        await form.close()


def check_sender(request: Request, most: int) -> None:
    """Raise `InvalidRequest` before the body is read."""
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise UnsupportedMedia(
            f"The content type is {kind:.60}; send a form, multipart/form-data.",
            param="Content-Type",
        )
    charset = parse_options_header(request.headers["content-type"])[1].get(b"charset", b"utf-8")
    if charset.decode("latin-1").lower() not in _CHARSETS:
        raise InvalidRequest(
            f"The form's charset is {charset.decode('latin-1'):.60}; send it in utf-8.",
            param="Content-Type",
            code="invalid_form",
        )
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length[:20]) > most + _AROUND:
        raise _too_large(most)


async def read_form_body(request: Request, most: int) -> bytes:
    """Return the bytes of a form. Raises the errors of `Uploads.form`."""
    check_sender(request, most)
    try:
        return b"".join([part async for part in _bounded(request, most)])
    except ClientDisconnect:
        raise ClientGone("The client went away while it sent the file.") from None


async def _parse(headers: Headers, parts: AsyncGenerator[bytes]) -> FormData:
    try:
        return await MultiPartParser(headers, parts, max_files=1, max_fields=_MAX_FIELDS).parse()
    except MultiPartException as error:
        raise InvalidRequest(
            f"The form cannot be read: {error.message.rstrip('.')}.", code="invalid_form"
        ) from None
    except ClientDisconnect:
        raise ClientGone("The client went away while it sent the file.") from None
    except OSError as error:
        raise Unavailable(
            f"The file cannot be written to disk: {error.strerror}.",
            code="disk_full",
            headers={"Retry-After": "60"},
        ) from None


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes]:
    """Yield the body piece by piece, so that the whole body is never in memory."""
    connection = request.scope.get(CONNECTION)
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most + _AROUND:
            raise _too_large(most)
        yield part
        if connection is not None:
            connection.took(len(part))


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {most} bytes; send several.", code="body_too_large"
    )
