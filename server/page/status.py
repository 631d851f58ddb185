"""`GET /v1/status`: what a server does now, for the page.

It has no text of requests, and no id by which a request could be read or aborted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestState
from ...version import __version__
from ..auth.accounts import current_key
from ..core.answers import Answer, answers
from ..engine.state import EngineState
from ..images.client import ImageJob
from ..serving.state import AnyServingDep, Kind, json_response

router = APIRouter()
MAX_ROWS = 100  # Requests that are shown, oldest first.


class RequestRow(Answer):
    """One sequence.

    `id` only distinguishes it from others. `phase` is `queue` until a step computes any of it,
    `prefill` until its first token, then `decode`. `seconds` is its age. `cached_tokens` of its
    prompt were found in the prefix cache; null until that is known.
    """

    id: str
    seconds: float
    phase: Literal["queue", "prefill", "decode"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class ImageRow(Answer):
    """One image. `phase` is `queue`, then `draw` while `step` of `steps` are done."""

    id: str
    seconds: float
    phase: Literal["queue", "draw"]
    step: int
    steps: int


class ServerStatus(Answer):
    """The status of a server.

    `started` is the server's start in seconds since the epoch. `silence` is in seconds since the
    engine's last sign of life. `replicas` are the states of several replicas. `unfinished` counts
    running and waiting requests; `requests` lists the oldest 100, only of language models. `stats`
    and `info` are those of the engine. `info` is null before the engine is ready. `info` and
    `requests` are hidden from keys without `admin`. `errors` counts errors by type.
    """

    kind: Kind
    model: str
    version: str
    state: EngineState
    failure: str | None
    started: int
    silence: float
    restarts: int
    hangs: int
    replicas: list[EngineState]
    unfinished: int
    requests: list[RequestRow | ImageRow]
    stats: dict[str, Any]
    info: dict[str, Any] | None
    ended: int
    aborted: int
    errors: dict[str, int]


@router.get("/v1/status", responses=answers(ServerStatus))
async def status(serving: AnyServingDep) -> Response:
    """Return what the server does now; only totals for a key of `--api-keys` without `admin`."""
    engine, metrics, key = serving.engine, serving.metrics, current_key.get()
    sees_all = key is None or key.admin
    return json_response(
        ServerStatus(
            kind=serving.kind,
            model=serving.model_name,
            version=__version__,
            state=engine.state,
            failure=engine.failure,
            started=serving.started,
            silence=engine.silence,
            restarts=engine.restarts,
            hangs=engine.hangs,
            replicas=[replica.state for replica in engine.replicas],
            unfinished=engine.num_unfinished,
            requests=list(_rows(engine.unfinished())) if sees_all else [],
            stats=asdict(engine.stats),
            info=asdict(engine.info) if sees_all and engine.info is not None else None,
            ended=metrics.requests.value,
            aborted=metrics.aborted.value,
            errors=metrics.errors(),
        )
    )


def _rows(requests: Iterable[Any]) -> Iterator[RequestRow | ImageRow]:
    now = time.monotonic()
    for request in islice(requests, MAX_ROWS):
        if not isinstance(request, RequestState | ImageJob):
            continue
        # Hash the id: everybody who knows the id of a stored response may read it.
        row_id = hashlib.sha256(request.rid.encode()).hexdigest()[:8]
        seconds = max(0.0, now - request.arrival_time)
        if isinstance(request, ImageJob):
            step, steps = request.progress
            yield ImageRow(row_id, seconds, "draw" if steps else "queue", step, steps)
        else:
            waits: Literal["queue", "prefill"] = "queue" if request.started is None else "prefill"
            yield RequestRow(
                row_id,
                seconds,
                "decode" if request.output_ids else waits,
                len(request.prompt_ids),
                len(request.output_ids),
                request.cached_tokens,
            )
