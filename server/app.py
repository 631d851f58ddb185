"""The HTTP application: its routes, middleware and error handlers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ..runtime.sampling.defaults import SamplingDefaults
from ..version import __version__
from . import models
from .anthropic import messages
from .auth.accounts import Accounts
from .auth.middleware import ApiKey
from .auth.origins import CrossOrigin, SameOrigin
from .config.server import parse_origins
from .core.answers import Application
from .core.errors import ApiError, answer_error
from .core.open_paths import is_open
from .engine.interface import TextEngine
from .engine.state import EngineUnavailable, QueueFull
from .http.body import MAX_IMAGE_BODY_BYTES, Bodies
from .http.content_coding import DecodeBodies
from .llama_cpp import completion as llama_cpp_completion
from .llama_cpp import properties as llama_cpp_properties
from .media.media import Media
from .middleware import EveryAnswer
from .native import adapters, control, generate, loads, profiling, residence, weights
from .observability.metrics import Metrics
from .observability.otlp import read_endpoint
from .observability.request_record import RecordRequests, Watcher, log_request, request_logger
from .ollama import generation as ollama_generation
from .ollama import models as ollama_models
from .openai import chat, completions, moderations, tokenize
from .openai.batches import files, routes
from .openai.batches.service import Batches
from .openai.responses import compaction, conversations
from .openai.responses import endpoints as responses
from .openai.responses.service import Responses
from .openai.stored.kept import Kept
from .openai.stored_chats import endpoints as stored_chats
from .openai.stored_chats.store import StoredChats
from .page import docs as docs_page
from .page import files as page_files
from .page import status as page_status
from .serving import operations
from .serving.state import AnyServing, Serving
from .serving.throughput_log import ThroughputLog

if TYPE_CHECKING:
    from .config.server import BatchServerConfig, ServerConfig
    from .observability.tracing import Tracer


COMMON_ROUTERS = (models.router, operations.router, page_status.router, docs_page.router)
OLLAMA_ROUTERS = (ollama_models.router, ollama_models.show_router, ollama_models.version_router)
BATCH_ROUTERS = (files.router, routes.router, routes.body_router)
# Endpoints of what is stored, which use no model.
STORED_ROUTERS = (
    stored_chats.router,
    stored_chats.body_router,
    responses.router,
    conversations.router,
    conversations.create_router,
    conversations.body_router,
)
TEXT_ROUTERS = (
    *COMMON_ROUTERS,
    completions.router,
    chat.router,
    responses.body_router,
    moderations.router,
    compaction.router,
    *STORED_ROUTERS,
    messages.router,
    ollama_generation.router,
    *OLLAMA_ROUTERS,
    tokenize.router,
    tokenize.info_router,
    *BATCH_ROUTERS,
    llama_cpp_completion.router,
    llama_cpp_properties.router,
    llama_cpp_properties.body_router,
    generate.router,
    control.router,
    loads.router,
    control.body_router,
    profiling.router,
    profiling.body_router,
    adapters.body_router,
    residence.router,
    residence.body_router,
    weights.body_router,
    operations.generate_router,
)
_EXCEPTIONS = (
    ApiError,
    RequestValidationError,
    HTTPException,
    QueueFull,
    EngineUnavailable,
    Exception,
)


def create_app(
    engine: TextEngine,
    config: ServerConfig,
    defaults: SamplingDefaults | None = None,
    *,
    media: Media | None = None,
) -> FastAPI:
    """Return an application for a language model. The caller starts and stops the engine.

    `defaults` are sampling parameters for requests that do not set them. `media` reads the images
    of requests, if the model takes images.
    """
    name = config.model_names[0]
    serving = Serving(
        engine=engine,
        config=config,
        metrics=Metrics(engine, name),
        model_name=name,
        sampling_defaults=defaults or SamplingDefaults(),
        media=media,
    )
    app = add_batches(build_app(serving, TEXT_ROUTERS), serving, config)
    if media is not None:
        app.state.bodies = Bodies(MAX_IMAGE_BODY_BYTES)
    add_stored(app, serving, config)
    if config.log_stats_interval:
        app.state.throughput = ThroughputLog(lambda: [serving], config.log_stats_interval)
    return app


def add_batches(app: FastAPI, serving: AnyServing, config: BatchServerConfig) -> FastAPI:
    """Add the state that the routes of `BATCH_ROUTERS` need. Return the application."""
    app.state.batches = Batches(app, serving.engine, config)
    return app


def add_stored(app: FastAPI, serving: Serving, config: ServerConfig) -> None:
    """Add the state that the routes of `STORED_ROUTERS` need."""
    app.state.kept = kept = Kept(config)
    app.state.responses = Responses(serving, kept)
    app.state.chats = StoredChats(kept)


@contextlib.asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    """Run background work as long as the application runs."""
    batches: Batches | None = getattr(app.state, "batches", None)
    responses: Responses | None = getattr(app.state, "responses", None)
    kept: Kept | None = getattr(app.state, "kept", None)
    throughput: ThroughputLog | None = getattr(app.state, "throughput", None)
    media: Media | None = getattr(app.state.serving, "media", None)
    if batches is not None:
        await batches.start()
    if throughput is not None:
        throughput.start()
    yield
    if throughput is not None:
        await throughput.stop()
    if batches is not None:
        await batches.stop()
    if responses is not None:
        await responses.close()
    if kept is not None:
        await kept.close()
    if media is not None:
        await media.close()
    tracer: Tracer | None = getattr(app.state, "tracer", None)
    if tracer is not None:
        await tracer.close()


def build_app(serving: AnyServing, routers: Sequence[APIRouter]) -> FastAPI:
    """Return an application with these routes and the common middleware and errors."""
    app = Application(
        title="Piecework",
        version=__version__,
        description="OpenAI-compatible serving",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=_life,
    )
    app.state.serving = serving
    config = serving.config
    app.state.accounts = None if config.api_keys is None else Accounts(config.api_keys)
    has_keys = config.api_key is not None or app.state.accounts is not None
    app.state.needs_key = lambda path: has_keys and not is_open(path)
    app.state.bodies = Bodies()
    for router in routers:
        app.include_router(router)
    if not serving.config.no_page:
        app.include_router(page_files.router)
    for kind in _EXCEPTIONS:
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(DecodeBodies, metrics=serving.metrics)
    if has_keys:
        app.add_middleware(
            ApiKey,
            api_key=config.api_key,
            accounts=app.state.accounts,
            metrics=serving.metrics,
        )
    origins = parse_origins(config.cors_origins)
    app.add_middleware(SameOrigin, allowed=origins, metrics=serving.metrics)
    app.add_middleware(EveryAnswer)
    watchers: list[Watcher] = []
    if app.state.accounts is not None:
        watchers.append(app.state.accounts.end)
    if serving.config.log_requests:
        # --log-requests logs independently of --log-level.
        request_logger.setLevel(logging.INFO)
        watchers.append(log_request)
    if serving.config.otlp_traces_endpoint is not None:
        from .observability.tracing import Tracer

        app.state.tracer = Tracer(read_endpoint(serving.config.otlp_traces_endpoint))
        watchers.append(app.state.tracer.trace)
    if watchers:
        app.add_middleware(RecordRequests, watchers=watchers)
    if origins:
        # Outside of the key check, because browsers send preflight requests without the key.
        app.add_middleware(CrossOrigin, allowed=origins)
    return app
