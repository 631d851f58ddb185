"""The settings of a server of images.

The command line makes flags from them, so this file imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...runtime.config.options import option
from ...runtime.diffusion.config import DiffusionConfig
from ..engine.spawn import DIFFUSION_PIPELINE
from .server import CommonServerConfig

IMAGES = "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageServerConfig(CommonServerConfig):
    """Settings of a server of a diffusion pipeline. Raises `ValueError` for invalid values."""

    engine_command = DIFFUSION_PIPELINE
    image_url_lifetime: float = option(
        3600.0,
        "seconds that an image can be fetched by its URL",
        group=IMAGES,
        metavar="SECONDS",
    )
    image_url_memory: int = option(
        256,
        "maximum size of images that wait to be fetched, in MiB; the oldest are deleted first",
        group=IMAGES,
        metavar="MIB",
    )
    engine: DiffusionConfig = field(default_factory=DiffusionConfig)

    def __post_init__(self) -> None:
        # super() does not work here: a dataclass with slots replaces the class.
        CommonServerConfig.__post_init__(self)
        if not 0 < self.image_url_lifetime < float("inf"):
            raise ValueError(
                f"--image-url-lifetime must be more than 0 seconds, got {self.image_url_lifetime}"
            )
        if self.image_url_memory < 1:
            raise ValueError(
                f"--image-url-memory must be at least 1 MiB, got {self.image_url_memory}"
            )
        if self.engine.warmup_mode == "request":
            raise ValueError(
                "--warmup-mode request is for piecework generate; a server warms up before it is "
                "ready: --warmup-mode server"
            )
