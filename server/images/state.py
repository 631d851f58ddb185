"""What the endpoints of images work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends

from ..state import AnyServing, serving_of
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


ImageServingDep = Annotated[ImageServing, Depends(serving_of)]
"""Parameter of an endpoint of servers of images."""
