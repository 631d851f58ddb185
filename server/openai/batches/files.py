"""`/v1/files`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import IO, Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...core.answers import Answer, answers
from ...core.errors import InvalidRequest
from ...http.form import file_of, form_schema
from ...serving.state import json_response
from .paging import Page, page
from .records import FileRecord
from .service import BatchesDep

router = APIRouter()


class FileList(Page):
    data: Sequence[FileRecord]


class DeletedFile(Answer, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


MAX_FILE_BYTES = 200 * 2**20  # OpenAI's limit for the file of a batch.
_PART = 2**16  # Bytes of a file that are sent at once.
_FORM = form_schema(
    {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    ("file", "purpose"),
)


@router.post(
    "/v1/files",
    responses=answers(FileRecord, errors=(400, 404, 413, 415, 503)),
    openapi_extra=_FORM,
)
async def upload_file(request: Request, batches: BatchesDep) -> Response:
    """Store a file with one request per line."""
    await batches.storage()
    async with batches.uploads.form(request, MAX_FILE_BYTES) as form:
        file = file_of(form)
        if form.get("purpose") != "batch":
            raise InvalidRequest(
                "purpose: this server stores files only for batches; send batch.",
                param="purpose",
                code="invalid_value",
            )
        record = await batches.add_file(file.file, file.filename or "file", "batch")
    return json_response(record)


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
