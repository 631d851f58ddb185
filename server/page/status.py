"""`GET /v1/status`: what a server does now, for the page.

It has no text of requests, and no id by which a request could be read or aborted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...runtime.tokenizer.output_processor import RequestState
from ..auth.accounts import current_key
from ..core.answers import Answer, answers
from ..images.client import ImageJob
from ..serving.state import AnyServingDep, json_response

router = APIRouter()
MAX_ROWS = 100  # Requests that are shown, oldest first.


class RequestRow(Answer):
    """One sequence.

    `id` only distinguishes it from others. `phase` is `queue` until a step computes any of it,
    `prefill` until its first token, then `decode`. `seconds` is its age. `cached_tokens` of its
    prompt were found in the prefix cache; null until that is known.
    """

    id: str
    phase: Literal["queue", "prefill", "decode"]
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class ImageRow(Answer):
    """One image. `phase` is `queue`, then `draw` while `step` of `steps` are done."""

    id: str
    phase: Literal["queue", "draw"]
    seconds: float
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

    kind: Literal["text", "images", "pooling"]
    model: str
    version: str
    state: str
    failure: str | None
    started: int
    silence: float
    restarts: int
    hangs: int
    replicas: list[str]
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
        {
            "kind": serving.kind,
            "model": serving.model_name,
            "version": __version__,
            "state": engine.state,
            "failure": engine.failure,
            "started": serving.started,
            "silence": engine.silence,
            "restarts": engine.restarts,
            "hangs": engine.hangs,
            "replicas": [each.state for each in engine.replicas],
            "unfinished": engine.num_unfinished,
            "requests": list(_rows(engine.unfinished())) if sees_all else [],
            "stats": asdict(engine.stats),
            "info": asdict(engine.info) if sees_all and engine.info is not None else None,
            "ended": metrics.requests.value,
            "aborted": metrics.aborted.value,
            "errors": metrics.errors(),
        }
    )


def _rows(requests: Iterable[Any]) -> Iterable[dict[str, Any]]:
    now = time.monotonic()
    for one in islice(requests, MAX_ROWS):
        if not isinstance(one, RequestState | ImageJob):
            continue
        row = {
            # Hash the id: everybody who knows the id of a stored response may read it.
            "id": hashlib.sha256(one.rid.encode()).hexdigest()[:8],
            "seconds": max(0.0, now - one.arrival_time),
        }
        if isinstance(one, ImageJob):
            step, steps = one.progress
            yield {**row, "phase": "draw" if steps else "queue", "step": step, "steps": steps}
        else:
            begun = "queue" if one.started is None else "prefill"
            yield {
                **row,
                "phase": "decode" if one.output_ids else begun,
                "prompt_tokens": len(one.prompt_ids),
                "completion_tokens": len(one.output_ids),
                "cached_tokens": one.cached_tokens,
            }
