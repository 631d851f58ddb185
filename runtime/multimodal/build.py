"""Makes the encoder of an engine's model, if it takes images."""

from __future__ import annotations

from pathlib import Path

import torch

from ...kernels.linear import LinearKernels
from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from ..config.multimodal_registry import family_class, family_of
from ..files.folder import read_json
from .encodings import Encodings
from .family import ImageFamily
from .tower import load_tower


def _find_family(path: str, config: EngineConfig) -> ImageFamily | None:
    """Return the family of a model that is to take images, or None."""
    if config.disable_vision or config.load_format == "dummy" or Path(path).suffix == ".gguf":
        return None
    if config.model_impl == "transformers" or (module := family_of(path)) is None:
        return None
    family: ImageFamily = family_class(module)(read_json(Path(path, "config.json")))
    if config.batch_invariant:
        raise ValueError(
            "--batch-invariant takes texts alone: add --disable-vision, or leave it out"
        )
    return family


def make_encodings(
    path: str,
    config: EngineConfig,
    platform: Platform,
    dtype: torch.dtype,
    kernels: LinearKernels | None,
) -> Encodings | None:
    """Load the encoder of a model. Return None if it takes no images."""
    if (family := _find_family(path, config)) is None:
        return None
    device = platform.device()
    return Encodings(
        load_tower(Path(path), family, dtype, device, kernels, platform.lacking_dtypes),
        family,
        dtype,
        device,
        budget=config.mm_encoder_budget or platform.default_encoder_budget,
        most_bytes=config.mm_cache_bytes,
    )
