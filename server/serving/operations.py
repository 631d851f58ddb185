"""Endpoints for operators: health, readiness, metrics, version."""

from __future__ import annotations

import asyncio
import uuid
from typing import Literal

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.core.sampling_params import SamplingParams
from ...runtime.tokenizer.output_processor import RequestState
from ...version import __version__
from ..core.answers import Answer, answers
from ..core.errors import ENGINE_RETRY_SECONDS, Unavailable, as_api_error
from ..engine.interface import unavailable
from ..engine.state import EngineState
from .collector import generate_all, unless_client_goes
from .state import AnyServing, AnyServingDep, ServingDep, json_response

router = APIRouter()  # Endpoints of every server.
generate_router = APIRouter()
GENERATE_TIMEOUT = 20.0  # Seconds in which a healthy server generates one token.


class Health(Answer):
    """The health of a server. `replicas` has their states if some do not serve.

    `phase` says what the engine still does before it serves at full speed.
    """

    status: EngineState | Literal["ok", "degraded"]
    replicas: list[EngineState] | UnsetType = UNSET
    phase: str | UnsetType = UNSET


class Version(Answer):
    version: str


@router.get("/live", responses=answers(Health))
async def live(serving: AnyServingDep) -> Response:
    """200 as long as this process answers, whatever its engine's state is: for liveness probes."""
    return json_response(Health(serving.engine.state))


@router.get("/health", responses=answers(Health, errors=(503,)))
@router.get("/v1/health", responses=answers(Health, errors=(503,)))
async def llama_cpp_health(request: Request, serving: AnyServingDep) -> Response:
    """Like `/ready`, with `ok` for an engine that serves, as in llama.cpp's server."""
    if answer := _not_ready(request, serving):
        return answer
    found = _health(serving)
    return json_response(Health("ok") if found.status is EngineState.READY else found)


@router.get("/ready", responses=answers(Health, errors=(503,)))
@router.get("/ping", responses=answers(Health, errors=(503,)))
@router.post("/ping", responses=answers(Health, errors=(503,)))
async def health(request: Request, serving: AnyServingDep) -> Response:
    """200 while the engine serves; 503 before it is ready, while it restarts and after it has
    ended.

    If only some replicas serve, the answer is 200 with the status `degraded` and the states of all
    replicas.
    """
    return _not_ready(request, serving) or json_response(_health(serving))


@generate_router.get("/health_generate", responses=answers(Health, errors=(503,)))
async def health_generate(request: Request, serving: ServingDep) -> Response:
    """Generate one token. 503 if that takes too long."""
    if answer := _not_ready(request, serving):
        return answer
    tokenizer = serving.engine.tokenizer
    prompt = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0]
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    probe = RequestState(f"health-{uuid.uuid4().hex}", prompt, params, tokenizer)
    try:
        async with asyncio.timeout(GENERATE_TIMEOUT):
            await unless_client_goes(request.receive, generate_all(serving, [probe]))
    except TimeoutError:
        message = f"No token was generated within {GENERATE_TIMEOUT:.0f} s."
        raise Unavailable(
            message, code="unhealthy", headers={"Retry-After": str(ENGINE_RETRY_SECONDS)}
        ) from None
    return json_response(_health(serving))


@router.get("/metrics", response_class=Response, responses=answers(media=("text/plain",)))
async def metrics(serving: AnyServingDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    return json_response(Version(__version__))


def _health(serving: AnyServing) -> Health:
    states = [replica.state for replica in serving.engine.replicas]
    if all(state is EngineState.READY for state in states):
        progress = serving.engine.progress
        phase = UNSET if progress is None else progress.phase
        return Health(serving.engine.state, phase=phase)
    return Health("degraded", states)


def _not_ready(request: Request, serving: AnyServing) -> Response | None:
    """Return the 503 answer of an engine that does not serve, or None.

    It is not counted as an error, because only the prober sees it.
    """
    if serving.engine.state is EngineState.READY:
        return None
    return as_api_error(unavailable(serving.engine)).response(request.scope)
