"""`GET /v1/models` and `GET /v1/models/{id}`, in OpenAI's or Anthropic's format."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .anthropic.models import MessagesModel, MessagesModels, model_info, model_list
from .core.answers import Answer, ErrorAnswer, answers
from .core.anthropic_errors import VERSION_HEADER, MessagesErrorAnswer
from .serving.state import AnyServingDep, ModelCard, json_response

router = APIRouter()
_ERROR = ErrorAnswer | MessagesErrorAnswer


class ModelList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get(
    "/v1/models", responses=answers(ModelList | MessagesModels, errors=(503,), error=_ERROR)
)
async def list_models(request: Request, serving: AnyServingDep) -> Response:
    """List the model of this server, once for each of its names."""
    cards = serving.model_cards() if serving.may_be_used() else []
    if VERSION_HEADER in request.headers:
        return json_response(model_list(cards))
    return json_response(ModelList(data=cards))


@router.get(
    "/v1/models/{model_id:path}",
    responses=answers(ModelCard | MessagesModel, errors=(404, 503), error=_ERROR),
)
async def retrieve_model(model_id: str, request: Request, serving: AnyServingDep) -> Response:
    """Return one model by its name."""
    serving.check_model(model_id)
    known = {card.id: card for card in serving.model_cards()}
    card = known.get(model_id) or replace(serving.model_card(), id=model_id)
    return json_response(model_info(card) if VERSION_HEADER in request.headers else card)
