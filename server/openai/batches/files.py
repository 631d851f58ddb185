"""`/v1/files`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import IO, Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ...core.answers import Answer, answers
from ...core.errors import BodyTooLarge, ClientGone, InvalidRequest, Unavailable, UnsupportedMedia
from ...serving.sse import CONNECTION
from ...serving.state import json_response
from .paging import Page, page
from .records import FileRecord
from .service import Batches, BatchesDep

router = APIRouter()


class FileList(Page):
    data: Sequence[FileRecord]


class DeletedFile(Answer, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


MAX_FILE_BYTES = 200 * 2**20  # OpenAI's limit for the file of a batch.
_AROUND = 2**16  # Bytes of a form besides its file.
_PART = 2**16  # Bytes of a file that are sent at once.
_MAX_UPLOADS = 4  # Number of simultaneous uploads.
# Charsets of forms. Other charsets of Python may take quadratic time or do not decode to text.
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "latin-1", "latin1", "iso-8859-1"})
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": ["batch"]},
                    },
                }
            }
        },
    }
}


@router.post(
    "/v1/files",
    responses=answers(FileRecord, errors=(400, 404, 413, 415, 503)),
    openapi_extra=_FORM,
)
async def upload_file(request: Request, batches: BatchesDep) -> Response:
    """Store a file with one request per line."""
    await batches.storage()
    _check_sender(request)
    if batches.uploads >= _MAX_UPLOADS:
        raise Unavailable(
            f"{_MAX_UPLOADS} files are being uploaded already. Try again in 1 s.",
            code="uploads_full",
            headers={"Retry-After": "1"},
        )
    batches.uploads += 1
    try:
        return json_response(await _keep(request, batches))
    finally:
        batches.uploads -= 1


async def _keep(request: Request, batches: Batches) -> FileRecord:
    parser = MultiPartParser(request.headers, _bounded(request), max_files=1, max_fields=16)
    try:
        form = await parser.parse()
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
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest(
                "file: the form has no part of this name with a filename.",
                param="file",
                code="missing_required_parameter",
            )
        if purpose != "batch":
            raise InvalidRequest(
                "purpose: this server stores files only for batches; send batch.",
                param="purpose",
                code="invalid_value",
            )
        return await batches.add_file(file.file, file.filename or "file", "batch")
    finally:
        await form.close()


def _check_sender(request: Request) -> None:
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
    if content_length.isdecimal() and int(content_length[:20]) > MAX_FILE_BYTES + _AROUND:
        raise _too_large()


async def _bounded(request: Request) -> AsyncGenerator[bytes]:
    """Yield the body piece by piece, so that the whole body is never in memory."""
    connection = request.scope.get(CONNECTION)
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_FILE_BYTES + _AROUND:
            raise _too_large()
        yield part
        if connection is not None:
            connection.took(len(part))


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {MAX_FILE_BYTES} bytes; send several.", code="body_too_large"
    )


@router.get("/v1/files", responses=answers(FileList, errors=(400, 404, 503)))
async def list_files(
    batches: BatchesDep,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the files, the newest first."""
    storage = await batches.storage()
    files = [file for file in list(storage.files.values()) if purpose in (None, file.purpose)]
    return json_response(page(FileList, files if order == "asc" else files[::-1], after, limit))


@router.get("/v1/files/{file_id}", responses=answers(FileRecord, errors=(404, 503)))
async def retrieve_file(file_id: str, batches: BatchesDep) -> Response:
    """Return a file's description."""
    return json_response(await batches.file(file_id))


@router.delete("/v1/files/{file_id}", responses=answers(DeletedFile, errors=(400, 404, 503)))
async def delete_file(file_id: str, batches: BatchesDep) -> Response:
    """Delete a file."""
    await batches.delete_file(file_id)
    return json_response(DeletedFile(id=file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=answers(media=("application/octet-stream",), errors=(404, 503)),
)
async def file_content(file_id: str, batches: BatchesDep) -> Response:
    """Return a file's content."""
    record, content = await batches.open_file(file_id)
    name = quote(record.filename, safe="")
    return StreamingResponse(
        _parts(content),
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(record.bytes),
            "Content-Disposition": f"attachment; filename*=utf-8''{name}",
            "X-Content-Type-Options": "nosniff",
        },
    )


async def _parts(content: IO[bytes]) -> AsyncGenerator[bytes]:
    with content:
        while part := await asyncio.to_thread(content.read, _PART):
            yield part
