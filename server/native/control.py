"""SGLang's endpoints for information about the server and for its control."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import structs
from starlette.responses import Response

from ...runtime.config.kv_events import KVEventsConfig
from ...version import __version__
from ..core.answers import Answer, answers
from ..engine.state import EngineState
from ..http.body import JsonRoute
from ..serving.state import ServingDep, json_response
from .requests import AbortBody

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float]
    architecture: str
    context_length: int
    vocab_size: int
    weight_version: str


class ServerInfo(Answer):
    """Every setting, and these members."""

    is_open = True

    context_length: int
    default_sampling_params: dict[str, float]
    version: str
    status: EngineState
    internal_states: list[dict[str, Any]]


class CacheFlush(Answer):
    success: bool
    freed_tokens: int


class AbortCount(Answer):
    aborted: int


@router.get("/model_info", responses=answers(ModelInfo, errors=(503,)))
@router.get("/get_model_info", responses=answers(ModelInfo, errors=(503,)))
async def model_info(serving: ServingDep) -> Response:
    """Describe the served model."""
    config = serving.config.engine
    return json_response(
        ModelInfo(
            serving.weights.path or config.model_path,
            config.tokenizer_path or config.model_path,
            is_generation=True,
            preferred_sampling_params=dict(serving.sampling_defaults.values),
            architecture=serving.info.architecture,
            context_length=serving.limits.context_length,
            vocab_size=serving.limits.vocab_size,
            weight_version=serving.weights.version,
        )
    )


@router.get("/server_info", responses=answers(ServerInfo, errors=(503,)))
@router.get("/get_server_info", responses=answers(ServerInfo, errors=(503,)))
async def server_info(serving: ServingDep) -> Response:
    """The settings, the values that the engine chose, and the current metrics."""
    settings: dict[str, Any] = {**asdict(serving.config), **asdict(serving.config.engine)}
    for name in ("engine", "api_key", "api_keys", "replica", "replicas"):
        del settings[name]
    engines = serving.engine.replicas or [serving.engine]
    wanted = serving.config.engine.kv_events_config
    events = None if wanted is None else KVEventsConfig.parse(wanted)
    info = ServerInfo(
        serving.info.context_length,
        dict(serving.sampling_defaults.values),
        __version__,
        serving.engine.state,
        [
            {
                "state": engine.state,
                "kv_events": events and events.addresses(number),
                **asdict(engine.stats),
                "prefill_replay_share": engine.stats.prefill_replay_share,
                "prefill_replay_token_share": engine.stats.prefill_replay_token_share,
            }
            for number, engine in enumerate(engines)
        ],
    )
    everything = {**settings, **asdict(serving.info), **structs.asdict(info)}
    return json_response(msgspec.Raw(msgspec.json.encode(everything)))


@router.post("/flush_cache", responses=answers(CacheFlush, errors=(503,)))
@router.get("/flush_cache", responses=answers(CacheFlush, errors=(503,)))
async def flush_cache(serving: ServingDep) -> Response:
    """Drop cached prefixes that no request uses."""
    return json_response(CacheFlush(success=True, freed_tokens=await serving.engine.flush_cache()))


@body_router.post("/abort_request", responses=answers(AbortCount, errors=(400, 413, 415)))
async def abort_request(body: AbortBody, serving: ServingDep) -> Response:
    """Abort one request with all of its sequences, or all requests.

    Their output up to now is returned with the finish reason `abort`.
    """
    return json_response(
        AbortCount(await serving.engine.abort(None if body.abort_all else body.rid))
    )
