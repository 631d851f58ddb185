"""The service of `piecework serve` for a diffusion pipeline: engine, application and summary."""

from __future__ import annotations

import subprocess
from functools import partial

from fastapi import FastAPI

from ..runtime.core.messages import DiffusionInfo
from .app import COMMON_ROUTERS, build_app
from .config.images import ImageServerConfig
from .engine.settings import settings_of
from .images import generations
from .images.client import ImageClient
from .images.state import ImageMetrics, ImageServing
from .images.store import ImageStore
from .serving.service import Service
from .summary import table

_MIB = 2**20
IMAGE_ROUTERS = (generations.router, generations.file_router, *COMMON_ROUTERS)


def image_service(config: ImageServerConfig, process: subprocess.Popen[bytes] | None) -> Service:
    """Make the service. Call it in the event loop that runs the service.

    `process` is an engine process that waits for its job, or None.
    """
    engine = ImageClient(config.engine, **settings_of(config, process))
    return Service(engine, create_image_app(engine, config), partial(image_summary, config))


def create_image_app(engine: ImageClient, config: ImageServerConfig) -> FastAPI:
    """Return an application for images. The caller starts and stops the engine."""
    name = config.model_names[0]
    store = ImageStore(config.image_url_memory * _MIB, config.image_url_lifetime)
    metrics = ImageMetrics(engine, store, name)
    return build_app(
        ImageServing(engine=engine, config=config, metrics=metrics, model_name=name, store=store),
        IMAGE_ROUTERS,
    )


def image_summary(config: ImageServerConfig, info: DiffusionInfo, port: int, seconds: float) -> str:
    """Return what is served, its limits, and a command to try it."""
    size = (
        f"{info.default_size[0]}x{info.default_size[1]}"
        if info.default_size is not None
        else "the pipeline's"
    )
    rows = {
        "model": f"{info.architecture}, {info.dtype} on {info.device}, weights "
        f"{info.weight_bytes / _MIB:,.0f} MiB",
        "default": f"{size} pixels"
        + (f", {info.default_steps} steps" if info.default_steps is not None else ""),
        "running limit": f"{info.max_running_requests:,} images side by side, "
        f"{config.max_queued_requests:,} more may wait",
    }
    if info.warm_up_seconds:
        rows["warm-up"] = f"{info.warm_up_seconds:.1f} s"
    if info.compiled is not None:
        rows["compiled"] = info.compiled
    body = {"prompt": "a red fox in the snow", "response_format": "url"}
    return table(config, port, seconds, rows | info.remarks, "images/generations", body)
