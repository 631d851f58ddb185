"""What a server of images counts, beside what every server does."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..metrics import EngineCollector, MetricRegistry
from .client import ImageClient
from .store import ImageStore


class ImageMetrics(MetricRegistry):
    """Its own registry, as every server's."""

    unit = "Images"

    def __init__(self, engine: ImageClient, store: ImageStore, model_name: str) -> None:
        super().__init__(model_name)
        self.registry.register(_ImageCollector(engine, store, model_name))


class _ImageCollector(EngineCollector):
    """The figures of a diffusion engine, and of the images that wait to be fetched."""

    def __init__(self, engine: ImageClient, store: ImageStore, model_name: str) -> None:
        super().__init__(engine, model_name, "Images")
        self._images = engine
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        stats = self._images.stats
        yield self._counter("num_images", "Images that were made.", stats.images_total)
        yield self._counter(
            "num_recompiles",
            "Graphs that were compiled while requests were served.",
            stats.recompiles_total,
        )
        seconds = self._counters(
            "stage_seconds", "Time that the engine has spent in each stage.", "stage"
        )
        for stage, total in sorted(stats.stage_seconds_total.items()):
            seconds.add_metric([self._model_name, stage], total)
        yield seconds
        yield self._gauge(
            "stored_image_bytes",
            "Memory of the images that can be fetched by their URLs.",
            self._store.size,
        )
