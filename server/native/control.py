"""SGLang's endpoints for information about the server and for its control."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...runtime.cache.kv_events import KVEventsConfig
from ..core.answers import answers
from ..http.body import JsonRoute
from ..serving.state import ServingDep, json_response
from .answers import AbortCount, CacheFlush, ModelInfo, ServerInfo
from .requests import AbortBody

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)


@router.get("/model_info", responses=answers(ModelInfo, errors=(503,)))
@router.get("/get_model_info", responses=answers(ModelInfo, errors=(503,)))
async def model_info(serving: ServingDep) -> Response:
    """Describe the served model."""
    config = serving.config.engine
    return json_response(
        {
            "model_path": config.model_path,
            "tokenizer_path": config.tokenizer_path or config.model_path,
            "is_generation": True,
            "preferred_sampling_params": dict(serving.sampling_defaults.values),
            "architecture": serving.info.architecture,
            "context_length": serving.limits.context_length,
            "vocab_size": serving.limits.vocab_size,
        }
    )


@router.get("/server_info", responses=answers(ServerInfo, errors=(503,)))
@router.get("/get_server_info", responses=answers(ServerInfo, errors=(503,)))
async def server_info(serving: ServingDep) -> Response:
    """The settings, the values that the engine chose, and the current metrics."""
    settings: dict[str, Any] = {**asdict(serving.config), **asdict(serving.config.engine)}
    for name in ("engine", "api_key", "api_keys", "replica", "replicas"):
        del settings[name]
    engine = asdict(serving.info)
    engines = serving.engine.replicas or [serving.engine]
    wanted = serving.config.engine.kv_events_config
    events = None if wanted is None else KVEventsConfig.parse(wanted)
    return json_response(
        {
            **settings,
            **engine,
            "default_sampling_params": dict(serving.sampling_defaults.values),
            "version": __version__,
            "status": serving.engine.state,
            "internal_states": [
                {
                    "state": each.state,
                    "kv_events": events and events.told(number),
                    **asdict(each.stats),
                }
                for number, each in enumerate(engines)
            ],
        }
    )


@router.post("/flush_cache", responses=answers(CacheFlush, errors=(503,)))
@router.get("/flush_cache", responses=answers(CacheFlush, errors=(503,)))
async def flush_cache(serving: ServingDep) -> Response:
    """Drop cached prefixes that no request uses."""
    return json_response({"success": True, "freed_tokens": await serving.engine.flush_cache()})


@body_router.post("/abort_request", responses=answers(AbortCount, errors=(400, 413, 415)))
async def abort_request(body: AbortBody, serving: ServingDep) -> Response:
    """Abort one request with all of its sequences, or all requests.

    Their output up to now is returned with the finish reason `abort`.
    """
    return json_response(
        {"aborted": await serving.engine.abort(None if body.abort_all else body.rid)}
    )
