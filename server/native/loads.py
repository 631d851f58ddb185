"""The load of each engine, in SGLang's format, for routers that choose the least loaded server."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from ...version import __version__
from ..core.answers import Answer, answers
from ..serving.state import Serving, ServingDep, json_response

router = APIRouter()


class ReplicaLoad(Answer):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    max_running_requests: int


class TotalLoad(Answer):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(Answer):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[ReplicaLoad]
    aggregate: TotalLoad


class Load(Answer):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


@router.get("/v1/loads", responses=answers(Loads, errors=(503,)))
async def loads(serving: ServingDep) -> Response:
    """Requests and tokens of each replica and of all replicas."""
    replicas = _loads(serving)
    running = sum(load.num_running_reqs for load in replicas)
    waiting = sum(load.num_waiting_reqs for load in replicas)
    usage = sum(load.token_usage for load in replicas) / len(replicas)
    total = TotalLoad(running, waiting, running + waiting, usage)
    now = datetime.now(UTC).isoformat()
    return json_response(Loads(now, __version__, len(replicas), replicas, total))


@router.get("/get_load", responses=answers(list[Load], errors=(503,)))
async def get_load(serving: ServingDep) -> Response:
    """The loads in the format of older versions of SGLang."""
    return json_response(
        [
            Load(
                load.dp_rank,
                load.num_running_reqs + load.num_waiting_reqs,
                load.num_waiting_reqs,
                load.num_used_tokens,
            )
            for load in _loads(serving)
        ]
    )


def _loads(serving: Serving) -> list[ReplicaLoad]:
    """Return the load of each replica. Raise `EngineUnavailable` until the engine was ready
    once.
    """
    most = serving.info.max_running_requests
    engines = serving.engine.replicas or [serving.engine]
    return [
        ReplicaLoad(
            dp_rank=number,
            num_running_reqs=engine.stats.running_requests,
            num_waiting_reqs=engine.stats.queued_requests,
            num_used_tokens=engine.stats.kv_tokens_used,
            max_total_num_tokens=0 if engine.info is None else engine.info.kv_tokens,
            token_usage=engine.stats.cache_share,
            cache_hit_rate=engine.stats.cached_tokens_total
            / (engine.stats.prompt_tokens_total or 1),
            max_running_requests=most // len(engines),
        )
        for number, engine in enumerate(engines)
    ]
