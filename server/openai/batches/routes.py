"""`/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, answers
from ...http.body import JsonRoute
from ...serving.state import json_response
from .paging import page
from .protocol import BatchAnswer, BatchList, BatchRequest
from .service import BatchesDep

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)


@body_router.post("/v1/batches", responses=answers(BatchAnswer, errors=BODY_ERRORS))
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
    newest: list[Any] = list(storage.batches.values())[::-1]
    return json_response(page(newest, after, limit))


@router.get("/v1/batches/{batch_id}", responses=answers(BatchAnswer, errors=(404, 503)))
async def retrieve_batch(batch_id: str, batches: BatchesDep) -> Response:
    """Return one batch."""
    return json_response(await batches.batch(batch_id))


@router.post(
    "/v1/batches/{batch_id}/cancel", responses=answers(BatchAnswer, errors=(400, 404, 503))
)
async def cancel_batch(batch_id: str, batches: BatchesDep) -> Response:
    """Cancel a batch. Answers that are already written can be retrieved."""
    record = await batches.batch(batch_id)
    await batches.cancel(record)
    return json_response(record)
