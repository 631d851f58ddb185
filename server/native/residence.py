"""Endpoints of vLLM and SGLang that stop the engine for a while and free its memory."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from ...runtime.core.control_messages import Control, Controlled, Pause, Resume, Sleep, WakeUp
from ..core.answers import Answer, answers
from ..core.errors import InvalidRequest
from ..core.schemas import WireModel
from ..http.body import OptionalJsonRoute
from ..serving.state import Serving, ServingDep, json_response

router = APIRouter()
body_router = APIRouter(route_class=OptionalJsonRoute)
_ERRORS = (400, 413, 415, 503)


class Asleep(Answer):
    is_sleeping: bool


class Stopped(Answer):
    """`seconds` is the time that it took, `freed_bytes` the freed memory of all engines."""

    success: bool
    message: str
    seconds: float
    freed_bytes: int


class MemoryBody(WireModel):
    """Body of SGLang's `/release_memory_occupation` and `/resume_memory_occupation`.

    All memory is released and resumed at once.
    """

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class PauseBody(WireModel):
    """Body of `POST /pause_generation`.

    `abort` ends all requests. `retract` frees the KV cache of running ones, `in_place` keeps it.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"


@router.post("/sleep", responses=answers(Stopped, errors=_ERRORS))
async def sleep(
    serving: ServingDep, level: Annotated[int, Query(ge=1, le=2, description="2: drop weights")] = 1
) -> Response:
    """Free the memory of the weights and of the KV cache. Requests wait for `/wake_up`, or get 503
    with `--sleep-requests refuse`.
    """
    return await _do(serving, Sleep(level=level), "The engine sleeps.")


@router.post("/wake_up", responses=answers(Stopped, errors=_ERRORS))
async def wake_up(serving: ServingDep) -> Response:
    """Load the weights again, and continue with the requests that wait."""
    return await _do(serving, WakeUp(), "The engine is awake.")


@router.get("/is_sleeping", responses=answers(Asleep))
async def is_sleeping(serving: ServingDep) -> Response:
    return json_response(Asleep(serving.engine.asleep))


@body_router.post("/release_memory_occupation", responses=answers(Stopped, errors=_ERRORS))
async def release_memory(body: MemoryBody, serving: ServingDep) -> Response:
    """SGLang's `/sleep`."""
    _check_tags(body)
    return await _do(serving, Sleep(level=1), "The memory is released.")


@body_router.post("/resume_memory_occupation", responses=answers(Stopped, errors=_ERRORS))
async def resume_memory(body: MemoryBody, serving: ServingDep) -> Response:
    """SGLang's `/wake_up`."""
    _check_tags(body)
    return await _do(serving, WakeUp(), "The memory is in use again.")


@body_router.post("/pause_generation", responses=answers(Stopped, errors=_ERRORS))
async def pause_generation(body: PauseBody, serving: ServingDep) -> Response:
    """Compute nothing until `/continue_generation`. New requests wait."""
    _require_on(serving)
    if body.mode == "abort":
        await serving.engine.abort(None)
    return await _do(serving, Pause(retract=body.mode != "in_place"), "The engine is paused.")


@body_router.post("/continue_generation", responses=answers(Stopped, errors=_ERRORS))
async def continue_generation(serving: ServingDep) -> Response:
    """Continue after `/pause_generation`."""
    return await _do(serving, Resume(), "The engine continues.")


def _require_on(serving: Serving) -> None:
    if not serving.config.enable_sleep_mode:
        raise InvalidRequest(
            "This endpoint is off; start the server with --enable-sleep-mode.", code="sleep_off"
        )


async def _do(serving: Serving, message: Control, done: str) -> Response:
    _require_on(serving)
    results = await serving.engine.control(message)
    raise_for(results)
    return json_response(
        Stopped(
            success=True,
            message=done,
            seconds=round(max(result.seconds for result in results), 6),
            freed_bytes=sum(result.freed_bytes for result in results),
        )
    )


def raise_for(results: list[Controlled]) -> None:
    """Raise `InvalidRequest` if an engine refused."""
    for result in results:
        if result.error is not None:
            raise InvalidRequest(f"{result.error}.", code="engine_state")


def _check_tags(body: MemoryBody) -> None:
    if body.tags is not None and not {"weights", "kv_cache"} <= {*body.tags}:
        raise InvalidRequest(
            "tags: the memory of weights and KV cache is released and resumed together; leave "
            "tags out.",
            param="tags",
            code="unsupported_value",
        )
