"""The service of `piecework serve` for several models: the fleet, its application and summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from fastapi import FastAPI
from starlette.routing import BaseRoute

from . import models
from .app import (
    BATCH_ROUTERS,
    COMMON_ROUTERS,
    STORED_ROUTERS,
    TEXT_ROUTERS,
    add_batches,
    add_stored,
    build_app,
)
from .config.fleet import FleetConfig
from .config.images import ImageServerConfig
from .config.pooling import PoolingServerConfig
from .config.server import ServerConfig
from .config.speech import SpeechServerConfig
from .core.answers import Application
from .fleet import endpoints, ollama
from .fleet.dispatch import MemberRoute, Routes
from .fleet.estimate import check_room, memory_limit
from .fleet.fleet import Fleet
from .fleet.metrics import FleetMetrics
from .image_service import IMAGE_ROUTERS
from .ollama import models as ollama_models
from .openai import moderations
from .openai.stored.kept import check_store
from .page import status as page_status
from .pooling_service import POOLING_ROUTERS
from .services import service_of
from .serving.service import Service
from .serving.state import AnyServing, Serving
from .serving.throughput_log import ThroughputLog
from .speech_service import SPEECH_ROUTERS
from .summary import table

_GIB = 2**30
# The fleet itself serves files, batches and stored responses. It dispatches each line of a batch to
# the line's model, and stored responses can be read while no model is loaded.
_OWN_ROUTERS = (
    endpoints.router,
    endpoints.body_router,
    *(each for each in COMMON_ROUTERS if each not in (models.router, page_status.router)),
    *BATCH_ROUTERS,
    *STORED_ROUTERS,
    moderations.router,
    ollama.router,
    ollama.show_router,
    ollama_models.version_router,
)
_ROUTERS = {
    ServerConfig: TEXT_ROUTERS,
    PoolingServerConfig: POOLING_ROUTERS,
    ImageServerConfig: IMAGE_ROUTERS,
    SpeechServerConfig: SPEECH_ROUTERS,
}
_KINDS = {
    ServerConfig: "language model",
    PoolingServerConfig: "vectors or scores",
    ImageServerConfig: "images",
    SpeechServerConfig: "text of speech",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetServing(AnyServing):
    """The state of a server of several models."""

    kind = "text"
    purpose = "This server has several models, which GET /v1/models lists"


def prepare_fleet(config: FleetConfig) -> Callable[[], Service]:
    """Check the settings and return a function that makes the service in its event loop.

    Raises `ValueError`.
    """
    check_store(config)
    check_room(config.members, memory_limit(config.limits))
    return lambda: fleet_service(config)


def fleet_service(config: FleetConfig) -> Service:
    """Make the service. Call it in the event loop that runs the service."""
    app_holder: list[FastAPI] = []

    def adopt(service: Service) -> None:
        """Let a model's application use the fleet's stored responses."""
        if hasattr(service.app.state, "responses"):
            service.app.state.responses = app_holder[0].state.responses
            service.app.state.chats = app_holder[0].state.chats

    fleet = Fleet(config, adopt, service_of)
    app = create_fleet_app(fleet, config)
    app_holder.append(app)
    return Service(fleet, app, lambda _, *start: fleet_summary(fleet, config, *start))


def _text_models(fleet: Fleet) -> list[Serving]:
    """Return the language models that are loaded."""
    found = [
        member.service.app.state.serving
        for member in fleet.members.values()
        if member.service is not None
    ]
    return [serving for serving in found if isinstance(serving, Serving)]


def create_fleet_app(fleet: Fleet, config: FleetConfig) -> FastAPI:
    """Return an application that dispatches requests to the applications of its models."""
    kinds = dict.fromkeys(type(each.config.server) for each in fleet.members.values())
    serving = FleetServing(engine=fleet, config=config, metrics=FleetMetrics(fleet), model_name="")
    app = add_batches(build_app(serving, _OWN_ROUTERS), serving, config)
    add_stored(app, cast(Serving, serving), cast(ServerConfig, config))
    if config.log_stats_interval:
        app.state.throughput = ThroughputLog(lambda: _text_models(fleet), config.log_stats_interval)
    routes: Routes = {
        kind: [route for router in _ROUTERS[kind] for route in router.routes] for kind in kinds
    }
    # The OpenAPI document has the routes of all applications.
    described = Application(
        title=app.title, version=app.version, description=app.description, docs_url=None
    )
    described.state.needs_key = app.state.needs_key
    own = {_key(route) for router in _OWN_ROUTERS for route in router.routes}
    others = {_key(route): route for kind in routes.values() for route in kind}
    members = [route for key, route in others.items() if key not in own]
    described.router.routes = [*app.routes, *members]
    setattr(app, "openapi", described.openapi)  # noqa: B010
    app.router.routes.append(MemberRoute(fleet, routes))
    return app


def _key(route: BaseRoute) -> tuple[str, frozenset[str]]:
    """Return path and methods of a route."""
    return getattr(route, "path", ""), frozenset(getattr(route, "methods", ()))


def fleet_summary(fleet: Fleet, config: FleetConfig, port: int, seconds: float) -> str:
    """Return the served models and a command to try one."""
    rows = {}
    for name, member in fleet.members.items():
        engine = member.config.server.engine
        threads = getattr(engine, "num_threads", None) or f"all {os.cpu_count()}"
        said = [
            _KINDS[type(member.config.server)],
            engine.model_path,
            f"{fleet.status(member)}{f' ({member.failure})' if member.failure else ''}",
            f"{member.size / _GIB:.2f} GiB",
            f"{threads} threads",
            *(["pinned"] if member.config.pinned else []),
        ]
        rows[name] = ", ".join(said)
    most = config.limits.max_loaded_models
    rows["memory"] = f"{fleet.memory_limit / _GIB:.2f} GiB for all (--fleet-memory)" + (
        "" if most is None else f", {most} loaded at once (--max-loaded-models)"
    )
    rows["waiting limit"] = f"{config.max_queued_requests:,} requests wait for models"
    first = next(iter(fleet.members))
    return table(config, port, seconds, rows, "models/load", {"model": first})
