"""The load of each engine, in SGLang's format, for routers that choose the least loaded server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ..core.answers import answers
from ..serving.state import Serving, ServingDep, json_response
from .answers import Load, Loads

router = APIRouter()


@router.get("/v1/loads", responses=answers(Loads, errors=(503,)))
async def loads(serving: ServingDep) -> Response:
    """Requests and tokens of each replica and of all replicas."""
    each = _loads(serving)
    running = sum(load["num_running_reqs"] for load in each)
    waiting = sum(load["num_waiting_reqs"] for load in each)
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": len(each),
            "loads": each,
            "aggregate": {
                "total_running_reqs": running,
                "total_waiting_reqs": waiting,
                "total_reqs": running + waiting,
                "avg_token_usage": sum(load["token_usage"] for load in each) / len(each),
            },
        }
    )


@router.get("/get_load", responses=answers(list[Load], errors=(503,)))
async def get_load(serving: ServingDep) -> Response:
    """The loads in the format of older versions of SGLang."""
    return json_response(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
            for load in _loads(serving)
        ]
    )


def _loads(serving: Serving) -> list[dict[str, Any]]:
    """Return the load of each replica. Raise `EngineUnavailable` until the engine was ready
    once.
    """
    most = serving.info.max_running_requests
    engines = serving.engine.replicas or [serving.engine]
    return [
        {
            "dp_rank": number,
            "num_running_reqs": each.stats.running_requests,
            "num_waiting_reqs": each.stats.queued_requests,
            "num_used_tokens": each.stats.kv_tokens_used,
            "max_total_num_tokens": 0 if each.info is None else each.info.kv_tokens,
            "token_usage": each.stats.cache_share,
            "cache_hit_rate": each.stats.cached_tokens_total
            / (each.stats.prompt_tokens_total or 1),
            "max_running_requests": most // len(engines),
        }
        for number, each in enumerate(engines)
    ]
