"""What the endpoints of images work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from ..state import AnyServing
from .client import ImageClient
from .config import ImageServerConfig
from .metrics import ImageMetrics
from .store import ImageStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageServing(AnyServing):
    """A server of a diffusion pipeline."""

    purpose = "This server has a diffusion pipeline, for POST /v1/images/generations"

    engine: ImageClient
    config: ImageServerConfig
    metrics: ImageMetrics
    store: ImageStore


async def _image_serving(request: Request) -> ImageServing:
    serving = request.app.state.serving
    assert isinstance(serving, ImageServing)
    return serving


ImageServingDep = Annotated[ImageServing, Depends(_image_serving)]
"""Parameter of an endpoint that receives the application's `ImageServing`."""
