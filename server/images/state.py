"""The state of the image endpoints, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from prometheus_client.core import CounterMetricFamily, Metric

from ..config.images import ImageServerConfig
from ..observability.metrics import Figure, MetricRegistry
from ..serving.state import AnyServing, serving_of
from .client import ImageClient
from .store import ImageStore


class ImageMetrics(MetricRegistry):
    """The metrics of a diffusion engine and of the stored images."""

    unit = "Images"

    def __init__(self, engine: ImageClient, store: ImageStore, model_name: str) -> None:
        super().__init__(engine, model_name)
        self._images = engine
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        seconds = self._images.stats.stage_seconds_total
        yield self._family(
            CounterMetricFamily,
            "stage_seconds",
            "Time that the engine has spent in each stage.",
            {(stage,): total for stage, total in seconds.items()},
            "stage",
        )

    def gauges(self) -> list[Figure]:
        stored = "Memory of the images that can be fetched by their URLs."
        return [*super().gauges(), ("stored_image_bytes", stored, self._store.size)]

    def totals(self) -> list[Figure]:
        stats, compiled = (
            self._images.stats,
            "Graphs that were compiled while requests were served.",
        )
        return [
            *super().totals(),
            ("num_images", "Images that were made.", stats.images_total),
            ("num_recompiles", compiled, stats.recompiles_total),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageServing(AnyServing):
    """The state of a server of a diffusion pipeline."""

    purpose = "This server has a diffusion pipeline, for POST /v1/images/generations"
    kind = "images"

    engine: ImageClient
    config: ImageServerConfig
    metrics: ImageMetrics
    store: ImageStore


# Parameter of the image endpoints.
ImageServingDep = Annotated[ImageServing, Depends(serving_of)]
