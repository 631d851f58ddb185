"""Makes the encoder of an engine's model, if it takes images."""

from __future__ import annotations

import torch

from ...kernels.linear import LinearKernels
from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from .encodings import Encodings
from .source import ImageSource, find_source
from .tower import load_tower


def _find_source(path: str, config: EngineConfig) -> ImageSource | None:
    """Return where the encoder of a model is that is to take images, or None."""
    if config.disable_vision or config.load_format == "dummy":
        return None
    if config.model_impl == "transformers" or (source := find_source(path, config.mmproj)) is None:
        return None
    if config.batch_invariant:
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
    device = platform.device()
    return Encodings(
        load_tower(source, dtype, device, kernels, platform.lacking_dtypes),
        source.family,
        dtype,
        device,
        budget=config.mm_encoder_budget or platform.default_encoder_budget,
        most_bytes=config.mm_cache_bytes,
    )
