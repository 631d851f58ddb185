"""`/v1/batches`: https://platform.openai.com/docs/api-reference/batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, answers
from ...core.schemas import Metadata, WireModel
from ...http.body import JsonRoute
from ...serving.state import json_response
from .paging import Page, page
from .records import BatchRecord
from .service import BatchesDep

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class BatchRequest(WireModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[
        str,
        Field(
            pattern=r"^[1-9][0-9]{0,3}[smhd]$",
            description="a number and s, m, h or d, for example 24h",
        ),
    ]
    metadata: Metadata | None = None
    output_expires_after: Any = None

    @property
    def seconds(self) -> int:
        """Length of the completion window in seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]


class BatchList(Page):
    data: Sequence[BatchRecord]


@body_router.post("/v1/batches", responses=answers(BatchRecord, errors=BODY_ERRORS))
async def create_batch(body: BatchRequest, batches: BatchesDep) -> Response:
    """Create a batch, which answers the requests of a file when the server has room."""
    record = await batches.create(
        body.input_file_id, body.endpoint, body.completion_window, body.seconds, body.metadata
    )
    return json_response(record)


@router.get("/v1/batches", responses=answers(BatchList, errors=(400, 404, 503)))
async def list_batches(
    batches: BatchesDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List the batches, the newest first."""
    storage = await batches.storage()
    newest = list(storage.batches.values())[::-1]
    return json_response(page(BatchList, newest, after, limit))


@router.get("/v1/batches/{batch_id}", responses=answers(BatchRecord, errors=(404, 503)))
async def retrieve_batch(batch_id: str, batches: BatchesDep) -> Response:
    """Return one batch."""
    return json_response(await batches.batch(batch_id))


@router.post(
    "/v1/batches/{batch_id}/cancel", responses=answers(BatchRecord, errors=(400, 404, 503))
)
async def cancel_batch(batch_id: str, batches: BatchesDep) -> Response:
    """Cancel a batch. Answers that are already written can be retrieved."""
    record = await batches.batch(batch_id)
    await batches.cancel(record)
    return json_response(record)
