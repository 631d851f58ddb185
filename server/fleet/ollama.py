"""Ollama's lists of models for a server of several models. They load no model."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from ..auth.accounts import may_use
from ..core.answers import answers
from ..core.model_names import served_name
from ..core.ollama_errors import OllamaErrorAnswer
from ..http.body import JsonRoute
from ..ollama.models import (
    NEVER,
    SHOW,
    Known,
    OllamaModels,
    RunningModels,
    known,
    show,
)
from ..ollama.requests import ShowRequest
from ..serving.state import json_response
from .endpoints import FleetDep, member_named
from .fleet import Fleet
from .member import Member

router = APIRouter()
show_router = APIRouter(route_class=JsonRoute)


@router.get("/api/tags", responses=answers(OllamaModels, error=OllamaErrorAnswer))
async def list_models(fleet: FleetDep) -> Response:
    """List all models of this server."""
    members = [each for each in fleet.members.values() if may_use(each.name)]
    return json_response(OllamaModels([_known(fleet, member).listed() for member in members]))


@router.get("/api/ps", responses=answers(RunningModels, error=OllamaErrorAnswer))
async def list_running(fleet: FleetDep) -> Response:
    """List the models that are loaded, and when they are unloaded if no request comes."""
    members = [each for each in fleet.members.values() if each.admits and may_use(each.name)]
    running = [_known(fleet, each).running(_expires(fleet, each)) for each in members]
    return json_response(RunningModels(running))


@show_router.post("/api/show", responses=SHOW)
async def show_model(body: ShowRequest, fleet: FleetDep) -> Response:
    """Describe a model. Less is known of a model that was never loaded."""
    member = member_named(fleet, served_name(body.model, fleet.members))
    if member.service is not None and member.service.engine.info is not None:
        return json_response(show(member.service.app.state.serving))
    return json_response(_known(fleet, member).shown())


def _known(fleet: Fleet, member: Member) -> Known:
    if member.service is not None and member.service.engine.info is not None:
        found = known(member.service.app.state.serving)
        return found._replace(name=member.name, size=member.size)
    path = member.config.server.engine.model_path
    return Known(member.name, path, fleet.started, member.size, None)


def _expires(fleet: Fleet, member: Member) -> str:
    seconds = member.idle_limit(fleet.config.idle_seconds(member.config))
    if not seconds or member.config.pinned:
        return NEVER
    used = time.time() - (time.monotonic() - member.last_used)
    return datetime.fromtimestamp(used + seconds, UTC).isoformat().replace("+00:00", "Z")
