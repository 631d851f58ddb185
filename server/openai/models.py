"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..serving import Serving, ServingDep, json_response

router = APIRouter()


@router.get("/v1/models")
async def list_models(serving: ServingDep) -> Response:
    """The one model of this server."""
    return json_response({"object": "list", "data": [_card(serving)]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, serving: ServingDep) -> Response:
    """One model by its name."""
    serving.check_model(model_id)
    return json_response(_card(serving))


def _card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.started,
        "owned_by": "piecework",
        "root": serving.config.engine.model_path,
        "parent": None,
        "max_model_len": serving.limits.context_length,
    }
