"""SGLang's endpoints that read and replace the weights of a running engine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ...runtime.core.control_messages import ReadWeights, UpdateWeights
from ..core.allowed_path import path_below
from ..core.answers import Answer, answers
from ..core.errors import InvalidRequest
from ..core.schemas import Integer, WireModel, only
from ..http.body import JsonRoute
from ..serving.state import Serving, ServingDep, json_response
from .residence import raise_for

body_router = APIRouter(route_class=JsonRoute)
_ERRORS = (400, 413, 415, 503)
_MOST_NUMBERS = 100_000


class UpdateBody(WireModel):
    """Body of `POST /update_weights_from_disk`.

    By default running requests finish on the old weights. With `flush_running` they continue on the
    new ones, with `abort_all_requests` they end.
    """

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Annotated[str, Field(max_length=256)] | None = None
    abort_all_requests: bool = False
    flush_running: bool = False
    load_format: Annotated[Any, only("auto")] = None
    flush_cache: Annotated[Any, only(True)] = None


class WeightsUpdate(Answer):
    """`seconds` is the time during which no step ran."""

    success: bool
    message: str
    num_paused_requests: int
    seconds: float


class WeightsBody(WireModel):
    """Body of `POST /get_weights_by_name`."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    truncate_size: Annotated[Integer, Field(ge=1, le=_MOST_NUMBERS)] = 100


@body_router.post("/update_weights_from_disk", responses=answers(WeightsUpdate, errors=_ERRORS))
async def update_weights(body: UpdateBody, serving: ServingDep) -> Response:
    """Load weights of the same architecture and shapes, and continue with them.

    The weights are loaded while requests run. If they cannot be used, the old ones stay.
    """
    path = await asyncio.to_thread(_allowed, serving, body.model_path)
    if body.abort_all_requests:
        await serving.engine.abort(None)
    message = UpdateWeights(model_path=path, at_once=body.flush_running)
    results = await serving.engine.control(message)
    raise_for(results)
    serving.weights.path = path
    if body.weight_version is not None:
        serving.weights.version = body.weight_version
    return json_response(
        WeightsUpdate(
            success=True,
            message=f"The weights of {body.model_path} are in use.",
            num_paused_requests=serving.engine.num_unfinished,
            seconds=round(max(result.seconds for result in results), 6),
        )
    )


@body_router.post("/get_weights_by_name", responses=answers(list[float], errors=_ERRORS))
async def get_weights(body: WeightsBody, serving: ServingDep) -> Response:
    """Return the first numbers of a parameter, under the name that the engine gives it."""
    _root(serving)
    message = ReadWeights(name=body.name, count=body.truncate_size)
    results = await serving.engine.control(message)
    raise_for(results)
    return json_response(msgspec.Raw(msgspec.json.encode(results[0].numbers)))


def _root(serving: Serving) -> str:
    folder = serving.config.weights_root
    if folder is None:
        raise InvalidRequest(
            "This endpoint is off; start the server with --weights-root FOLDER.",
            code="weights_off",
        )
    return folder


def _allowed(serving: Serving, path: str) -> str:
    """Return the path of a model below `--weights-root`. Raise `InvalidRequest` for another one."""
    chosen = path_below(_root(serving), path)
    if chosen is None:
        raise InvalidRequest(
            "model_path: name a model folder or .gguf file below --weights-root.",
            param="model_path",
            code="invalid_value",
        )
    return chosen
