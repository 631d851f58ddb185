"""The HTTP application: every route, the middleware around them, and what an exception becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from .. import __version__
from . import operations
from .auth import ApiKey
from .engine_client import Engine
from .engine_supervisor import EngineUnavailable, QueueFull
from .metrics import Metrics
from .native import control, generate
from .openai import chat, completions, models, tokenize
from .openai.errors import ApiError, answer_error
from .request_id import RequestIds
from .serving import Serving

if TYPE_CHECKING:
    from .args import ServerConfig

_ROUTERS = (
    completions.router,
    chat.router,
    models.router,
    tokenize.router,
    generate.router,
    control.router,
    control.body_router,
    operations.router,
)
_EXCEPTIONS = (ApiError, RequestValidationError, HTTPException, QueueFull, EngineUnavailable, Exception)


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """An application that serves `engine`; starting and stopping the engine is the caller's."""
    name = config.served_model_name
    app = FastAPI(title="Piecework", version=__version__, description="OpenAI-compatible LLM serving")
    metrics = Metrics(engine, name)
    app.state.serving = Serving(engine=engine, config=config, metrics=metrics, model_name=name)
    for router in _ROUTERS:
        app.include_router(router)
    for kind in _EXCEPTIONS:
        app.add_exception_handler(kind, answer_error)
    if config.api_key is not None:
        app.add_middleware(ApiKey, api_key=config.api_key, metrics=metrics)
    app.add_middleware(RequestIds)
    return app
