"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ..answers import answers
from ..state import AnyServingDep, json_response
from .answers import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models", responses=answers(ModelList, errors=(503,)))
async def list_models(serving: AnyServingDep) -> Response:
    """The one model of this server."""
    return json_response({"object": "list", "data": [serving.model_card()]})


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard, errors=(404, 503)))
async def retrieve_model(model_id: str, serving: AnyServingDep) -> Response:
    """One model by its name."""
    serving.check_model(model_id)
    return json_response(serving.model_card())
