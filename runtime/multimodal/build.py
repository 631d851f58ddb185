"""Makes the encoder of an engine's model, if it takes images."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.linear import LinearKernels
from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from .encodings import Encodings
from .pace import Pace
from .source import INSTALL, ImageSource, asked_source


def _find_source(path: str, config: EngineConfig) -> ImageSource | None:
    """Return where the encoder of a model is that is to take images, or None."""
    source = asked_source(path, config)
    if source is not None and config.batch_invariant:
        raise ValueError(
            "--batch-invariant takes texts alone: add --disable-vision, or leave it out"
        )
    return source


def make_encodings(
    path: str,
    config: EngineConfig,
    platform: Platform,
    dtype: torch.dtype,
    kernels: LinearKernels | None,
) -> Encodings | None:
    """Load the encoder of a model. Return None if it takes no images."""
    if (source := _find_source(path, config)) is None:
        return None
    try:
        # Imported here, because engines of texts need neither greenlet nor transformers' models.
        from .encode_job import encode_job, encode_largest
        from .tower import load_tower
    except ModuleNotFoundError as error:
        raise ValueError(
            f"images need {error.name}; run: {INSTALL}, or add --disable-vision"
        ) from None
    device, family = platform.device(), source.family
    tower = load_tower(source, dtype, device, kernels, platform.lacking_dtypes)
    budget = config.mm_encoder_budget or platform.default_encoder_budget
    return Encodings(
        tower,
        family,
        partial(encode_job, tower, family, dtype, platform.encoder_rows),
        partial(encode_largest, tower, source, dtype),
        device,
        pace=Pace(None if budget is None else budget * tower.patch_cost),
        most_bytes=config.mm_cache_bytes,
    )
