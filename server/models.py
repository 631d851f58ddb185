"""`GET /v1/models` and `GET /v1/models/{id}`, in OpenAI's or Anthropic's format."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .anthropic.answers import MessagesErrorAnswer, MessagesModel, MessagesModels
from .anthropic.models import model_info, model_list
from .core.answers import ErrorAnswer, answers
from .core.anthropic_errors import VERSION_HEADER
from .openai.answers import ModelCard, ModelList
from .serving.state import AnyServingDep, json_response

router = APIRouter()


_ERROR = ErrorAnswer | MessagesErrorAnswer


@router.get(
    "/v1/models", responses=answers(ModelList | MessagesModels, errors=(503,), error=_ERROR)
)
async def list_models(request: Request, serving: AnyServingDep) -> Response:
    """List the model of this server, once for each of its names."""
    names = serving.config.model_names if serving.may_be_used() else ()
    cards = [serving.model_card() | {"id": name} for name in names]
    if VERSION_HEADER in request.headers:
        return json_response(model_list(cards))
    return json_response({"object": "list", "data": cards})


@router.get(
    "/v1/models/{model_id:path}",
    responses=answers(ModelCard | MessagesModel, errors=(404, 503), error=_ERROR),
)
async def retrieve_model(model_id: str, request: Request, serving: AnyServingDep) -> Response:
    """Return one model by its name."""
    serving.check_model(model_id)
    card = serving.model_card() | {"id": model_id}
    return json_response(model_info(card) if VERSION_HEADER in request.headers else card)
